"""InferenceSession: runs an artifact, behaving as onnxruntime's class of that name."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mcompile.errors import OptionError
from mcompile.runtime.artifact import Artifact, align_constants, load, verify_artifact
from mcompile.runtime.binding import IOBinding
from mcompile.runtime.feeds import NodeArg, Port, detach, gather_inputs, select_outputs
from mcompile.runtime.host import HostOperator, host_calls, require_host_package
from mcompile.runtime.host_cpu import check_target
from mcompile.runtime.lease import Lease, link_program
from mcompile.runtime.memory import Array
from mcompile.runtime.options import CPU_PROVIDER, ModelMetadata, SessionOptions, check_providers, thread_count
from mcompile.runtime.pool import process_pool
from mcompile.runtime.profile import CallTiming, Profile, host_timing, table_timings
from mcompile.runtime.table import Words

_KEPT_LEASES = 16


class InferenceSession:
    """A loaded artifact. Safe to use from several threads at once, and in a forked child.

    `source` is a path, the file's bytes or an Artifact. `threads` (default: `intra_op_num_threads` of the options,
    else the cores available) is the number of threads of a run. Raises ArtifactError for a damaged artifact or one
    that this machine cannot run, OptionError for wrong options.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | bytes | Artifact,
        sess_options: SessionOptions | None = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
        *,
        threads: int | None = None,
        verify: bool = False,
    ) -> None:
        check_providers(providers)
        self._options = sess_options if sess_options is not None else SessionOptions()
        self.threads = thread_count(self._options, threads)
        self.artifact = artifact = source if isinstance(source, Artifact) else load(source, verify=verify)
        plan = artifact.plan
        if artifact is source:
            verify_artifact(artifact)
        check_target(artifact.manifest)
        require_host_package(host_calls(plan))
        self._program = link_program(plan, artifact.kernels, align_constants(artifact.constants), self.threads)
        self._inputs = tuple(Port("input", signature) for signature in plan.inputs)
        self._outputs = tuple(Port("output", signature) for signature in plan.outputs)
        self._pool = process_pool()
        self._pool.ensure(self.threads)
        self._walk = self._pool.walker.run
        self._leases: list[Lease] = []  # free ones; append and pop are atomic

    # --- what the model is ---

    def get_inputs(self) -> list[NodeArg]:
        return [NodeArg(signature) for signature in self.artifact.plan.inputs]

    def get_outputs(self) -> list[NodeArg]:
        return [NodeArg(signature) for signature in self.artifact.plan.outputs]

    def get_overridable_initializers(self) -> list[NodeArg]:
        """None: initializers are compiled in."""
        return []

    def get_modelmeta(self) -> ModelMetadata:
        return self.artifact.manifest.model

    def get_providers(self) -> list[str]:
        return [CPU_PROVIDER]

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        return {CPU_PROVIDER: {}}

    def get_session_options(self) -> SessionOptions:
        return self._options

    # --- running ---

    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        run_options: Any = None,
        *,
        outputs: Sequence[Array] | Mapping[str, Array] | None = None,
    ) -> list[Array]:
        """Compute the named outputs (all, in the model's order, for None or an empty list).

        Results are fresh arrays, or the caller's: `outputs` gives arrays for the outputs in the order of
        `output_names`, or by name for some of them. Raises OptionError for names, shapes, dtypes or arrays that do
        not fit, and ModelError if an operator on the host fails.
        """
        inputs = gather_inputs(self._inputs, input_feed)
        chosen = select_outputs(self._outputs, output_names) if output_names else None
        if outputs is None:
            results = [port.empty() for port in self._outputs]
        else:
            results = self._caller_outputs(chosen, outputs)
            inputs = detach(inputs, results)
        self._execute(inputs, results)
        return results if chosen is None else [results[position] for position in chosen]

    def _execute(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        pool = self._pool
        if pool.workers < self.threads - 1:  # in a forked child
            pool.ensure(self.threads)
        if self.threads > 1:
            pool.spread()
        lease = self._take_lease()
        try:
            lease.execute(self._walk, pool.state_address, inputs, outputs)
        finally:
            self._return_lease(lease)

    def _take_lease(self) -> Lease:
        try:
            return self._leases.pop()
        except IndexError:
            return Lease(self._program)

    def _return_lease(self, lease: Lease) -> None:
        if len(self._leases) < _KEPT_LEASES:
            self._leases.append(lease)

    def _caller_outputs(
        self, chosen: Sequence[int] | None, outputs: Sequence[Array] | Mapping[str, Array]
    ) -> list[Array]:
        """An array for each of the model's outputs: the caller's where given, else a fresh one."""
        if isinstance(outputs, Mapping):
            positions = select_outputs(self._outputs, list(outputs))
            given = dict(zip(positions, outputs.values(), strict=True))
        else:
            positions = list(chosen) if chosen is not None else list(range(len(self._outputs)))
            if len(outputs) != len(positions):
                raise OptionError(f"outputs: expected {len(positions)} arrays, got {len(outputs)}")
            given = dict(zip(positions, outputs, strict=True))
        return [
            port.check_writable(given[position]) if position in given else port.empty()
            for position, port in enumerate(self._outputs)
        ]

    # --- binding ---

    def io_binding(self) -> IOBinding:
        return IOBinding(self)

    def run_with_iobinding(self, iobinding: IOBinding, run_options: Any = None) -> None:
        """Run with the arrays that are bound; results are then in `iobinding.get_outputs()`."""
        iobinding.run()

    # --- profiling ---

    def profile(self, input_feed: Mapping[str, Any], repeat: int = 10, *, warmup: int = 1) -> Profile:
        """Time every kernel call over `repeat` runs, after `warmup` runs that are not counted."""
        if repeat < 1:
            raise OptionError(f"repeat: expected a number >= 1, got {repeat}")
        inputs = gather_inputs(self._inputs, input_feed)
        outputs = [port.empty() for port in self._outputs]
        self._pool.ensure(self.threads)
        lease = self._take_lease()
        runs: list[list[Words]] = []
        seconds = []
        try:
            for _ in range(warmup + repeat):
                self._pool.spread()
                start = time.perf_counter()
                runs.append(lease.profile(self._walk, self._pool.state_address, inputs, outputs))
                seconds.append(time.perf_counter() - start)
        finally:
            self._return_lease(lease)
        calls = self._call_timings(runs[warmup:])
        return Profile(self.threads, repeat, float(np.median(seconds[warmup:])), calls)

    def _call_timings(self, runs: Sequence[Sequence[Words]]) -> tuple[CallTiming, ...]:
        kernels = {kernel.name: kernel for kernel in self.artifact.kernels}
        timings: list[CallTiming] = []
        for number, segment in enumerate(self._program.segments):
            samples = [run[number] for run in runs]
            if isinstance(segment, HostOperator):
                timings.append(host_timing(number, segment.call, samples))
            else:
                timings.extend(table_timings(number, segment, kernels, samples))
        return tuple(timings)

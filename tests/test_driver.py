import hashlib
import os
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest

from mcompile.build_pool import _Worker, build_tasks
from mcompile.driver import CompileOptions, compile_file, compile_model, plan_program
from mcompile.errors import McompileError, OptionError
from mcompile.runtime import InferenceSession, to_bytes
from tests.conftest import convolution_model

COMPILE = """
import hashlib, sys
from pathlib import Path
from mcompile.driver import CompileOptions, compile_model
from mcompile.runtime import to_bytes
options = CompileOptions(target=sys.argv[2], threads=2, workers=int(sys.argv[3]), dims={"batch": 2})
print(hashlib.sha256(to_bytes(compile_model(Path(sys.argv[1]), options))).hexdigest())
"""


def digest_in_a_new_process(model, hash_seed, workers, target="x86-64-v3"):
    command = [sys.executable, "-c", COMPILE, str(model), target, str(workers)]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_hash_seeds_and_workers_make_no_difference(open_model):
    digests = {digest_in_a_new_process(open_model, seed, workers) for seed, workers in ((1, 1), (2, 2), (3, 3))}
    assert len(digests) == 1
    options = CompileOptions(target="x86-64-v3", threads=2, workers=1, dims={"batch": 2})
    assert hashlib.sha256(to_bytes(compile_model(open_model, options))).hexdigest() in digests


def reference(model, x):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


@pytest.mark.parametrize("target", ["cpu", "x86-64-v2", "x86-64-v3", "x86-64-v4"])
def test_every_x86_level_gives_the_reference_answer(target):
    model = convolution_model((2, 3, 8, 8))
    x = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
    try:
        session = InferenceSession(compile_model(model, CompileOptions(target=target, threads=2)))
    except McompileError as error:
        pytest.skip(f"this machine cannot run {target}: {error}")
    np.testing.assert_allclose(session.run(None, {"x": x})[0], reference(model, x), rtol=1e-4, atol=1e-6)


def test_aarch64_code_is_generated(tmp_path, small_model):
    summary = compile_file(small_model, tmp_path / "arm.mcm", CompileOptions(target="aarch64", threads=1))
    assert summary.code_bytes > 0


def test_progress_tells_the_stages_and_counts_the_tasks(small_model):
    said = []
    compile_model(small_model, CompileOptions(threads=1, workers=1), said.append)
    assert said[0] == "reading the model"
    assert any(text.startswith("building kernels: 1 of ") for text in said)


def test_batch_must_fit_what_the_model_fixes(small_model):
    with pytest.raises(OptionError, match="--batch 3: the first dim of input 'x' is fixed to 2"):
        compile_model(small_model, CompileOptions(batch=3))


def test_the_first_error_is_raised_whoever_met_it(small_model):
    jobs = list(plan_program(small_model, CompileOptions(threads=1)).jobs)
    broken = [type(job)("not a name\0", job.task) if index else job for index, job in enumerate(jobs)] * 4
    for workers in (1, 2):
        with pytest.raises(McompileError, match="not a name"):
            build_tasks(broken, workers)


def test_workers_end_with_the_compile(small_model):
    jobs = plan_program(small_model, CompileOptions(threads=1)).jobs * 3
    counts = []
    built = build_tasks(jobs, 2, counts.append)
    assert counts == list(range(1, len(jobs) + 1))
    assert [task.kernels[0].name for task in built] == [job.name for job in jobs]


def test_ctrl_c_does_not_reach_a_build_process_that_starts():
    with _Worker() as worker:
        assert os.getpgid(worker._child.pid) != os.getpgrp()


def test_a_gpu_target_is_refused(small_model):
    with pytest.raises(OptionError, match="--target cuda:sm_80: models cannot be compiled for a GPU yet"):
        compile_model(small_model, CompileOptions("cuda:sm_80"))

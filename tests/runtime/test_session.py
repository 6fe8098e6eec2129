"""InferenceSession: onnxruntime's behaviour, what it accepts and refuses, memory over many runs."""

from __future__ import annotations

import ctypes
import dataclasses
import resource
import threading
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from mcompile.dtypes import DType, TensorType
from mcompile.errors import ArtifactError, ModelError, OptionError
from mcompile.runtime import (
    Artifact,
    ExecutionMode,
    GraphOptimizationLevel,
    InferenceSession,
    OrtValue,
    RunOptions,
    SessionOptions,
    get_available_providers,
)
from mcompile.runtime.plan import HostCall, KernelCall, NativeSegment, Signature, Space, Tensor
from tests.runtime.kernels import (
    IN,
    OUT,
    add_table,
    arena,
    chain_answer,
    chain_artifact,
    copy,
    make_artifact,
    place,
    signature,
)


def two_by_two() -> Artifact:
    """p = a, q = b + (1, 2, 3, 4)"""
    calls = (
        KernelCall("copy", (place(Space.INPUT, 0, 0), place(Space.OUTPUT, 0, 0)), "first"),
        KernelCall("add_table", (place(Space.INPUT, 0, 1), place(Space.OUTPUT, 0, 1)), "second"),
    )
    names = (signature("a", 2, 2), signature("b", 1, 4)), (signature("p", 2, 2), signature("q", 1, 4))
    return make_artifact((copy(1, 4), add_table(2, 2)), calls, *names)


A = np.arange(4, dtype=np.float32).reshape(2, 2)
B = np.full((1, 4), 10, np.float32)
Q = np.array([[11, 12, 13, 14]], np.float32)


@pytest.fixture(scope="module")
def session() -> InferenceSession:
    return InferenceSession(two_by_two(), threads=2)


# --- description ---


def test_inputs_and_outputs_are_described_as_by_onnxruntime() -> None:
    types = [DType.FLOAT32, DType.FLOAT64, DType.INT64, DType.UINT8, DType.BOOL, DType.FLOAT16, DType.INT32]
    elements = ["FLOAT", "DOUBLE", "INT64", "UINT8", "BOOL", "FLOAT16", "INT32"]
    infos = [helper.make_tensor_value_info(f"x{i}", getattr(TensorProto, e), [2, 3]) for i, e in enumerate(elements)]
    results = [helper.make_tensor_value_info(f"y{i}", getattr(TensorProto, e), [2, 3]) for i, e in enumerate(elements)]
    nodes = [helper.make_node("Identity", [f"x{i}"], [f"y{i}"]) for i in range(len(elements))]
    model = helper.make_model(
        helper.make_graph(nodes, "g", infos, results), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    peer = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    ours = InferenceSession(
        make_artifact(
            (),
            (),
            tuple(signature(f"x{i}", 2, 3, dtype=t) for i, t in enumerate(types)),
            tuple(signature(f"y{i}", 2, 3, dtype=t) for i, t in enumerate(types)),
        )
    )
    for mine, theirs in ((ours.get_inputs(), peer.get_inputs()), (ours.get_outputs(), peer.get_outputs())):
        assert [(n.name, n.shape, n.type) for n in mine] == [(n.name, n.shape, n.type) for n in theirs]


def test_declared_dims_keep_their_names() -> None:
    declared = Signature("x", TensorType((1, 4), DType.FLOAT32), ("batch", 4))
    artifact = make_artifact((copy(1, 4),), (KernelCall("copy", (IN, OUT)),), (declared,), (signature("y", 1, 4),))
    node = InferenceSession(artifact).get_inputs()[0]
    assert (node.shape, node.declared_shape) == ([1, 4], ["batch", 4])
    assert "tensor(float)" in repr(node)


def test_metadata_and_providers(session: InferenceSession) -> None:
    meta = session.get_modelmeta()
    assert (meta.producer_name, meta.version, meta.custom_metadata_map) == ("", 0, {})
    assert session.get_providers() == get_available_providers() == ["CPUExecutionProvider"]
    assert session.get_overridable_initializers() == []


def test_onnxruntimes_options_are_accepted() -> None:
    options = SessionOptions()
    options.intra_op_num_threads = 3
    options.execution_mode = ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = GraphOptimizationLevel.ORT_ENABLE_ALL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    made = InferenceSession(two_by_two(), options, ["CUDAExecutionProvider", ("CPUExecutionProvider", {})])
    assert made.threads == 3
    assert made.get_session_options().get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert InferenceSession(two_by_two(), onnxruntime.SessionOptions(), threads=1).threads == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"providers": ["CUDAExecutionProvider"]}, "expected CPUExecutionProvider among them"),
        ({"threads": 0}, "threads: expected"),
        ({"threads": 1000}, "threads: expected"),
    ],
)
def test_wrong_options_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        InferenceSession(two_by_two(), **arguments)


# --- feeds ---


def test_run_returns_fresh_arrays_in_order(session: InferenceSession) -> None:
    first = session.run(None, {"b": B, "a": A})
    second = session.run([], {"a": A, "b": B}, RunOptions())
    for results in (first, second):
        assert np.array_equal(results[0], A)
        assert np.array_equal(results[1], Q)
    assert not np.may_share_memory(first[0], second[0])
    assert first[1].flags.c_contiguous
    assert first[1].flags.writeable


def test_outputs_can_be_chosen_and_reordered(session: InferenceSession) -> None:
    q, p = session.run(["q", "p"], {"a": A, "b": B})
    assert np.array_equal(p, A)
    assert np.array_equal(q, Q)
    assert len(session.run(["q"], {"a": A, "b": B})) == 1


def _misaligned() -> np.ndarray:
    raw = np.zeros(17, np.uint8)
    array = raw[1:].view(np.float32).reshape(1, 4)
    array[...] = B
    return array


def _read_only() -> np.ndarray:
    array = B.copy()
    array.flags.writeable = False
    return array


class _Subclass(np.ndarray):
    pass


class _Dlpack:
    def __dlpack__(self, **options: Any) -> Any:
        return B.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return B.__dlpack_device__()


@pytest.mark.parametrize(
    "value",
    [
        np.full((1, 8), 10, np.float32)[:, ::2],
        np.full((4, 1), 10, np.float32).T,
        np.full((1, 4), 10, np.float32)[:, ::-1],
        B.astype(">f4"),
        _misaligned(),
        _read_only(),
        B.view(_Subclass),
        [[10.0, 10.0, 10.0, 10.0]],
        [[10, 10, 10, 10]],
        OrtValue.ortvalue_from_numpy(B),
        _Dlpack(),
    ],
    ids=["strided", "transposed", "negative", "big", "misaligned", "read-only", "sub", "list", "ints", "ort", "dlpack"],
)
def test_inputs_that_need_a_copy_get_one(session: InferenceSession, value: Any) -> None:
    assert np.array_equal(session.run(["q"], {"a": A, "b": value})[0], Q)


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({}, "inputs: missing: a, b; the model has a, b"),
        ({"a": A}, "inputs: missing: b"),
        ({"a": A, "c": B}, "missing: b; unknown: c"),
        ({"a": A, "b": B, "z": B}, "inputs: unknown: z"),
        ({"a": A, "b": B[0]}, r"input 'b': expected float32\[1, 4\], got float32\[4\]"),
        ({"a": A, "b": B.astype(np.float64)}, r"input 'b': expected float32\[1, 4\], got float64\[1, 4\]"),
        ({"a": A, "b": B.astype(np.int32)}, "got int32"),
        ({"a": A, "b": np.array([["x"] * 4])}, "got <U1"),
        ({"a": A, "b": [[1, 2], [3]]}, "got a ragged list"),
        ({"a": A, "b": None}, "expected an array of .*, got NoneType"),
        ({"a": A, "b": [["a"] * 4]}, "got <U1"),
        ({"a": A, "b": np.float32(1)}, r"got float32\[\]"),
    ],
)
def test_wrong_feeds_are_refused(session: InferenceSession, feeds: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        session.run(None, feeds)


def test_floats_never_become_ints() -> None:
    artifact = make_artifact(
        (copy(1, 4),),
        (KernelCall("copy", (IN, OUT)),),
        (signature("x", 4, dtype=DType.INT32),),
        (signature("y", 4, dtype=DType.INT32),),
    )
    session = InferenceSession(artifact)
    assert session.run(None, {"x": [1, 2, 3, 4]})[0].tolist() == [1, 2, 3, 4]
    with pytest.raises(OptionError, match="got float64"):
        session.run(None, {"x": [1.5, 2, 3, 4]})


def test_unknown_outputs_are_refused(session: InferenceSession) -> None:
    with pytest.raises(OptionError, match="outputs: unknown: r; the model has p, q"):
        session.run(["p", "r"], {"a": A, "b": B})


def test_scalars_and_empty_tensors() -> None:
    calls = (KernelCall("copy", (IN, OUT)),)
    scalar = InferenceSession(make_artifact((copy(1, 1),), calls, (signature("x"),), (signature("y"),)))
    assert scalar.run(None, {"x": np.float32(3)})[0].shape == ()
    assert scalar.run(None, {"x": 3.0})[0] == 3
    empty = InferenceSession(make_artifact((copy(0, 1),), calls, (signature("x", 0, 3),), (signature("y", 0, 3),)))
    assert empty.run(None, {"x": np.zeros((0, 3), np.float32)})[0].shape == (0, 3)


# --- the caller's outputs ---


def test_results_are_written_to_the_callers_arrays(session: InferenceSession) -> None:
    p, q = np.zeros((2, 2), np.float32), np.zeros((1, 4), np.float32)
    results = session.run(None, {"a": A, "b": B}, outputs=[p, q])
    assert results[0] is p
    assert results[1] is q
    assert np.array_equal(q, Q)
    q[:] = 0
    assert session.run(["q"], {"a": A, "b": B}, outputs=[q])[0] is q
    named = session.run(None, {"a": A, "b": B}, outputs={"q": q})
    assert named[1] is q
    assert np.array_equal(named[0], A)


def test_an_output_may_lie_on_an_input(session: InferenceSession) -> None:
    a, b = A.copy(), B.copy()
    session.run(None, {"a": a, "b": b}, outputs={"p": b.reshape(2, 2), "q": a.reshape(1, 4)})
    assert np.array_equal(b.reshape(2, 2), A)
    assert np.array_equal(a.reshape(1, 4), Q)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([np.zeros((2, 2), np.float32)], "outputs: expected 2 arrays, got 1"),
        ({"q": np.zeros((1, 4), np.float64)}, r"output 'q': expected float32\[1, 4\], got float64"),
        ({"q": np.zeros(4, np.float32)}, r"got float32\[4\]"),
        ({"q": np.zeros((1, 8), np.float32)[:, ::2]}, "contiguous=False"),
        ({"q": _read_only()}, "writable=False"),
        ({"q": [[0.0] * 4]}, "expected an array to write to, got list"),
        ({"r": np.zeros((1, 4), np.float32)}, "unknown: r"),
    ],
)
def test_wrong_output_arrays_are_refused(session: InferenceSession, outputs: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        session.run(None, {"a": A, "b": B}, outputs=outputs)


def test_outputs_on_top_of_each_other_are_refused(session: InferenceSession) -> None:
    memory = np.zeros(4, np.float32)
    with pytest.raises(OptionError, match="share memory"):
        session.run(None, {"a": A, "b": B}, outputs=[memory.reshape(2, 2), memory.reshape(1, 4)])


def test_constants_of_an_artifact_in_memory_are_aligned() -> None:
    raw = np.zeros(64 + 17, np.uint8)
    constants = raw[17:]
    artifact = make_artifact(
        (copy(1, 16),),
        (KernelCall("copy", (place(Space.CONSTANTS), OUT)),),
        (),
        (signature("y", 16),),
        constants=constants,
    )
    session = InferenceSession(artifact)
    assert session._program.constants.ctypes.data % 64 == 0
    assert not session.run(None, {})[0].any()
    with pytest.raises(ArtifactError, match="63 bytes of constants; the plan says 64"):
        InferenceSession(dataclasses.replace(artifact, constants=constants[1:]))


class _OnAnotherDevice:
    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("on device cuda:0")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def test_tensors_of_another_device_are_refused(session: InferenceSession) -> None:
    with pytest.raises(OptionError, match="input 'b': no array of the CPU"):
        session.run(None, {"a": A, "b": _OnAnotherDevice()})


# --- binding ---


def test_io_binding(session: InferenceSession) -> None:
    binding = session.io_binding()
    binding.bind_cpu_input("a", A)
    binding.bind_input("b", "cpu", 0, np.float32, (1, 4), B.ctypes.data)
    q = np.zeros((1, 4), np.float32)
    binding.bind_output("q", "cpu", 0, np.float32, (1, 4), q.ctypes.data)
    binding.bind_output("p")
    for _ in range(2):
        q[:] = 0
        session.run_with_iobinding(binding)
        assert np.array_equal(q, Q)
    values = binding.get_outputs()
    assert values[0].data_ptr() == q.ctypes.data
    assert (values[1].shape(), values[1].device_name()) == ([2, 2], "cpu")
    assert np.array_equal(np.from_dlpack(values[1]), A)
    assert np.array_equal(binding.copy_outputs_to_cpu()[1], A)
    binding.clear_binding_inputs()
    with pytest.raises(OptionError, match="missing: a, b"):
        session.run_with_iobinding(binding)
    with pytest.raises(OptionError, match="expected 'cpu'"):
        binding.bind_output("q", "cuda")


# --- many runs ---


def test_no_leak_over_ten_thousand_runs() -> None:
    session = InferenceSession(chain_artifact(), threads=2)
    x = np.ones((16, 64), np.float32)
    for _ in range(500):
        session.run(None, {"x": x})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(10_000):
        session.run(None, {"x": x})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2048  # KiB
    assert len(session._leases) == 1


def test_sessions_give_their_memory_back() -> None:
    artifact = make_artifact(
        (copy(1, 4),), (KernelCall("copy", (IN, OUT)),), (signature("x", 4),), (signature("y", 4),), arena_bytes=1 << 20
    )
    x = np.ones(4, np.float32)
    for _ in range(20):
        InferenceSession(artifact, threads=1).run(None, {"x": x})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(200):
        InferenceSession(artifact, threads=1).run(None, {"x": x})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 << 10


def test_leases_are_kept_in_bounds() -> None:
    session = InferenceSession(chain_artifact(), threads=1)
    taken = [session._take_lease() for _ in range(40)]
    for lease in taken:
        session._return_lease(lease)
    assert len(session._leases) == 16


def test_no_memory_is_an_option_error() -> None:
    artifact = make_artifact((), (), (), (), arena_bytes=1 << 42)
    with pytest.raises(OptionError, match="it needs 4398046511104 bytes"):
        InferenceSession(artifact).run(None, {})


# --- host operators ---


def _host_model(op: str, inputs: int, dtype: int = TensorProto.FLOAT) -> bytes:
    node = helper.make_node(op, [f"i{n}" for n in range(inputs)], ["o"])
    infos = [helper.make_tensor_value_info(f"i{n}", dtype, None) for n in range(inputs)]
    graph = helper.make_graph([node], "host", infos, [helper.make_tensor_value_info("o", dtype, None)])
    return bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    )


def _host_artifact(model: bytes, shape: tuple[int, ...] = (4,)) -> Artifact:
    """t = x + table; u = host(t, constant) ; y = u + table"""
    type_ = TensorType((4,), DType.FLOAT32)
    left, right = Tensor("t", type_, arena(0)), Tensor("c", type_, place(Space.CONSTANTS))
    result = Tensor("u", TensorType(shape, DType.FLOAT32), arena(64))
    artifact = make_artifact(
        (add_table(1, 4),),
        (),
        (signature("x", 4),),
        (signature("y", 4),),
        arena_bytes=128,
        constants=np.array([2, 2, 2, 2], np.float32),
    )
    segments = (
        NativeSegment((KernelCall("add_table", (IN, arena(0)), "before"),)),
        HostCall("Mul", "middle", model, (left, right), (result,)),
        NativeSegment((KernelCall("add_table", (arena(64), OUT), "after"),)),
    )
    return dataclasses.replace(artifact, plan=dataclasses.replace(artifact.plan, segments=segments))


def test_host_operators_run_between_native_segments() -> None:
    session = InferenceSession(_host_artifact(_host_model("Mul", 2)), threads=2)
    x = np.zeros(4, np.float32)
    for _ in range(3):
        assert session.run(None, {"x": x})[0].tolist() == [3, 6, 9, 12]
    assert session.artifact.host_ops == ("Mul (middle)",)
    profile = session.profile({"x": x}, 2)
    assert [(call.kernel, call.is_host) for call in profile.calls] == [
        ("add_table", False),
        ("Mul", True),
        ("add_table", False),
    ]


def test_host_operators_on_inputs_and_outputs() -> None:
    type_ = TensorType((2, 2), DType.FLOAT32)
    inputs = (Tensor("x", type_, IN), Tensor("x", type_, IN))
    call = HostCall("Add", "n", _host_model("Add", 2), inputs, (Tensor("y", type_, OUT),))
    artifact = make_artifact((), (), (signature("x", 2, 2),), (signature("y", 2, 2),))
    artifact = dataclasses.replace(artifact, plan=dataclasses.replace(artifact.plan, segments=(call,)))
    assert np.array_equal(InferenceSession(artifact).run(None, {"x": A})[0], A + A)


def test_a_host_result_of_another_shape_is_a_model_error() -> None:
    session = InferenceSession(_host_artifact(_host_model("Mul", 2), shape=(2, 2)))
    with pytest.raises(ModelError, match=r"host operator Mul \(middle\): result 'u' is float32\[4\], but"):
        session.run(None, {"x": np.zeros(4, np.float32)})
    assert len(session._leases) == 1


def test_a_broken_host_model_is_an_artifact_error() -> None:
    with pytest.raises(ArtifactError, match=r"host operator Mul \(middle\): its model cannot be read"):
        InferenceSession(_host_artifact(b"\xff\xffnonsense"))
    with pytest.raises(ArtifactError, match="its model has 1 inputs, the plan gives 2"):
        InferenceSession(_host_artifact(_host_model("Neg", 1)))


def test_a_missing_onnx_package_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ArtifactError, match=r"need the onnx package, which is not installed: Mul \(middle\)"):
        InferenceSession(_host_artifact(_host_model("Mul", 2)))
    assert onnx.__version__


# --- profile ---


def test_profile_charges_every_call() -> None:
    session = InferenceSession(chain_artifact(4), threads=2)
    profile = session.profile({"x": np.zeros((16, 64), np.float32)}, 5)
    assert (profile.threads, profile.repeat) == (2, 5)
    assert [call.node for call in profile.calls] == ["node0", "node1", "node2", "node3", "last"]
    assert all(call.seconds >= call.min_seconds > 0 for call in profile.calls)
    assert sum(call.min_seconds for call in profile.calls) < profile.seconds
    merged = profile.by_kernel()
    assert {call.kernel: call.count for call in merged} == {"parallel": 2, "serial": 2, "copy": 1}
    assert {call.node for call in merged} == {"node0, node3", "node1, node2", "last"}
    assert profile.calls[0].flops_per_second > 0
    assert profile.calls[0].bytes_per_second > 0
    data = profile.to_json()
    assert data["calls"][0]["kernel"] == "parallel"
    with pytest.raises(OptionError, match="repeat"):
        session.profile({"x": np.zeros((16, 64), np.float32)}, 0)


def test_a_run_after_profiling_writes_no_times() -> None:
    session = InferenceSession(chain_artifact(), threads=2)
    x = np.zeros((16, 64), np.float32)
    session.profile({"x": x}, 1)
    step = session._leases[0]._steps[0]
    assert isinstance(step, ctypes.Structure)
    assert step.times == 0
    assert np.array_equal(session.run(None, {"x": x})[0], chain_answer(x))


def test_concurrent_runs_have_arenas_of_their_own() -> None:
    session = InferenceSession(chain_artifact(6), threads=1)
    barrier = threading.Barrier(4)
    wrong: list[int] = []

    def work(seed: int) -> None:
        x = np.full((16, 64), seed, np.float32)
        barrier.wait(10)
        for _ in range(300):
            if not np.array_equal(session.run(None, {"x": x})[0], chain_answer(x, 6)):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong

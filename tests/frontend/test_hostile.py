"""Broken, hostile and unsupported models: each one clear ModelError that says what and where, never a traceback."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from mcompile.errors import ModelError
from mcompile.frontend import import_model
from tests.frontend.models import FLOAT, INT64, array, info, int64, model, node


def _fails(source: object, *texts: str) -> ModelError:
    with pytest.raises(ModelError) as caught:
        import_model(source)  # type: ignore[arg-type]
    message = str(caught.value)
    for text in texts:
        assert text in message, message
    assert len(message.splitlines()) < 25, "more than a screen"
    return caught.value


def _good() -> onnx.ModelProto:
    return model(
        [node("MatMul", ["x", "w"], ["y"])], [info("x", [2, 300])], [info("y", [2, 40])], {"w": array(300, 40)}
    )


# --- files ---


def test_missing_file(tmp_path: Path) -> None:
    _fails(tmp_path / "none.onnx", "none.onnx", "No such file")


def test_folder(tmp_path: Path) -> None:
    _fails(tmp_path, "folder")


def test_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.touch()
    _fails(path, "empty")
    _fails(b"", "no bytes")


@pytest.mark.parametrize("data", [b"\xff" * 100, b"PK\x03\x04" + bytes(64), b"not a model", bytes(range(256)) * 8])
def test_garbage(data: bytes) -> None:
    _fails(data, "not an ONNX model")


def test_every_truncation_is_refused() -> None:
    data = _good().SerializeToString()
    for size in [*range(1, 60), *range(60, len(data), 997), len(data) - 1]:
        with pytest.raises(ModelError):
            import_model(data[:size])


def test_flipped_bytes_never_escape_as_other_errors() -> None:
    data = bytearray(_good().SerializeToString())
    generator = np.random.default_rng(0)
    for _ in range(300):
        broken = bytearray(data)
        broken[int(generator.integers(0, 200))] = int(generator.integers(0, 256))
        with contextlib.suppress(ModelError):
            import_model(bytes(broken))


# --- structure ---


def test_cycle() -> None:
    nodes = [node("Add", ["x", "b"], ["a"], name="first"), node("Relu", ["a"], ["b"], name="second")]
    _fails(model(nodes, [info("x", [3])], [info("b", [3])]), "cycle", "'first' (Add", "'second' (Relu")


def test_missing_initializer_and_undefined_output() -> None:
    nodes = [node("MatMul", ["x", "w"], ["y"], name="product")]
    proto = model(nodes, [info("x", [2, 3])], [info("z", [2, 4])])
    error = _fails(proto, "'product' (MatMul, opset 17)", "input 'w'", "output 'z'")
    assert len(error.problems) == 2


def test_a_value_defined_twice() -> None:
    nodes = [node("Relu", ["x"], ["y"], name="a"), node("Neg", ["x"], ["y"], name="b")]
    _fails(model(nodes, [info("x", [3])], [info("y", [3])]), "'b' (Neg", "'y' is defined already")


@pytest.mark.parametrize(
    ("opset", "ir_version", "text"), [(6, 3, "opset 6"), (99, 8, "opset 99"), (17, 99, "IR version")]
)
def test_versions(opset: int, ir_version: int, text: str) -> None:
    _fails(
        model([node("Relu", ["x"], ["y"])], [info("x", [3])], [info("y", [3])], opset=opset, ir_version=ir_version),
        text,
    )


def test_wrong_dtype() -> None:
    nodes = [node("Add", ["x", "i"], ["y"], name="sum")]
    proto = model(nodes, [info("x", [3]), info("i", [3], INT64)], [info("y", [3])])
    _fails(proto, "'sum' (Add, opset 17)", "input 1 (B) is int64[3]", "expected float32")


def test_wrong_number_of_inputs_and_attributes() -> None:
    nodes = [node("Add", ["x"], ["a"], name="sum"), node("Relu", ["x"], ["y"], name="relu", alpha=1.0)]
    error = _fails(model(nodes, [info("x", [3])], [info("y", [3])]), "'sum'", "'relu'")
    assert len(error.problems) == 2


def test_shapes_that_do_not_fit() -> None:
    nodes = [node("MatMul", ["x", "w"], ["y"], name="product")]
    _fails(model(nodes, [info("x", [2, 3])], [info("y", [2, 5])], {"w": array(4, 5)}), "'product' (MatMul", "3", "4")


def test_shapes_that_only_a_load_would_notice() -> None:
    nodes = [node("Conv", ["x", "w", "b"], ["y"], name="conv")]
    proto = model(nodes, [info("x", [1, 3, 4, 4])], [info("y", None)], {"w": array(6, 3, 1, 1), "b": array(5)})
    _fails(proto, "'conv' (Conv", "input 2 of shape [5] is too small")


def test_long_lists_of_problems_are_shortened() -> None:
    nodes = [node("Frobnicate", ["x"], [f"a{i}"], name=f"n{i}") for i in range(100)]
    proto = model([*nodes, node("Relu", ["x"], ["y"])], [info("x", [3])], [info("y", [3])])
    _fails(proto, "node 'n0'", "and 96 more (Frobnicate, opset 17)")


def test_wrong_declared_output() -> None:
    proto = model([node("Relu", ["x"], ["y"])], [info("x", [2, 3])], [info("y", [2, 4])])
    _fails(proto, "output 'y' is declared as float32[2, 4]", "float32[2, 3]")
    proto = model([node("Relu", ["x"], ["y"])], [info("x", [2, 3])], [info("y", [2, 3], INT64)])
    _fails(proto, "output 'y' is declared as int64[2, 3]")


def test_every_unsupported_op_is_listed() -> None:
    nodes = [
        node("Frobnicate", ["x"], ["a"], name="one"),
        node("Frobnicate", ["a"], ["b"], name="three"),
        node("Blub", ["x"], ["c"], name="two", domain="com.example"),
        node("Relu", ["x"], ["y"]),
    ]
    outputs = [info("b", None), info("c", None), info("y", [3])]
    proto = model(nodes, [info("x", [3])], outputs, domains={"com.example": 1})
    error = _fails(proto, "'one' (Frobnicate, opset 17)", "'two' (com.example.Blub, opset 1)")
    assert len(error.problems) == 3


def test_shapes_that_depend_on_data() -> None:
    nodes = [node("NonZero", ["x"], ["i"], name="where")]
    _fails(model(nodes, [info("x", [4])], [info("i", [1, "n"], INT64)]), "'where' (NonZero", "depends on data")


@pytest.mark.parametrize("kind", ["sequence", "string"])
def test_inputs_that_are_no_numeric_tensors(kind: str) -> None:
    if kind == "sequence":
        value = helper.make_tensor_sequence_value_info("x", FLOAT, [3])
    else:
        value = info("x", [3], TensorProto.STRING)
    proto = model([node("Identity", ["x"], ["y"])], [value], [info("y", [3])])
    _fails(proto, "input 'x'", kind if kind == "sequence" else "STRING")


def test_sparse_initializer() -> None:
    proto = model([node("MatMul", ["x", "w"], ["y"])], [info("x", [2, 3])], [info("y", [2, 3])])
    values = helper.make_tensor("w", FLOAT, [1], [1.0])
    indices = helper.make_tensor("w_indices", INT64, [1], [4])
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [3, 3]))
    _fails(proto, "sparse initializer 'w'")


# --- sizes ---


def test_absurd_input_dims() -> None:
    huge = 1 << 20
    _fails(
        model([node("Relu", ["x"], ["y"])], [info("x", [huge, huge])], [info("y", [huge, huge])]),
        "input 'x'",
        "elements",
    )


@pytest.mark.parametrize(
    ("nodes", "constants"),
    [
        ([node("ConstantOfShape", ["s"], ["y"], name="n")], {"s": int64(1 << 20, 1 << 20)}),
        ([node("Expand", ["x", "s"], ["y"], name="n")], {"s": int64(1 << 20, 1 << 20, 1)}),
        (
            [node("Range", ["a", "b", "c"], ["y"], name="n")],
            {"a": np.int64(0), "b": np.int64(1 << 40), "c": np.int64(1)},
        ),
        ([node("Tile", ["x", "s"], ["y"], name="n")], {"s": int64(1 << 40)}),
        ([node("Pad", ["x", "s"], ["y"], name="n")], {"s": int64(0, 1 << 40)}),
    ],
)
def test_absurd_results(nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray]) -> None:
    arrays = {name: np.asarray(value) for name, value in constants.items()}
    proto = model(nodes, [info("x", [1])], [info("y", None)], arrays)
    _fails(proto, "'n' (", "elements")


def test_large_results_of_small_constants_are_not_folded() -> None:
    nodes = [node("ConstantOfShape", ["s"], ["c"]), node("Add", ["x", "c"], ["y"])]
    proto = model(nodes, [info("x", [1])], [info("y", None)], {"s": int64(1 << 28)})
    imported = import_model(proto)
    assert "c" not in imported.graph.constants


def test_data_that_does_not_fit_its_shape() -> None:
    proto = _good()
    proto.graph.initializer[0].dims[0] = 301
    _fails(proto, "tensor 'w'", "expected 48160 bytes", "got 48000")
    proto.graph.initializer[0].dims[0] = -1
    _fails(proto, "tensor 'w'", "negative dim")
    proto.graph.initializer[0].dims[:] = [1 << 20, 1 << 20]
    _fails(proto, "tensor 'w'", "elements")
    small = model([node("Add", ["x", "c"], ["y"])], [info("x", [2])], [info("y", [2])], {"c": array(2)})
    small.graph.initializer[0].dims[0] = 3
    _fails(small, "tensor 'c'")


def test_deep_nesting() -> None:
    body = helper.make_graph([node("Neg", ["x"], ["o"])], "b", [], [info("o", [3])])
    for _ in range(40):
        branch = node("If", ["c"], ["o"], then_branch=body, else_branch=body)
        body = helper.make_graph([branch], "b", [], [info("o", [3])])
        if body.ByteSize() > 1 << 15:
            break
    proto = model([node("If", ["c"], ["y"], then_branch=body, else_branch=body)], [info("x", [3])], [info("y", [3])])
    proto.graph.initializer.append(numpy_helper.from_array(np.array(True), "c"))
    with contextlib.suppress(ModelError):
        import_model(proto)


# --- external data ---


def _external(tmp_path: Path, change: Callable[[dict[str, str]], None]) -> Path:
    proto = _good()
    path = tmp_path / "model" / "m.onnx"
    path.parent.mkdir(exist_ok=True)
    onnx.save(proto, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    loaded = onnx.load(path, load_external_data=False)
    tensor = loaded.graph.initializer[0]
    entries = {entry.key: entry.value for entry in tensor.external_data}
    change(entries)
    del tensor.external_data[:]
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    path.write_bytes(loaded.SerializeToString())
    return path


@pytest.mark.parametrize(
    ("location", "text"),
    [
        ("/etc/passwd", "relative path"),
        ("../secret.bin", "relative path"),
        ("sub/../../secret.bin", "relative path"),
        ("link.bin", "symbolic link"),
        ("linked/secret.bin", "symbolic link"),
        ("none.bin", "no such file"),
        ("", "relative path"),
        (".", "no such file"),
    ],
)
def test_external_data_outside_the_folder(tmp_path: Path, location: str, text: str) -> None:
    (tmp_path / "secret.bin").write_bytes(bytes(48000))
    path = _external(tmp_path, lambda entries: entries.update(location=location))
    os.symlink(tmp_path / "secret.bin", path.parent / "link.bin")
    os.symlink(tmp_path, path.parent / "linked")
    _fails(path, "tensor 'w'", text)


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({"offset": "100"}, "outside its file"),
        ({"offset": "-4"}, "outside its file"),
        ({"length": "4"}, "expected 48000 bytes"),
        ({"offset": "many"}, "invalid literal"),
    ],
)
def test_external_ranges(tmp_path: Path, entries: dict[str, str], text: str) -> None:
    _fails(_external(tmp_path, lambda given: given.update(entries)), "tensor 'w'", text)


def test_external_data_of_bytes(tmp_path: Path) -> None:
    path = _external(tmp_path, lambda entries: None)
    _fails(path.read_bytes(), "tensor 'w'", "no folder")

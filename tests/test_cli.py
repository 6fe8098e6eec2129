"""The commands as a user meets them: what is printed where, and the exit status."""

import json
import os
import sys
import threading

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from mcompile import cli


@pytest.fixture
def mcompile(monkeypatch, capsys):
    """Runs the console script; returns (exit status, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["mcompile", *map(str, arguments)])
        with pytest.raises(SystemExit) as raised:
            cli.main()
        captured = capsys.readouterr()
        return raised.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture
def artifact(mcompile, small_model):
    path = small_model.with_suffix(".mcm")
    assert mcompile("compile", small_model, "--threads", 1)[0] == 0
    return path


# --- what works ---


def test_compile_writes_the_artifact_and_a_summary(mcompile, small_model, tmp_path):
    status, out, err = mcompile("compile", small_model, "-o", tmp_path / "a.mcm", "--json", "--threads", 1)
    summary = json.loads(out)
    assert (status, err) == (0, "")
    assert (tmp_path / "a.mcm").stat().st_size == summary["size_bytes"]
    assert (summary["host_ops"], summary["segments"], summary["nodes_before"]) == ([], 1, 8)


def test_run_writes_outputs_that_compare_agrees_with(mcompile, artifact, tmp_path):
    x = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    status, out, _ = mcompile("run", artifact, "--input", tmp_path / "x.npz", "--output", tmp_path / "y.npz")
    assert status == 0
    assert "float32" in out
    with np.load(tmp_path / "y.npz") as outputs:
        np.testing.assert_allclose(outputs["y"].sum(axis=1), [1, 1], rtol=1e-5)


def test_run_with_a_seed_gives_the_same_numbers(mcompile, artifact):
    first, second, third = (mcompile("run", artifact, "--json", "--seed", seed)[1] for seed in (1, 1, 2))
    assert first == second != third


def test_compare_a_model_passes_with_the_promised_keys(mcompile, small_model):
    status, out, err = mcompile("compare", small_model, "--json", "--threads", 1, "--repeat", 4)
    result = json.loads(out)
    assert (status, result["ok"], result["host_ops"], result["segments"]) == (0, True, [], 1)
    assert result["max_scaled_error"] <= 1e-4
    promised = (
        "model threads ok max_abs_error max_scaled_error outputs mcompile_ms onnxruntime_ms speedup compile_seconds "
        "host_ops segments settings"
    )
    assert set(promised.split()) <= set(result)
    assert result["settings"]["onnxruntime"]["graph_optimization_level"] == "all"
    assert result["settings"]["inputs"] >= 3
    assert err == ""


def test_compare_an_artifact_finds_its_model_beside_it(mcompile, artifact):
    status, out, _ = mcompile("compare", artifact, "--repeat", 0, "--threads", 1)
    assert status == 0
    assert out.splitlines()[-1] == "PASSED"


def test_compare_with_an_impossible_tolerance_fails_with_status_1(mcompile, small_model):
    options = ("--repeat", 0, "--rtol", 0, "--atol", 0, "--no-localise", "--threads", 1)
    status, out, _ = mcompile("compare", small_model, *options)
    assert status == 1
    assert out.splitlines()[-1] == "FAILED"


def test_compare_binds_the_batch(mcompile, open_model):
    status, out, _ = mcompile("compare", open_model, "--batch", 3, "--repeat", 0, "--json", "--threads", 1)
    assert status == 0
    assert json.loads(out)["outputs"][0]["shape"] == [3, 5]


@pytest.mark.parametrize("stage", ["graph", "groups", "tasks", "trace", "loops", "llvm", "asm"])
def test_inspect_prints_every_stage(mcompile, small_model, stage):
    status, out, _ = mcompile("inspect", small_model, "--stage", stage, "--threads", 1)
    assert status == 0
    assert out.strip()


def test_inspect_one_task(mcompile, small_model):
    assert mcompile("inspect", small_model, "--stage", "tasks", "--task", 0)[1].startswith("# task 0: ")
    status, _, err = mcompile("inspect", small_model, "--stage", "tasks", "--task", 99)
    assert status == 2
    assert "--task 99: the model has" in err


def test_profile_names_every_call(mcompile, artifact):
    status, out, _ = mcompile("profile", artifact, "--json", "--threads", 1, "--repeat", 2)
    result = json.loads(out)
    assert status == 0
    assert any("second" in call["node"] for call in result["calls"])
    assert result["peak_gflops"] > 0
    assert sum(call["share"] for call in result["calls"]) == pytest.approx(1.0)


def test_cache_lists_and_clears(mcompile, small_model):
    from mcompile import InferenceSession

    mcompile("cache", "clear")
    InferenceSession(small_model, threads=1)
    entries = json.loads(mcompile("cache", "list", "--json")[1])
    assert [entry["model"] for entry in entries] == ["small"]
    assert json.loads(mcompile("cache", "clear", "--json")[1])["freed_bytes"] == entries[0]["size_bytes"]
    assert json.loads(mcompile("cache", "list", "--json")[1]) == []


def test_version(mcompile):
    from mcompile import __version__

    assert mcompile("--version")[1].strip() == __version__


# --- what is refused: status 2, a message on stderr, no traceback ---


def save(tmp_path, nodes, inputs=(("x", [2, 3]),), outputs=(("y", None),), opset=17, initializers=()):
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (*inputs, *outputs)]
    graph = helper.make_graph(nodes, "bad", infos[: len(inputs)], infos[len(inputs) :], list(initializers))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    (tmp_path / "bad.onnx").write_bytes(model.SerializeToString())
    return tmp_path / "bad.onnx"


def relu(source, result):
    return helper.make_node("Relu", [source], [result], name=result)


def truncated(tmp_path):
    path = save(tmp_path, [relu("x", "y")])
    path.write_bytes(path.read_bytes()[:-7])
    return path


def cyclic(tmp_path):
    return save(tmp_path, [helper.make_node("Add", ["x", "b"], ["a"]), relu("a", "b"), relu("b", "y")])


def without_initializer(tmp_path):
    return save(tmp_path, [helper.make_node("Add", ["x", "weight"], ["y"])])


def of_wrong_dtype(tmp_path):
    wrong = onnx.numpy_helper.from_array(np.ones((2, 3), np.int64), "w")
    return save(tmp_path, [helper.make_node("Add", ["x", "w"], ["y"])], initializers=[wrong])


def with_unknown_op(tmp_path):
    return save(tmp_path, [helper.make_node("Frobnicate", ["x"], ["y"], name="odd")])


def with_open_dims(tmp_path):
    return save(tmp_path, [relu("x", "y")], inputs=(("x", ["rows", "columns"]),))


def absurdly_large(tmp_path):
    return save(tmp_path, [relu("x", "y")], inputs=(("x", [1 << 20, 1 << 20]),))


def empty(tmp_path):
    (tmp_path / "bad.onnx").touch()
    return tmp_path / "bad.onnx"


def not_a_model(tmp_path):
    (tmp_path / "bad.onnx").write_text("this is no protobuf message, is it?\n" * 40)
    return tmp_path / "bad.onnx"


def missing(tmp_path):
    return tmp_path / "nothing.onnx"


REFUSED = [
    (truncated, ""),
    (cyclic, "cycle"),
    (without_initializer, "weight"),
    (of_wrong_dtype, ""),
    (with_unknown_op, "Frobnicate"),
    (with_open_dims, "--dim rows="),
    (absurdly_large, ""),
    (empty, "empty"),
    (not_a_model, ""),
    (missing, "nothing.onnx"),
]


@pytest.mark.parametrize("command", ["compile", "compare", "run", "inspect"])
@pytest.mark.parametrize(("make", "mention"), REFUSED, ids=lambda value: getattr(value, "__name__", None))
def test_a_bad_model_is_refused(mcompile, tmp_path, command, make, mention):
    status, out, err = mcompile(command, make(tmp_path))
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert mention in err
    assert "Traceback" not in err
    assert len(err.splitlines()) < 24


def test_every_problem_is_told_at_once(mcompile, tmp_path):
    nodes = [
        helper.make_node("Frobnicate", ["x"], ["a"], name="one"),
        helper.make_node("Blur", ["a"], ["y"], name="two"),
    ]
    status, out, err = mcompile("compile", save(tmp_path, nodes), "--json")
    assert status == 2
    problems = json.loads(out)["error"]["problems"]
    assert [any(name in problem for problem in problems) for name in ("Frobnicate", "Blur")] == [True, True]
    assert "Blur" in err


@pytest.mark.parametrize("command", ["run", "profile", "compare"])
def test_a_damaged_artifact_is_refused(mcompile, artifact, command):
    data = bytearray(artifact.read_bytes())
    data[200] ^= 1
    artifact.write_bytes(bytes(data))
    status, _, err = mcompile(command, artifact)
    assert status == 2
    assert "damaged" in err


def test_an_artifact_for_another_machine_is_refused(mcompile, small_model, tmp_path):
    assert mcompile("compile", small_model, "--target", "aarch64", "-o", tmp_path / "arm.mcm")[0] == 0
    status, _, err = mcompile("run", tmp_path / "arm.mcm")
    assert status == 2
    assert "aarch64" in err


BAD_OPTIONS = [
    (["--shape", "x=1,a,8,8"], "expected a number, got 'a'"),
    (["--shape", "x=1,3,8,8"], "cannot become"),
    (["--shape", "z=1"], "no such input"),
    (["--dim", "batch"], "expected NAME=VALUE"),
    (["--dim", "depth=1"], "no such dim"),
    (["--target", "z80"], "unknown target"),
    (["-o", "/nonexistent/folder/a.mcm"], "/nonexistent/folder/a.mcm"),
]


@pytest.mark.parametrize(("options", "mention"), BAD_OPTIONS)
def test_a_bad_option_is_refused(mcompile, small_model, options, mention):
    status, _, err = mcompile("compile", small_model, *options)
    assert status == 2
    assert mention in err


@pytest.mark.parametrize("options", [["--threads", "0"], ["--nonsense"], []])
def test_wrong_usage_has_status_2(mcompile, small_model, options):
    command = ["compile", small_model, *options] if options else ["compile"]
    assert mcompile(*command)[0] == 2


def test_the_model_is_not_overwritten(mcompile, small_model):
    before = small_model.read_bytes()
    status, _, err = mcompile("compile", small_model, "-o", small_model)
    assert status == 2
    assert "it is the model" in err
    assert small_model.read_bytes() == before


def test_a_pipe_stays_a_pipe(mcompile, small_model, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()), daemon=True)
    reader.start()
    for output in (pipe, tmp_path / "file.mcm"):
        assert mcompile("compile", small_model, "-o", output)[0] == 0
    assert pipe.is_fifo()
    reader.join(timeout=10)
    assert received == [(tmp_path / "file.mcm").read_bytes()]


def test_an_artifact_is_no_reference(mcompile, artifact):
    status, _, err = mcompile("compare", artifact, "--reference", artifact)
    assert status == 2
    assert "this is an artifact" in err


def test_bad_feeds_are_refused(mcompile, artifact, tmp_path):
    np.savez(tmp_path / "wrong.npz", x=np.zeros((1, 3, 8, 8), np.float32))
    np.savez(tmp_path / "other.npz", a=np.zeros(1), b=np.zeros(1))
    for name, mention in (("wrong.npz", "expected float32[2, 3, 8, 8]"), ("other.npz", "no array for input x")):
        status, _, err = mcompile("run", artifact, "--input", tmp_path / name)
        assert status == 2
        assert mention in err
    (tmp_path / "text.npz").write_text("nothing of the kind")
    assert mcompile("run", artifact, "--input", tmp_path / "text.npz")[0] == 2

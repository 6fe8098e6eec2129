import pytest

from benchmarks import kernels, zoo
from benchmarks.light_models import light_model, light_names
from benchmarks.zoo_models import Zoo, benchmark_models, find_zoo
from mcompile.backend.cpu.peak import Peak


def row(model, threads, speedup, group="zoo"):
    return {
        "model": model,
        "group": group,
        "threads": threads,
        "ok": True,
        "mcompile_ms": 1.0,
        "onnxruntime_ms": speedup,
        "speedup": speedup,
        "speedup_interval": [speedup, speedup],
        "compile_seconds": 1.5,
        "max_scaled_error": 1e-6,
    }


FAILED = {"model": "c", "group": "zoo", "threads": 1, "ok": False, "error": "no such op", "speedup": None}


def test_summary_gives_geomean_and_worst_of_each_group():
    rows = [row("a", 1, 2.0), row("b", 1, 0.5), row("a", 2, 3.0), row("l", 1, 4.0, "light"), FAILED]
    one, two, light = (
        next(entry for entry in zoo.summarise(rows) if (entry["group"], entry["threads"]) == place)
        for place in (("zoo", 1), ("zoo", 2), ("light", 1))
    )
    assert (one["geomean"], one["worst_model"], one["not_ok"]) == (pytest.approx(1.0), "b", ["c"])
    assert (two["geomean"], light["models"]) == (pytest.approx(3.0), 1)


def test_rows_print_with_and_without_an_error():
    assert "no such op" in zoo.format_row(FAILED)
    assert zoo.format_row(row("a", 1, 2.0)).endswith("ok")
    table = zoo.format_markdown([row("a", 1, 2.0), row("a", 2, 3.0)])
    assert "| a | 1.00 | 2.00 | 2.00 | 1.00 | 3.00 | 3.00 |" in table


def test_without_a_zoo_the_light_models_are_left(monkeypatch, tmp_path):
    monkeypatch.setenv("MCOMPILE_ZOO", str(tmp_path))
    assert find_zoo() is None
    assert [model.group for model in benchmark_models(["light_squeezenet"])] == ["light"]
    with pytest.raises(SystemExit, match="unknown model resnet50"):
        benchmark_models(["resnet50"])


def test_a_folder_of_models_is_a_zoo(small_model):
    folder = Zoo(small_model.parent)
    assert folder.names() == ["small"]
    assert folder.model("small").path == small_model


def test_light_models_have_weights_that_differ():
    assert len(light_names()) == 9
    model = light_model("light_squeezenet")
    assert not any(node.op_type == "ConstantOfShape" for node in model.graph.node)
    assert len({value.name for value in model.graph.input}) == 1


@pytest.mark.parametrize("make", [kernels.LAYERS[3], kernels.LAYERS[9], kernels.LAYERS[13]])
def test_a_layer_is_measured(make):
    result = kernels.measure(make(), Peak(1e11, 1e10), threads=1, repeat=3)
    assert result.direct_ms > 0
    assert result.chosen_ms > 0
    assert result.onnxruntime_ms > 0

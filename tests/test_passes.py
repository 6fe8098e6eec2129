"""PassManager over a toy program (a tuple of numbers), and the environment's knobs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mcompile.config import KNOBS, Config, load
from mcompile.errors import InternalError, ModelError, OptionError
from mcompile.passes import Pass, PassManager, Repeat, as_pass, bisect

Program = tuple[int, ...]


def _verify(program: Program) -> None:
    if any(number < 0 for number in program):
        raise InternalError(f"negative number in {program}")


def _manager(config: Config) -> PassManager[Program]:
    return PassManager("toy", _verify, lambda program: f"{program}\n", config)


def double(program: Program) -> Program:
    return tuple(2 * number for number in program)


def drop_one(program: Program) -> Program:
    return program[:-1] if len(program) > 1 else program


def negate(program: Program) -> Program:
    return tuple(-number for number in program)


def fail(program: Program) -> Program:
    raise ValueError("oops")


def test_passes_run_in_order_and_are_timed() -> None:
    manager = _manager(Config())
    assert manager.run([as_pass(double), as_pass(drop_one)], (1, 2)) == (2,)
    assert [(timing.name, timing.changed) for timing in manager.timings] == [("double", True), ("drop_one", True)]
    assert all(timing.seconds >= 0 for timing in manager.timings)


def test_a_group_repeats_to_its_fixpoint_or_limit() -> None:
    manager = _manager(Config())
    assert manager.run([Repeat("shrink", (as_pass(drop_one),))], (1, 2, 3, 4)) == (1,)
    assert len(manager.timings) == 4
    assert _manager(Config()).run([Repeat("grow", (as_pass(double),), limit=3)], (1,)) == (8,)


def test_verification_names_the_pass() -> None:
    with pytest.raises(InternalError, match="after pass negate"):
        _manager(Config(verify=2)).run([as_pass(double), as_pass(negate), as_pass(negate)], (1,))
    with pytest.raises(InternalError, match=r"after the last pass .*double, negate"):
        _manager(Config(verify=1)).run([as_pass(double), as_pass(negate)], (1,))
    assert _manager(Config(verify=0)).run([as_pass(negate)], (1,)) == (-1,)


def test_failures_become_internal_errors_and_ours_pass_through() -> None:
    with pytest.raises(InternalError, match=r"pass fail failed.*oops"):
        _manager(Config()).run([as_pass(fail)], (1,))

    def refuse(program: Program) -> Program:
        raise ModelError("no")

    with pytest.raises(ModelError, match="no"):
        _manager(Config()).run([as_pass(refuse)], (1,))


def test_dumps_say_what_changed(tmp_path: Path) -> None:
    config = Config(dump=tmp_path)
    _manager(config).run([as_pass(double), as_pass(drop_one)], (1,))
    names = sorted(path.name for path in (tmp_path / "toy").iterdir())
    assert names == ["000_input.txt", "001_double.txt", "002_drop_one.same.txt"]
    assert (tmp_path / "toy" / "001_double.txt").read_text() == "(2,)\n"
    with pytest.raises(InternalError, match="dumps are in"):
        _manager(config).run([as_pass(negate)], (1,))


def test_skipping_and_bisecting() -> None:
    passes = [as_pass(double), Pass("wrong", negate), as_pass(double)]
    assert _manager(Config(skip_passes=frozenset({"wrong"}))).run(passes, (1,)) == (4,)

    def run(limit: int) -> Program:
        return _manager(Config(verify=0, pass_limit=limit)).run(passes, (1,))

    assert run(1) == (2,)
    assert bisect(run, lambda program: program[0] > 0, total=3) == 2


def test_knobs_are_read_from_the_environment(tmp_path: Path) -> None:
    environment = {
        "MCOMPILE_DEBUG": "2",
        "MCOMPILE_DUMP": str(tmp_path),
        "MCOMPILE_SKIP_PASSES": "a, b",
        "MCOMPILE_PASS_LIMIT": "7",
        "MCOMPILE_SEED": "",
    }
    config = load(environment)
    assert (config.debug, config.dump, config.pass_limit, config.seed) == (2, tmp_path, 7, 0)
    assert config.skip_passes == {"a", "b"}
    assert replace(config, debug=0) != config


@pytest.mark.parametrize("value", ["x", "-1", "1.5"])
def test_wrong_values_are_refused(value: str) -> None:
    with pytest.raises(OptionError, match=f"MCOMPILE_DEBUG={value}"):
        load({"MCOMPILE_DEBUG": value})


def test_every_knob_has_a_sentence() -> None:
    assert list(KNOBS) == list(Config.__dataclass_fields__)
    assert all(knob.sentence.endswith(".") for knob in KNOBS.values())

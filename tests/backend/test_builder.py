"""Value numbering and hoisting of emitted instructions."""

from __future__ import annotations

import pytest

from mcompile.backend.cpu.builder import Builder, Value
from mcompile.errors import BuildError


def builder(limit: int = 1000) -> Builder:
    return Builder("begin", has_fma=True, has_half=True, limit=limit)


def test_equal_instructions_are_written_once() -> None:
    b = builder()
    x = Value("%x", "float", 0, 0)
    assert b.add(x, 1.0) == b.add(x, 1.0)
    assert len(b.lines) == 1


def test_invariant_arithmetic_leaves_the_loop() -> None:
    b = builder()
    n, zero = Value("%n", "i64", 0, 0), b.constant("i64", 0)
    b.loop(zero, n, lambda i: b.act(f"use {b.binary('mul', n, 3).text}, {b.binary('add', i, 1).text}"))
    text = "\n".join(b.lines)
    assert text.index("mul i64 %n, 3") < text.index("phi") < text.index("add i64 %i3, 1")


def test_nothing_leaves_a_branch() -> None:
    b = builder()
    x, condition = Value("%x", "float", 0, 0), Value("%c", "i1", 0, 0)
    b.branch(condition, lambda: b.act(f"use {b.mul(x, 2.0).text}"))
    text = "\n".join(b.lines)
    assert text.index("br i1") < text.index("fmul")
    b.act(f"use {b.mul(x, 2.0).text}")
    assert "\n".join(b.lines).count("fmul") == 2


def test_the_number_of_instructions_is_bounded() -> None:
    b = builder(limit=3)
    x = b.add(b.add(b.add(Value("%x", "float", 0, 0), 1.0), 2.0), 3.0)
    with pytest.raises(BuildError, match="more than 3"):
        b.add(x, 4.0)

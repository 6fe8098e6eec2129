"""Which task gets the next round of trials: where the objective falls fastest (Ansor, section 6).

    gain_i = -df/dg_i * (alpha * backward_i + (1 - alpha) * forward_i)

g_i is the best known time of task i, f the objective. `backward` is what a round has gained lately, `forward` a guess
of what the next one may gain. Ansor's guess is optimistic without end; the one bounded by the roofline ends where the
hardware does. A task's history is rebuilt from its records, so a resumed tuning goes on as if never interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np

Objective = Callable[[Sequence[float]], float]  # of the models' latencies in seconds, to be made small


@dataclass(frozen=True)
class TaskState:
    """What a scheduler knows of a task.

    `weights`: how often a run of each model calls it. `history`: best seconds after each round, infinite while nothing
    ran. `bound_seconds`: what the machine cannot beat. Tasks of one `group` should reach like FLOP/s. `is_dead`: it has
    nothing to try any more.
    """

    weights: tuple[float, ...]
    history: tuple[float, ...]
    flops: float = 0.0
    bound_seconds: float = 0.0
    group: str = ""
    is_dead: bool = False

    @property
    def best_seconds(self) -> float:
        return self.history[-1] if self.history else math.inf

    @property
    def rounds(self) -> int:
        return len(self.history)


class TaskScheduler(Protocol):
    """Chooses tasks. A scheduler keeps nothing: all it needs is in the states."""

    def choose(self, states: Sequence[TaskState], objective: Objective, random: np.random.Generator) -> int | None:
        """The task of the next round; None if no task can make the objective smaller."""
        ...

    def gains(self, states: Sequence[TaskState], objective: Objective) -> tuple[float, ...]:
        """What it expects a round of each task to gain, in units of the objective; for people."""
        ...


# --- objectives ---


def total_latency(latencies: Sequence[float]) -> float:
    """f1: the sum over models."""
    return float(sum(latencies))


@dataclass(frozen=True)
class LatencyRequirement:
    """f2: the sum over models of max(latency, required): tuning a model ends at its requirement."""

    required: tuple[float, ...]

    def __call__(self, latencies: Sequence[float]) -> float:
        return sum(max(latency, required) for latency, required in zip(latencies, self.required, strict=True))


@dataclass(frozen=True)
class GeomeanSpeedup:
    """f3: minus the geometric mean of reference / latency."""

    reference: tuple[float, ...]

    def __call__(self, latencies: Sequence[float]) -> float:
        logs = [math.log(ref / latency) for ref, latency in zip(self.reference, latencies, strict=True)]
        return -math.exp(sum(logs) / len(logs))


def model_latencies(states: Sequence[TaskState], best: Sequence[float] | None = None) -> tuple[float, ...]:
    """Each model's latency as the weighted sum of its tasks' times."""
    best = [state.best_seconds for state in states] if best is None else best
    models = len(states[0].weights) if states else 0
    return tuple(
        sum(state.weights[model] * seconds for state, seconds in zip(states, best, strict=True) if state.weights[model])
        for model in range(models)
    )


_RELATIVE_STEP = 1e-3  # of a task's time: an absolute one would be larger than most kernels take


def derivatives(states: Sequence[TaskState], objective: Objective) -> tuple[float, ...]:
    """df/dg_i by a step down that is relative to g_i; 0 for a task that never ran.

    Models in which a task never ran have no latency: their tasks count as if the missing ones took no time.
    """
    best = [state.best_seconds if math.isfinite(state.best_seconds) else 0.0 for state in states]
    value = objective(model_latencies(states, best))
    found = []
    for index, seconds in enumerate(best):
        if seconds <= 0.0:
            found.append(0.0)
            continue
        step = seconds * _RELATIVE_STEP
        lower = [*best[:index], seconds - step, *best[index + 1 :]]
        found.append((value - objective(model_latencies(states, lower))) / step)
    return tuple(found)


# --- schedulers ---


def is_live(state: TaskState, patience: int | None, dead_after: int) -> bool:
    """Whether a task may be chosen: not dead, not fruitless from the start, not at rest for `patience` rounds."""
    if state.is_dead:
        return False
    if math.isinf(state.best_seconds):
        return state.rounds < dead_after
    if patience is None or state.rounds <= patience:
        return True
    return state.history[-1 - patience] > state.best_seconds * 1.001


class RoundRobin:
    """The task with the fewest rounds."""

    def __init__(self, patience: int | None = None, dead_after: int = 3) -> None:
        self._patience, self._dead_after = patience, dead_after

    def choose(self, states: Sequence[TaskState], objective: Objective, random: np.random.Generator) -> int | None:
        live = [i for i, state in enumerate(states) if is_live(state, self._patience, self._dead_after)]
        return min(live, key=lambda index: (states[index].rounds, index), default=None)

    def gains(self, states: Sequence[TaskState], objective: Objective) -> tuple[float, ...]:
        return (0.0,) * len(states)


class Forward(StrEnum):
    """The guess of what round t + 1 gains: g / t, or a t-th part of what lies between g and the task's bound."""

    ANSOR = "ansor"
    ROOFLINE = "roofline"


_LEAST_GAP = 0.03  # of a task's time: a bound may be wrong a little
_HOPE = 0.4  # of a task's time, where its bound is certainly wrong


def _gap(state: TaskState) -> float:
    """What a task may gain at most. An algorithm with less arithmetic beats the bound, which then says nothing."""
    best = state.best_seconds
    if best < 0.97 * state.bound_seconds:
        return _HOPE * best
    return max(best - state.bound_seconds, _LEAST_GAP * best)


@dataclass(frozen=True)
class GradientScheduler:
    """Ansor's; but the derivative's step is relative, history survives a resume, and dead tasks stay dead.

    `patience`: a task without progress for so many rounds is left alone (f4). `epsilon`: how often any task is taken.
    """

    alpha: float = 0.2
    beta: float = 2.0
    window: int = 3
    epsilon: float = 0.05
    forward: Forward = Forward.ROOFLINE
    patience: int | None = None
    dead_after: int = 3
    leaves_group_after: int = 5

    def choose(self, states: Sequence[TaskState], objective: Objective, random: np.random.Generator) -> int | None:
        live = [i for i, state in enumerate(states) if is_live(state, self.patience, self.dead_after)]
        fresh = [i for i in live if not math.isfinite(states[i].best_seconds)]
        if fresh:  # warm-up
            return min(fresh, key=lambda index: (states[index].rounds, index))
        gains = self.gains(states, objective)
        useful = [i for i in live if gains[i] > 0.0]
        if not useful:
            return None
        if random.random() < self.epsilon:
            return int(random.choice(useful))
        return max(useful, key=lambda index: (gains[index], -index))

    def gains(self, states: Sequence[TaskState], objective: Objective) -> tuple[float, ...]:
        slopes = derivatives(states, objective)
        return tuple(
            slope * self._seconds_gained(state, states) if math.isfinite(state.best_seconds) else 0.0
            for slope, state in zip(slopes, states, strict=True)
        )

    def _seconds_gained(self, state: TaskState, states: Sequence[TaskState]) -> float:
        return self.alpha * self._backward(state) + (1 - self.alpha) * self._forward(state, states)

    def _backward(self, state: TaskState) -> float:
        """Seconds that a round has gained over the last `window` rounds, fewer while there are not so many."""
        window = min(self.window, state.rounds - 1)
        if window < 1 or not math.isfinite(state.history[-1 - window]):
            return 0.0
        return (state.history[-1 - window] - state.best_seconds) / window

    def _forward(self, state: TaskState, states: Sequence[TaskState]) -> float:
        best = state.best_seconds
        most = _gap(state) if self.forward is Forward.ROOFLINE else best
        gain = most / state.rounds
        peer = self._peer_seconds(state, states)
        if peer is not None:
            gain = max(gain, best - self.beta * peer)
        return min(gain, most)

    def _peer_seconds(self, state: TaskState, states: Sequence[TaskState]) -> float | None:
        """What the task would take at the best FLOP/s of its group; None for a task without a group."""
        members = [other for other in states if other.group == state.group and self._is_member(other, states)]
        speeds = [other.flops / other.best_seconds for other in members if math.isfinite(other.best_seconds)]
        if not state.group or not state.flops or len(speeds) < 2 or not self._is_member(state, states):
            return None
        return state.flops / max(speeds)

    def _is_member(self, state: TaskState, states: Sequence[TaskState]) -> bool:
        """A task that stays far behind its group though it had more rounds than it needed belongs to it no more."""
        peers = [other for other in states if other.group == state.group and other is not state]
        speeds = [other.flops / other.best_seconds for other in peers if math.isfinite(other.best_seconds)]
        if not speeds or not math.isfinite(state.best_seconds):
            return True
        least = min(other.rounds for other in peers)
        is_slow = state.flops / state.best_seconds < max(speeds) / self.beta
        return not (is_slow and state.rounds > least + self.leaves_group_after)

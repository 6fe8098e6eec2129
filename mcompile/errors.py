"""The exception tree. A message says what, where, expected, got and what to do; user input never meets an assert."""

from __future__ import annotations

_SHOWN_PROBLEMS = 20


class McompileError(Exception):
    """Base of every error that mcompile raises on purpose."""


class ModelError(McompileError):
    """The model is invalid or uses something unsupported. `problems` lists every one found, the message a screenful."""

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        self.problems = problems
        shown = [f"  - {problem}" for problem in problems[:_SHOWN_PROBLEMS]]
        rest = [f"  ... and {len(problems) - len(shown)} more"] if len(problems) > len(shown) else []
        super().__init__("\n".join([message, *shown, *rest]))


class OptionError(McompileError):
    """An option, a feed or an argument of the caller is wrong."""


class ScheduleError(McompileError):
    """A schedule step is illegal for its task; search catches it and drops the candidate."""


class BuildError(McompileError):
    """Native code could not be built. `source` is the program text, `log` what the code generator said."""

    def __init__(self, message: str, *, source: str = "", log: str = "") -> None:
        self.source = source
        self.log = log
        super().__init__(message)


class ArtifactError(McompileError):
    """An artifact is damaged, of another format version, or built for another machine."""


class InternalError(McompileError):
    """An invariant broke inside mcompile: always our bug, never the user's."""

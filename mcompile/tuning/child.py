"""Child processes that do what may go wrong. A child that crashes, hangs or eats memory is replaced by another.

A child is a fresh interpreter, so the parent may have threads and needs no main guard. Messages are pickles over the
child's own pipes. It dies with its parent, holds only so much memory, and hears no Ctrl-C.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import resource
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

_LENGTH = struct.Struct("<Q")
_SET_PARENT_DEATH_SIGNAL = 1  # prctl
_STARTING_SECONDS = 60.0
_SHOWN_BYTES = 400  # of what a child that died had said


class ChildDiedError(Exception):
    """The child ended before it answered. `status` as subprocess gives it: -n for signal n."""

    def __init__(self, status: int, said: str) -> None:
        self.status = status
        self.said = said
        super().__init__(f"{_status_text(status)}{': ' if said else ''}{said}")

    @property
    def is_out_of_memory(self) -> bool:
        """The system's memory killer takes SIGKILL; LLVM and C++ say it before they abort."""
        words = ("out of memory", "bad_alloc", "MemoryError")
        return self.status == -signal.SIGKILL or any(word in self.said for word in words)


class ChildTimeoutError(Exception):
    """No answer in time. The child has been ended."""


def _status_text(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"ended by signal {-status}"


class Child:
    """The parent's end. `answer` names the function, as `package.module:function`, that answers each message."""

    def __init__(self, answer: str, memory_bytes: int) -> None:
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        one_thread = {f"{library}_NUM_THREADS": "1" for library in ("OPENBLAS", "OMP", "MKL")}
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the child)
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from mcompile.tuning.child import serve; serve({answer!r}, {memory_bytes})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            bufsize=0,
            env={**os.environ, **one_thread, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the parent
        )
        self.known: set[str] = set()  # keys of tasks that it has been sent
        self.answers = 0
        self._is_ready = False

    def wait_ready(self) -> None:
        """Return when it can answer at once. Raises ChildDiedError, ChildTimeoutError."""
        if not self._is_ready:
            self._receive(_STARTING_SECONDS)
            self._is_ready = True

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fileno(self) -> int:
        """Readable when there is an answer, or none to come."""
        return _stream(self._process.stdout).fileno()

    def request(self, message: Any, timeout_seconds: float) -> Any:
        """The answer. Raises ChildDiedError, ChildTimeoutError."""
        self.send(message)
        return self.receive(timeout_seconds)

    def send(self, message: Any) -> None:
        """As soon as it is ready. Raises ChildDiedError, ChildTimeoutError."""
        self.wait_ready()
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        view = memoryview(_LENGTH.pack(len(data)) + data)
        try:
            while view:
                view = view[os.write(_stream(self._process.stdin).fileno(), view) :]
        except OSError:
            raise self._died() from None

    def receive(self, timeout_seconds: float) -> Any:
        """Raises ChildDiedError, ChildTimeoutError; the child has ended then."""
        answer = self._receive(timeout_seconds)
        self.answers += 1
        return answer

    def _receive(self, timeout_seconds: float) -> Any:
        deadline = time.monotonic() + timeout_seconds
        size = _LENGTH.unpack(self._read(_LENGTH.size, deadline))[0]
        return pickle.loads(self._read(size, deadline))

    def _read(self, size: int, deadline: float) -> bytes:
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN | select.POLLHUP)
        data = bytearray()
        while len(data) < size:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                self.close()
                raise ChildTimeoutError
            piece = os.read(self.fileno(), min(size - len(data), 1 << 20))
            if not piece:
                raise self._died()
            data += piece
        return bytes(data)

    def _died(self) -> ChildDiedError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)  # it closes its pipes a little before it ends
        if self._process.poll() is None:
            self._process.kill()
        status = self._process.wait()
        self._said.seek(0)
        said = self._said.read()[-_SHOWN_BYTES:].decode(errors="replace").strip()
        self.close()
        return ChildDiedError(status, said.splitlines()[-1] if said else "")

    def close(self) -> None:
        """End it at once."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._said):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def serve(answer: str, memory_bytes: int) -> None:
    """The child's life: each message on stdin is answered on stdout."""
    _die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    function = named_function(answer)
    _write(answers, None)  # ready
    while header := requests.read(_LENGTH.size):
        message = pickle.loads(requests.read(_LENGTH.unpack(header)[0]))
        _write(answers, function(message))


def _write(stream: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def named_function(name: str) -> Callable[..., Any]:
    """`package.module:function`."""
    import importlib

    module, _, attribute = name.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return function


def _die_with_parent() -> None:
    """Even a child that computes for ever ends when its parent is killed (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)

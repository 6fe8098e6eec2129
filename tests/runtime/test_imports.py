"""The runtime stands alone: importing it and running an artifact bring in nothing of the compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mcompile.runtime import save
from tests.runtime.kernels import chain_artifact

ROOT = Path(__file__).parents[2]
_PROGRAM = """
import sys
sys.path.insert(0, {root!r})
import numpy as np
from mcompile.runtime import InferenceSession
session = InferenceSession({path!r}, threads=2)
session.run(None, {{"x": np.zeros((16, 64), np.float32)}})
print(*sorted(sys.modules))
"""
_ALLOWED = {"config", "dtypes", "errors", "runtime", "target"}


def test_loading_and_running_need_numpy_and_llvmlite_only(tmp_path: Path) -> None:
    save(chain_artifact(), tmp_path / "m.mcm")
    program = _PROGRAM.format(root=os.fspath(ROOT), path=os.fspath(tmp_path / "m.mcm"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    names = done.stdout.split()
    ours = {name.split(".")[1] for name in names if name.startswith("mcompile.")}
    assert ours <= _ALLOWED
    roots = {name.split(".")[0] for name in names}
    heavy = {"onnx", "networkx", "xgboost", "onnxruntime", "typer", "rich", "platformdirs", "ml_dtypes", "scipy"}
    assert not roots & heavy

"""The house stays as docs/architecture.md draws it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def loaded_by(statement):
    """Names of the modules in a fresh interpreter after `statement`."""
    code = f"{statement}\nimport sys\nprint('\\n'.join(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_imports_respect_the_floors():
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("package", ["onnx", "networkx", "onnxruntime", "xgboost", "mcompile.ir", "mcompile.graph"])
def test_the_runtime_loads_no_compiler(package):
    assert package not in loaded_by("import mcompile.runtime")


def test_the_measured_process_holds_the_runtime_only():
    loaded = loaded_by("import mcompile.compare.side")
    assert not loaded & {"onnx", "networkx", "onnxruntime", "mcompile.driver", "mcompile.ir"}


def test_importing_the_package_is_light():
    assert not loaded_by("import mcompile") & {"numpy", "llvmlite", "onnx"}


def test_only_config_reads_knobs():
    reads = re.compile(r"""environ(\.get\(|\[)["']MCOMPILE_""")
    for path in (ROOT / "mcompile").rglob("*.py"):
        assert path.name == "config.py" or not reads.search(path.read_text()), path

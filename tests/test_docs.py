"""What the documents say can be typed, and what they link to is there."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import typer.main

from mcompile import __version__, cli, config

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/architecture.md"]


def test_readme_uses_commands_and_options_that_exist():
    commands = typer.main.get_command(cli.app).commands
    code = "".join(re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))
    used = re.findall(r"^mcompile (\w+)(.*?)(?:#|$)", code, re.MULTILINE)
    assert {name for name, _ in used} <= set(commands)
    for name, rest in used:
        options = {option for parameter in commands[name].params for option in parameter.opts}
        assert set(re.findall(r"--[\w-]+", rest)) <= options, name


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target


@pytest.mark.parametrize("document", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_files_that_are_named_exist(document):
    for name in re.findall(r"`(mcompile/[\w/.]+)`", (ROOT / document).read_text()):
        assert (ROOT / name).exists(), name


def test_versions_agree():
    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_every_knob_has_a_sentence():
    assert {field.name for field in fields(config.Config)} == set(config.KNOBS)

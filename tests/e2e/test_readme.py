"""The marked commands of the READMEs and of the manual run as printed."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from workspace import BIN, EXAMPLES, REPOSITORY, TIMEOUT_S

pytestmark = pytest.mark.timeout(600)

README = (REPOSITORY / "README.md").read_text()
README_ZH = (REPOSITORY / "README.zh.md").read_text()
MANUAL = REPOSITORY / "docs"
# What takes a minute and more, or only repeats what other pages run, is left to `make test-long`.
QUICK = ("tutorials/first-run.md", "tutorials/own-model.md", "how-to/export.md", "how-to/ps-lite.md")


def marked_commands(page: str) -> list[str]:
    found = re.findall(r"^( *)<!-- run -->\n *```bash\n(.*?)^ *```", page, flags=re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{indent}", "", commands, flags=re.MULTILINE) for indent, commands in found]


def marked_pages() -> list[Any]:
    """Return the pages of the manual that have commands to run."""
    pages = (page for page in sorted(MANUAL.rglob("*.md")) if marked_commands(page.read_text()))
    names = [str(page.relative_to(MANUAL)) for page in pages]
    assert set(QUICK) < set(names)
    return [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in names]


def run_in(folder: Path, commands: str) -> None:
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euc", commands], cwd=folder, env=environment, capture_output=True, text=True, timeout=2 * TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "commands", marked_commands(README) + marked_commands(README_ZH), ids=lambda commands: commands.splitlines()[0]
)
def test_commands_of_the_readme(commands: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    run_in(tmp_path, commands.replace("training.epochs=60", "training.epochs=2"))


@pytest.mark.parametrize("name", marked_pages())
def test_pages_of_the_manual(name: str, tmp_path: Path) -> None:
    """The marked commands of a page, in order, with its marked files, in one folder."""
    page = (MANUAL / name).read_text()
    (tmp_path / "examples").symlink_to(EXAMPLES)
    for file, content in re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", page, flags=re.DOTALL):
        (tmp_path / file).write_text(content.replace("epochs = 12", "epochs = 1"))
    for command in marked_commands(page):
        run_in(tmp_path, command)


def test_every_command_of_a_tutorial_is_run() -> None:
    """Except for a plan, which measures the machine for a minute."""
    for page in (MANUAL / "tutorials").glob("*.md"):
        text = page.read_text()
        unmarked = text.count("```bash\n") - len(marked_commands(text))
        assert unmarked == text.count("```bash\ncordee plan "), page.name

"""The marked commands of README and tutorial run as printed, and the links of the pages in the root lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from workspace import BIN, EXAMPLES, REPOSITORY, TIMEOUT_S

pytestmark = pytest.mark.timeout(600)

README = (REPOSITORY / "README.md").read_text()
README_ZH = (REPOSITORY / "README.zh.md").read_text()
TUTORIAL = (REPOSITORY / "docs/tutorials/own-model.md").read_text()


def marked_commands(page: str) -> list[str]:
    return re.findall(r"<!-- run -->\n```bash\n(.*?)```", page, flags=re.DOTALL)


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


def test_the_tutorial(tmp_path: Path) -> None:
    for name, content in re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", TUTORIAL, flags=re.DOTALL):
        (tmp_path / name).write_text(content.replace("epochs = 12", "epochs = 1"))
    commands = marked_commands(TUTORIAL)
    assert len(commands) == 5
    for command in commands:
        run_in(tmp_path, command)


@pytest.mark.parametrize("page", ["README.md", "README.zh.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)", (REPOSITORY / page).read_text()):
        assert link.startswith("http") or (REPOSITORY / link).exists(), f"{page} links to {link}"

"""The README's marked commands run as printed, and the links of the pages in the root lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from workspace import BIN, EXAMPLES, REPOSITORY, TIMEOUT_S

pytestmark = pytest.mark.timeout(300)

README = (REPOSITORY / "README.md").read_text()
BLOCKS = re.findall(r"<!-- run -->\n```bash\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0])
def test_a_block_runs(block: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    shorter = block.replace("training.epochs=60", "training.epochs=2")
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euc", shorter], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=2 * TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)", (REPOSITORY / page).read_text()):
        assert link.startswith("http") or (REPOSITORY / link).exists(), f"{page} links to {link}"

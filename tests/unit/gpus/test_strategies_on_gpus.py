"""The cases of `gpu_cases.py`, in a process of their own: what they pretend stays for the life of a process."""

from __future__ import annotations

import platform
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

CASES = Path(__file__).with_name("gpu_cases.py")
LEAST_CASES = 100


@pytest.mark.timeout(300)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="what is pretended is written for x86-64")
@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a torch without CUDA is made to take CUDA's tensors")
def test_every_strategy(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", f"--junitxml={report}", "-p", "no:cacheprovider"]
    # What it exits with says nothing: torch's threads may end it after the last case.
    run = subprocess.run([*command, str(CASES)], capture_output=True, text=True, timeout=280)
    assert report.is_file(), run.stdout[-3000:] + run.stderr[-3000:]
    cases = ElementTree.parse(report).getroot().findall(".//testcase")
    failed = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    assert not failed, run.stdout[-5000:]
    assert len(cases) >= LEAST_CASES

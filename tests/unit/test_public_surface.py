"""What `cordee` exports. A change here is a change for users: it belongs into the changelog."""

from __future__ import annotations

import importlib

import pytest

import cordee

EXPORTS = [
    "Callback",
    "Checkpoint",
    "Cluster",
    "CordeeError",
    "Data",
    "Evaluation",
    "Job",
    "KVStore",
    "Monitoring",
    "Plan",
    "Run",
    "Splits",
    "Stop",
    "Strategy",
    "Training",
    "Use",
    "__version__",
    "join",
    "plan",
    "train",
]


def test_the_exports() -> None:
    assert sorted(cordee.__all__) == sorted(EXPORTS)
    assert dir(cordee) == sorted(cordee.__all__)


@pytest.mark.parametrize("name", EXPORTS)
def test_every_export_is_there(name: str) -> None:
    assert getattr(cordee, name) is not None


def test_every_export_is_what_its_home_has() -> None:
    for name, home in cordee._HOMES.items():
        assert getattr(cordee, name) is getattr(importlib.import_module(home), name)


def test_what_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'cordee' has no attribute 'trian'"):
        cordee.trian  # noqa: B018


def test_the_version_is_that_of_the_package() -> None:
    assert cordee.__version__ == importlib.import_module("cordee.version").__version__

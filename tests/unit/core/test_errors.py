"""The error tree, and the suggestion of the nearest name."""

from __future__ import annotations

import pytest

from cordee.core import errors
from cordee.core.errors import CordeeError, MissingExtraError, nearest

EXIT_CODES = {
    "JobError": 2,
    "DataError": 2,
    "ModelError": 2,
    "RunDirectoryError": 2,
    "MissingExtraError": 2,
    "StorageError": 1,
    "CheckpointError": 1,
    "TrainingError": 1,
    "CommunicationError": 1,
    "StoreError": 1,
}


def test_every_error_is_in_the_tree_with_its_exit_code() -> None:
    kinds = {
        name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)
    }
    assert kinds.pop("CordeeError") is CordeeError
    assert {name: kind.exit_code for name, kind in kinds.items()} == EXIT_CODES
    assert all(issubclass(kind, CordeeError) for kind in kinds.values())
    assert all(f"── {name}" in (errors.__doc__ or "") for name in EXIT_CODES), "the tree at the top of the file"


def test_a_missing_extra_says_how_to_get_it() -> None:
    assert (
        str(MissingExtraError("ONNX export", "onnx"))
        == "ONNX export needs optional packages: pip install 'cordee[onnx]'"
    )


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("epoch", "; did you mean 'epochs'?"),
        ("batchsize", "; did you mean 'batch_size'?"),
        ("BATCH-SIZE", "; did you mean 'batch_size'?"),
        ("zzz", ""),
        ("", ""),
    ],
)
def test_nearest(name: str, suggestion: str) -> None:
    assert nearest(name, ["epochs", "batch_size", "steps"]) == suggestion


def test_nearest_of_nothing() -> None:
    assert nearest("epochs", []) == ""

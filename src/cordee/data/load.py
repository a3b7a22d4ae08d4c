"""From the job's [data] section to a data set that is known to be sound."""

from __future__ import annotations

from collections.abc import Sequence

from cordee.core.components import bind, resolve
from cordee.core.settings import Data
from cordee.data.builtin import BUILTIN_DATA
from cordee.data.source import Splits


def load_data(data: Data, *, seed: int, python_path: Sequence[str] = ()) -> Splits:
    make = resolve("data", data.use, BUILTIN_DATA, python_path=python_path)
    splits = bind("data", make, data.args, {"seed": seed, "normalize": data.normalize})()
    assert isinstance(splits, Splits)
    return splits

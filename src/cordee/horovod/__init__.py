"""Horovod's API over Cordée's collectives: `cordee.horovod.torch`, `.tensorflow` and `.keras`.

`cordee run --as-horovod` and `python -m cordee.horovod script.py` run scripts that import `horovod` unchanged.
"""

from cordee.horovod.running import run

__all__ = ["run"]

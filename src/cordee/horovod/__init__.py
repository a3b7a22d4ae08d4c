"""Horovod's API over Cordée's collectives: `cordee.horovod.torch`, `.tensorflow` and `.keras`.

`cordee run --as-horovod` and `python -m cordee.horovod script.py` run scripts that import `horovod` unchanged.
"""

"""`python -m cordee.horovod script.py`: a script that imports `horovod`, under any launcher."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from cordee.horovod.alias import install


def main() -> None:
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        sys.exit("usage: python -m cordee.horovod SCRIPT [ARGS]: runs a script whose `import horovod` imports Cordée's")
    install()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()

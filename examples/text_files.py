"""Write text that every machine has, the sources of Python's own modules, which text.toml trains on.

python examples/text_files.py
cordee train examples/text.toml
"""

import argparse
import sysconfig
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--folder", type=Path, default=Path("python_text"))
folder = parser.parse_args().folder

modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
folder.mkdir(parents=True, exist_ok=True)
for name, chosen in (("train", modules[0:40]), ("test", modules[40:44])):
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in chosen)
    (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    print(f"wrote {len(text):,} characters of {len(chosen)} modules into {folder / name}.txt")

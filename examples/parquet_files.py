"""Write the digits of scikit-learn as Parquet files, which parquet.toml trains on.

python examples/parquet_files.py
cordee train examples/parquet.toml
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--folder", type=Path, default=Path("digits_parquet"))
folder = parser.parse_args().folder

pixels, labels = load_digits(return_X_y=True)
pixels = (pixels * 255 / 16).astype(np.uint8)  # bytes, which Cordée gives to a model as numbers from 0 to 1
is_test = np.arange(len(labels)) % 5 == 4


def write(name: str, chosen: np.ndarray) -> None:
    images = pa.FixedSizeListArray.from_arrays(pa.array(pixels[chosen].reshape(-1)), 64)
    # Small row groups can be shuffled among each other; a row group is the least that is read at once.
    pq.write_table(pa.table({"image": images, "label": labels[chosen]}), folder / name, row_group_size=100)


folder.mkdir(parents=True, exist_ok=True)
for number, chosen in enumerate(np.array_split(np.flatnonzero(~is_test), 3)):
    write(f"train-{number}.parquet", chosen)
write("test.parquet", np.flatnonzero(is_test))
print(
    f"wrote {np.count_nonzero(~is_test)} digits to train on, and {np.count_nonzero(is_test)} to test on, into {folder}"
)

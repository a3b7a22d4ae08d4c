"""The job of digits.toml, made in Python.

python examples/digits.py
python examples/digits.py training.epochs=5 optimizer.lr=0.01
"""

import sys

import cordee

job = cordee.Job(
    name="digits",
    model=cordee.Use("mlp", hidden=[256, 128], dropout=0.3),
    data="digits",
    optimizer=cordee.Use("adam", lr=0.003),
    schedule="cosine",
    training=cordee.Training(batch_size=64, epochs=15, threads=1),
)

if __name__ == "__main__":
    run = cordee.train(job, overrides=sys.argv[1:])
    print(f"accuracy on unseen digits: {run.test_accuracy:.2%}")

"""The job of mnist.toml, made in Python.

CORDEE_DATA=folder/of/the/files python examples/mnist.py
python examples/mnist.py data.root=folder/of/the/files training.epochs=1
"""

import sys

import cordee

job = cordee.Job(
    name="mnist",
    model=cordee.Use("mlp", hidden=[512, 512], dropout=0.2),
    data="mnist",
    optimizer=cordee.Use("adam", lr=0.002),
    schedule="cosine",
    training=cordee.Training(batch_size=128, epochs=5, threads=1),
    checkpoint=cordee.Checkpoint(every_steps=469),
)

if __name__ == "__main__":
    cordee.train(job, overrides=sys.argv[1:])

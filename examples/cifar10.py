"""The job of cifar10.toml, made in Python.

CORDEE_DATA=folder/of/the/files python examples/cifar10.py
python examples/cifar10.py training.epochs=1 data.train_limit=5000
"""

import sys

import cordee

job = cordee.Job(
    name="cifar10",
    model=cordee.Use("resnet", depth=20),
    data=cordee.Data("cifar10", augment=("crop", "flip")),
    optimizer=cordee.Use("sgd", lr=0.1, momentum=0.9, weight_decay=0.0001),
    schedule=cordee.Use("cosine", warmup_steps=391),
    training=cordee.Training(batch_size=128, epochs=164),
    checkpoint=cordee.Checkpoint(every_steps=391),
)

if __name__ == "__main__":
    cordee.train(job, overrides=sys.argv[1:])

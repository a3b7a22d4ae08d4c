"""The job of fashion_mnist.toml, made in Python; afterwards the curve of the test accuracy.

python examples/fashion_mnist.py
"""

import sys

import cordee

job = cordee.Job(
    name="fashion-mnist",
    model="lenet",
    data=cordee.Data("fashion-mnist", augment=("flip",)),
    optimizer=cordee.Use("adam", lr=0.003),
    schedule="cosine",
    training=cordee.Training(batch_size=64, epochs=10, threads=1),
    checkpoint=cordee.Checkpoint(every_steps=938),
)

if __name__ == "__main__":
    run = cordee.train(job, overrides=sys.argv[1:])
    for event in run.events():  # everything that was recorded, as dictionaries
        if event["type"] == "evaluation":
            print(f"step {event['step']:>5}  {event['test_accuracy']:.2%}")

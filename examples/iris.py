"""The job of iris.toml, made in Python; then the trained model is asked about one flower.

python examples/iris.py
"""

import sys

import torch

import cordee

job = cordee.Job(
    name="iris",
    model=cordee.Use("mlp", hidden=[32], activation="tanh"),
    data="iris",
    optimizer=cordee.Use("sgd", lr=0.3, momentum=0.9, weight_decay=0.003),
    schedule="cosine",
    training=cordee.Training(batch_size=30, epochs=100, threads=1),
    evaluation=cordee.Evaluation(every_epochs=10),
)

if __name__ == "__main__":
    run = cordee.train(job, overrides=sys.argv[1:])
    # Inputs are normalised: this flower has the mean of all measures.
    with torch.no_grad():
        shares = run.model.eval()(torch.zeros(1, 4)).softmax(dim=-1)[0]
    for kind, share in zip(("setosa", "versicolor", "virginica"), shares.tolist()):
        print(f"an average flower is {kind} with {share:.1%}")

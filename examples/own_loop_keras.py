"""A Keras 3 model, on its torch backend, in your own training loop on many workers.

    python examples/own_loop_keras.py                alone
    cordee run -n 2 examples/own_loop_keras.py       two workers on this host

Both print the same. A Keras model on this backend is a torch module: the loop is that of own_loop.py.
Needs Keras: pip install 'cordee[keras]'.
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported

import keras
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import cordee


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs

    keras.utils.set_random_seed(0)
    digits = load_digits()
    inputs = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(-1) / 16
    targets = torch.tensor(digits.target)
    train = DataLoader(TensorDataset(inputs[:1500], targets[:1500]), batch_size=64, shuffle=True)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

    with cordee.join() as team:
        model, optimizer, batches = team.prepare(model, optimizer, train)
        for epoch in range(epochs):
            loss_sum = num_samples = 0.0
            for x, y in batches:
                loss = loss_function(y, model(x, training=True))
                team.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                if not batches.is_standing_in:
                    loss_sum, num_samples = loss_sum + loss.item() * len(y), num_samples + len(y)
            loss_sum, num_samples = team.sum(loss_sum, num_samples)
            accuracy = (model(inputs[1500:]).argmax(1) == targets[1500:]).float().mean()
            team.print(f"epoch {epoch + 1}  loss {loss_sum / num_samples:.6f}  test accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main()

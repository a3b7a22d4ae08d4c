"""Your own training loop on many workers: each worker computes its share of the batch.

    python examples/own_loop.py                      alone
    cordee run -n 2 examples/own_loop.py             two workers on this host
    torchrun --nproc-per-node 2 examples/own_loop.py the same, started by torchrun

All three compute the same: a batch of 64 is 64 samples, however many workers there are.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cordee


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs

    torch.manual_seed(0)
    digits = load_digits()
    inputs = torch.tensor(digits.data, dtype=torch.float32) / 16
    targets = torch.tensor(digits.target)
    train = DataLoader(TensorDataset(inputs[:1500], targets[:1500]), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

    with cordee.join() as team:
        model, optimizer, batches = team.prepare(model, optimizer, train)
        for epoch in range(epochs):
            loss_sum = num_samples = 0.0
            for x, y in batches:
                loss = F.cross_entropy(model(x), y)
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

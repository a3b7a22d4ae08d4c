"""Your own training loop that continues when workers die, freeze or join.

    cordee run --elastic -n 2 examples/elastic_loop.py   two workers; kill one of them with kill -9 and see
    python examples/elastic_loop.py                      alone: the same script, nothing to survive

The function with `@team.elastic` is called again, with the state of the last commit, when a worker is lost or joins.
The loop over `batches` then continues after the last batch that was committed. `cordee scale RUN 3` and
`cordee join RUN` add workers, Ctrl-C saves and ends, `cordee resume RUN` continues.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cordee

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
epochs = parser.parse_args().epochs

torch.manual_seed(0)
digits = load_digits()
inputs = torch.tensor(digits.data, dtype=torch.float32) / 16
targets = torch.tensor(digits.target)
train_set = DataLoader(TensorDataset(inputs[:1500], targets[:1500]), batch_size=64, shuffle=True)
test_set = DataLoader(TensorDataset(inputs[1500:], targets[1500:]), batch_size=128)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

with cordee.join() as team:
    model, optimizer, scheduler, batches, tests = team.prepare(model, optimizer, scheduler, train_set, test_set)
    state = team.state(model=model, optimizer=optimizer, scheduler=scheduler, epoch=0, best=0.0)

    @team.elastic
    def train() -> None:
        while state.epoch < epochs:
            for x, y in batches:
                team.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                team.commit()
            with torch.no_grad():
                right = torch.cat([team.gather(model(x).argmax(1) == y) for x, y in tests])
            accuracy = right.float().mean().item()
            state.best = max(state.best, accuracy)
            scheduler.step()
            team.print(f"epoch {state.epoch + 1}  test accuracy {accuracy:.2%}")
            state.epoch += 1  # before it is saved: continued from here, the loop begins the next epoch
            state.save()

    train()
    team.print(f"best test accuracy {state.best:.2%}")

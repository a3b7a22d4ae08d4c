"""A training loop of one's own: prints the losses and the digest of the weights as JSON."""

from __future__ import annotations

import hashlib
import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cordee


def main() -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(150, 8), torch.arange(150) % 3
    batches = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    with cordee.join() as team:
        model, optimizer, batches = team.prepare(model, optimizer, batches)
        for _ in range(3):
            total = 0.0
            for x, y in batches:
                loss = F.cross_entropy(model(x), y)
                team.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                total += loss.item() * len(y)
            losses.append(team.sum(total)[0])
        gathered = team.gather(model(inputs[team.worker_index :: team.num_workers]))
        digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values()))
        team.print(json.dumps({"losses": losses, "weights": digest.hexdigest(), "gathered": len(gathered)}))


if __name__ == "__main__":
    main()

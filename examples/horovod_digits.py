"""A classic Horovod script, here for handwritten digits: only the first import names Cordée.

    python examples/horovod_digits.py
    cordee run -n 2 examples/horovod_digits.py
    torchrun --nproc-per-node 2 examples/horovod_digits.py

With `import horovod.torch as hvd` it runs as it is by `cordee run --as-horovod`.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import cordee.horovod.torch as hvd


def metric_average(value: float, name: str) -> float:
    return hvd.allreduce(torch.tensor(value, dtype=torch.float64), name=name).item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--fp16-allreduce", action="store_true")
    arguments = parser.parse_args()

    hvd.init()
    torch.manual_seed(42)

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train_set = TensorDataset(images[:1500], labels[:1500])
    test_set = TensorDataset(images[1500:], labels[1500:])
    train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_set, batch_size=arguments.batch_size, sampler=train_sampler)
    test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    test_loader = DataLoader(test_set, batch_size=99, sampler=test_sampler)

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip
    # The global batch grows with the number of workers, and the learning rate with it.
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if arguments.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression, op=hvd.Average
    )

    for epoch in range(1, arguments.epochs + 1):
        model.train()
        train_sampler.set_epoch(epoch)
        for x, y in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        loss, correct, count = 0.0, 0.0, 0
        with torch.no_grad():
            for x, y in test_loader:
                output = model(x)
                loss += F.cross_entropy(output, y, reduction="sum").item()
                correct += (output.argmax(1) == y).sum().item()
                count += len(y)
        loss = metric_average(loss / count, "avg_loss")
        accuracy = metric_average(correct / count, "avg_accuracy")
        if hvd.rank() == 0:
            print(f"epoch {epoch}  test loss {loss:.4f}  accuracy {100 * accuracy:.2f}%", flush=True)


if __name__ == "__main__":
    main()

"""Lightning's Trainer with `ddp`, which asks for gloo on CPUs."""

import logging
import warnings

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def on_train_end(self):
        if self.global_rank == 0:
            total = sum(float(p.detach().double().abs().sum()) for p in self.parameters())
            print(f"group {type(dist.group.WORLD).__name__} {dist.get_backend()} weights {total!r}", flush=True)


if __name__ == "__main__":
    lightning.seed_everything(0)
    features = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=8)
    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, plugins=[TorchElasticEnvironment()],
    )  # fmt: skip
    trainer.fit(Net(), loader)

"""A loop of Accelerate, as its documentation has it."""

import accelerate
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerate.utils.set_seed(0)
accelerator = accelerate.Accelerator(cpu=True)
features = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=8)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()
gathered = accelerator.gather_for_metrics(torch.tensor([float(accelerator.process_index)]))
if accelerator.is_main_process:
    total = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
    print(
        f"group {type(dist.group.WORLD).__name__} {dist.get_backend()} gathered {gathered.tolist()} weights {total!r}"
    )
accelerator.end_training()

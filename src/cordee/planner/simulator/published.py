"""Scenarios of published measurements, and what was measured: the simulator is held against them in the tests.

Horovod (docs/benchmarks.rst of the project; 128 servers with 4 Pascal GPUs each, RoCE of 25 Gbit/s, batches of 64 per
GPU): 90 % scaling efficiency at 512 GPUs for Inception V3 and ResNet-101, 68 % for VGG-16; an earlier version of the
page has 90, 90 and 79 % at 128 GPUs. Taken from elsewhere:

- Images per second of one GPU: 142 (Inception V3) and 154 (VGG-16) from TensorFlow's benchmarks of May 2017 (one
  P100, batches of 64); 103.55 (ResNet-101) is 1656.82 / 16 from Horovod's page.
- Parameters: 27.2 M (Inception V3 with its auxiliary head), 44.5 M (ResNet-101), 138.4 M (VGG-16, of which 123.6 M in
  the three fully connected layers, whose gradients are the first to be ready).
- At most 64 MB of gradients are fused: Horovod's default.

Assumed, alike for all three: steps vary by 3 % from one to the next, and data gets 90 % of the line rate. Both were
settled with the published figures in view (80 % of the line rate gave VGG-16 65 % at 512 and 69 % at 128), and so was
the rule that whatever is ready is sent together: the agreement is a fit of a few numbers, not a blind prediction.

Parameter server (Li et al., OSDI'14, sparse logistic regression on 1000 machines, 800 of them workers): workers idle
50 % of the time with a maximal delay of 0, and 1.7 % with 16 (quoted from memory: check against the paper). The spread
of the steps is not published: 0.24 is what makes the simulator idle half the time at delay 0, so only what follows for
larger delays is a prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cordee.planner.simulator.scenario import WITH_SERVERS

_HOROVOD: dict[str, Any] = {
    "workers": [1, 4, 16, 64, 128, 256, 512],
    "spread": 0.03,
    "per_host": 4,
    "bandwidth": "22.5 Gbit/s",  # 90 % of 25
    "latency": "5us",
    "bucket": "64 MiB",
}

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "horovod-inception3": {**_HOROVOD, "step": 64 / 142, "gradients": "108.8 MB"},
    "horovod-resnet101": {**_HOROVOD, "step": 64 / 103.55, "gradients": "178 MB"},
    "horovod-vgg16": {
        **_HOROVOD,
        "step": 64 / 154,
        "gradients": "553.6 MB",
        "order": [[0.05, 0.893], [1.0, 1.0]],
    },
    "parameter-server": {
        "strategy": WITH_SERVERS[0],
        "workers": [100, 400, 800],
        "servers": 200,
        "step": 10.0,
        "spread": 0.24,
        "gradients": "100 MB",
        "bandwidth": "10 Gbit/s",
        "staleness": 0,
        "steps": 60,
    },
}

# Scenario -> workers -> scaling efficiency as measured.
SCALING = {
    "horovod-inception3": {128: 0.90, 512: 0.90},
    "horovod-resnet101": {128: 0.90, 512: 0.90},
    "horovod-vgg16": {128: 0.79, 512: 0.68},
}
# Maximal delay -> share of the time that workers idle, as measured.
IDLING = {0: 0.50, 16: 0.017}

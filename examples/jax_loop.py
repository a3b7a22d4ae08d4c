"""A training loop of JAX on several workers: `cordee.jax.pmean` averages the gradients.

    python examples/jax_loop.py
    cordee run -n 2 examples/jax_loop.py

Both print the same: each worker takes an equal part of every batch.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import cordee.jax


def loss_of(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
    logits = jax.nn.relu(x @ params["w"] + params["b"]) @ params["out"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers together")
    arguments = parser.parse_args()

    cordee.jax.init()
    rank, size = cordee.jax.rank(), cordee.jax.size()
    digits = load_digits()
    images, labels = (digits.data / 16).astype("float32"), digits.target
    one, other = jax.random.split(jax.random.key(rank))
    params = {
        "w": jax.random.normal(one, (64, 32)) * 0.1,
        "b": jnp.zeros(32),
        "out": jax.random.normal(other, (32, 10)) * 0.1,
    }
    params = cordee.jax.broadcast(params)  # those of the first worker
    gradients_of = jax.jit(jax.value_and_grad(loss_of))
    order = np.random.default_rng(0)
    for step in range(1, arguments.steps + 1):
        batch = order.choice(len(images), arguments.batch_size, replace=False)
        part = np.split(batch, size)[rank]
        loss, gradients = cordee.jax.pmean(gradients_of(params, images[part], labels[part]))
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients)
        if step % 20 == 0 and rank == 0:
            print(f"step {step}  loss {float(loss):.3f}", flush=True)


if __name__ == "__main__":
    main()

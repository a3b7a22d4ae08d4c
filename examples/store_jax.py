"""LeNet on Fashion-MNIST in plain JAX: gradients are pushed to a key-value store, and Adam runs on its servers.

    python examples/store_jax.py --local             one worker, with a server of its own

    cordee server --workers 2                        says where it listens; then, twice,
    cordee worker --servers ADDRESS examples/store_jax.py

Workers run freely: each takes its share of every epoch, pushes the gradients of its batches and pulls the parameters
as they then are. Needs JAX: pip install 'cordee[jax]'.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import torch

import cordee
from cordee.data import load_data

SHAPES = {
    "conv1": (6, 1, 5, 5),
    "conv2": (16, 6, 5, 5),
    "linear1": (256, 120),
    "linear2": (120, 84),
    "classifier": (84, 10),
}


def first_parameters(seed):
    random = np.random.default_rng(seed)
    parameters = {}
    for name, shape in SHAPES.items():
        limit = 1 / np.sqrt(np.prod(shape[1:]) if "conv" in name else shape[0])
        outputs = shape[0] if "conv" in name else shape[1]
        parameters[f"{name}.weight"] = jnp.asarray(random.uniform(-limit, limit, shape), jnp.float32)
        parameters[f"{name}.bias"] = jnp.asarray(random.uniform(-limit, limit, outputs), jnp.float32)
    return parameters


def convolve(images, weight, bias):
    outputs = jax.nn.relu(jax.lax.conv(images, weight, (1, 1), "VALID") + bias[:, None, None])
    num, channels, height, width = outputs.shape
    return outputs.reshape(num, channels, height // 2, 2, width // 2, 2).mean((3, 5))


def scores(p, images):
    hidden = convolve(images, p["conv1.weight"], p["conv1.bias"])
    hidden = convolve(hidden, p["conv2.weight"], p["conv2.bias"])
    hidden = hidden.reshape(len(images), -1)
    hidden = jax.nn.relu(hidden @ p["linear1.weight"] + p["linear1.bias"])
    hidden = jax.nn.relu(hidden @ p["linear2.weight"] + p["linear2.bias"])
    return hidden @ p["classifier.weight"] + p["classifier.bias"]


def loss_of(parameters, images, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(scores(parameters, images)), labels[:, None], 1).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local", action="store_true", help="start a server of one's own")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, help="stop each epoch after so many batches")
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()

    splits = load_data(cordee.Data(use="fashion-mnist"), seed=0)
    train, test = (source.gather(torch.arange(source.num_samples)) for source in (splits.train, splits.test))
    images, labels = train.inputs.numpy(), train.targets.numpy()
    gradient_of = jax.jit(jax.value_and_grad(loss_of))

    with cordee.KVStore.local() if options.local else cordee.KVStore() as store:
        num_workers = max(store.num_workers, 1)
        parameters = first_parameters(seed=0)
        names = list(parameters)
        store.set_updater("adam", lr=0.001)
        store.init(names, [parameters[name] for name in names])
        store.barrier()
        parameters = {name: store.pull(name).value for name in names}
        for epoch in range(options.epochs):
            order = np.random.default_rng(epoch).permutation(len(images))[store.rank :: num_workers]
            batches = np.array_split(order, max(1, len(order) // options.batch_size))[: options.steps]
            total = 0.0
            for batch in batches:
                loss, gradients = gradient_of(parameters, images[batch], labels[batch])
                # The first layers are needed first: they go first.
                handles = {
                    name: store.push_pull_async(name, gradients[name], priority=-place)
                    for place, name in enumerate(names)
                }
                parameters = {name: handle.wait().value for name, handle in handles.items()}
                total += float(loss)
            store.barrier()
            parameters = {name: store.pull(name).value for name in names}
            if store.rank == 0:
                guesses = jax.jit(scores)(parameters, test.inputs.numpy()).argmax(1)
                accuracy = float((guesses == test.targets.numpy()).mean())
                print(f"epoch {epoch + 1}  loss {total / len(batches):.4f}  test accuracy {accuracy:.2%}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except cordee.CordeeError as error:
        raise SystemExit(f"store_jax: {error}") from None

"""Cordée's collectives on pytrees of JAX, eagerly and compiled, and a training loop that equals the whole batch."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import cordee.jax

cordee.jax.init()
rank, size = cordee.jax.rank(), cordee.jax.size()
tree = {
    "w": jnp.arange(6.0).reshape(2, 3) + rank,
    "n": [jnp.array(2 * rank, jnp.int32), jnp.ones(3, jnp.bfloat16) * (rank + 1)],
    "host": np.arange(3.0) * (rank + 1),  # 64 bits, which stay
    "flag": (float(rank),),
}
kept = np.array(tree["w"])
mean = cordee.jax.pmean(tree)
np.testing.assert_allclose(mean["w"], np.arange(6.0).reshape(2, 3) + 0.5)
assert mean["w"].dtype == jnp.float32 and isinstance(mean["w"], jax.Array)
assert (
    mean["n"][0].dtype == jnp.int32
    and mean["n"][0] == 1
    and mean["n"][1].tolist() == [1.5] * 3
    and mean["n"][1].dtype == jnp.bfloat16
)
assert (
    isinstance(mean["host"], np.ndarray) and mean["host"].dtype == np.float64 and mean["host"].tolist() == [0, 1.5, 3]
)
assert mean["flag"] == (0.5,)
np.testing.assert_array_equal(tree["w"], kept)  # immutable
total = cordee.jax.all_reduce(tree["w"], "sum")
again = cordee.jax.all_reduce(tree["w"] * 100, "sum")
np.testing.assert_allclose(total, 2 * np.arange(6.0).reshape(2, 3) + 1)
assert cordee.jax.all_reduce(jnp.array([rank]), "max").tolist() == [1]
assert cordee.jax.broadcast(tree, root=1)["n"][0] == 2
rows = cordee.jax.all_gather({"a": jnp.array(rank), "b": jnp.full((2,), rank)})
assert rows["a"].tolist() == [0, 1] and rows["b"].tolist() == [[0, 0], [1, 1]]
assert cordee.jax.pmean({}) == {}
assert cordee.jax.pmean((3, np.uint8(200), np.bool_(True))) == (3, 200, True)
try:
    cordee.jax.pmean({"correct": rank})
except ValueError as error:
    assert "the mean of int64 over 2 processes is not a whole number" in str(error)
else:
    raise AssertionError("a mean was cut")


@jax.jit
def compiled(value):
    first = cordee.jax.pmean({"v": value, "h": value.astype(jnp.bfloat16)})
    second = cordee.jax.all_gather(value)
    return first, second, cordee.jax.broadcast(value * 2, 1)


for _ in range(3):
    first, second, third = compiled(jnp.full((4,), float(rank)))
    assert first["v"].tolist() == [0.5] * 4 and first["h"].dtype == jnp.bfloat16
    assert second.tolist() == [[0.0] * 4, [1.0] * 4] and third.tolist() == [2.0] * 4

x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
y = x.sum(1)


def loss_of(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def start(seed):
    one, other = jax.random.split(jax.random.key(seed))
    return {"w": jax.random.normal(one, (3, 5)), "v": jax.random.normal(other, (5,))}


def train(params, x, y, average):
    step = jax.jit(jax.grad(loss_of))
    for _ in range(5):
        gradients = average(step(params, x, y))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    return params


alone = train(start(0), x, y, lambda gradients: gradients)
params = cordee.jax.broadcast(start(rank))
together = train(params, np.split(x, size)[rank], np.split(y, size)[rank], cordee.jax.pmean)
for name, wanted in alone.items():
    np.testing.assert_allclose(together[name], wanted, rtol=1e-5, atol=1e-6)
try:
    cordee.jax.pmean(jnp.ones(2 + rank))
except RuntimeError as error:
    assert "float32 [2]" in str(error) and "float32 [3]" in str(error)
else:
    raise AssertionError("shapes differ")
print(f"ok {rank}", file=sys.stderr if rank else sys.stdout)

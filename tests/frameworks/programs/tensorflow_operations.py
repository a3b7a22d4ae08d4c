"""Horovod's operations on TensorFlow's tensors, eagerly and in graphs, compared with NumPy."""

import sys

import numpy as np
import tensorflow as tf

import cordee.horovod.tensorflow as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
draws = [np.random.default_rng(other).normal(size=(3, 5)).astype("float32") for other in range(size)]
mine = tf.constant(draws[rank])


def check(got: tf.Tensor, wanted: np.ndarray, tolerance: float = 1e-6) -> None:
    np.testing.assert_allclose(got.numpy(), wanted, rtol=tolerance, atol=tolerance)


# Eagerly, of every type; inputs stay as they are.
for dtype in (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64):
    values = [np.asarray(tf.cast(tf.constant(draw * 4), dtype)) for draw in draws]
    own = tf.constant(values[rank])
    total = sum(value.astype("float64") for value in values)
    tolerance = 5e-2 if dtype in (tf.float16, tf.bfloat16) else 1e-6
    reduced = hvd.allreduce(own, op=hvd.Sum)
    assert reduced.dtype == dtype
    check(tf.cast(reduced, tf.float64), total, tolerance)
    np.testing.assert_array_equal(own.numpy(), values[rank])
check(hvd.allreduce(mine), np.mean(draws, 0))
check(hvd.allreduce(mine, op=hvd.Max), np.max(draws, 0))
check(hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), 1.5 * np.sum(draws, 0))
check(hvd.allreduce(mine, compression=hvd.Compression.fp16), np.mean(draws, 0), 2e-3)
check(hvd.allreduce(tf.constant(float(rank))), (size - 1) / 2)
odd = [tf.fill([2, 1], float(rank)), tf.fill([3], rank), tf.constant(1.0 + rank), tf.zeros([0, 2])]
fused = hvd.grouped_allreduce(odd, op=hvd.Sum)
assert [one.numpy().tolist() for one in fused] == [[[1.0], [1.0]], [1, 1, 1], 3.0, []], fused
fused_again = hvd.grouped_allreduce(odd, op=hvd.Sum)  # results own their memory
assert fused[0].numpy().tolist() == [[1.0], [1.0]]
rows = hvd.allgather(tf.fill([rank + 1, 2], rank))
assert rows.numpy().tolist() == [[0, 0], [1, 1], [1, 1]]
check(hvd.broadcast(mine, 1), draws[1])
slices = tf.IndexedSlices(tf.fill([1, 2], float(rank + 1)), tf.constant([rank]), tf.constant([4, 2]))
check(tf.convert_to_tensor(hvd.allreduce(slices)), np.array([[0.5, 0.5], [1, 1], [0, 0], [0, 0]]))
output, received = hvd.alltoall(tf.range(3) + 10 * rank, splits=tf.constant([1, 2]))
assert received.numpy().tolist() == [rank + 1] * 2
assert output.numpy().tolist() == ([0, 10] if rank == 0 else [1, 2, 11, 12])
check(hvd.reducescatter(mine, op=hvd.Sum), np.sum(draws, 0)[:2] if rank == 0 else np.sum(draws, 0)[2:])
assert hvd.broadcast_object({"rank": rank}, 1) == {"rank": 1}
assert hvd.allgather_object(rank) == [0, 1]


# In a graph, again and again.
@tf.function
def in_graph(value: tf.Tensor) -> tuple:
    both = hvd.grouped_allreduce([value, tf.cast(value, tf.float64)], op=hvd.Average)
    return hvd.allreduce(value, op=hvd.Sum, name="graph"), both[1], hvd.allgather(value), hvd.broadcast(value, 0)


for _ in range(3):
    total, mean, rows, first = in_graph(mine)
    check(total, np.sum(draws, 0))
    check(mean, np.mean(draws, 0))
    check(rows, np.concatenate(draws))
    check(first, draws[0])
assert in_graph.get_concrete_function(mine).structured_outputs[0].shape == (3, 5)

# Gradients, as Horovod has them.
for function in (lambda f: f, tf.function):

    @function
    def gradients(value: tf.Tensor) -> tuple:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(value)
            total = tf.reduce_sum(hvd.allreduce(value, op=hvd.Sum))
            rows = tf.reduce_sum(hvd.allgather(value) * (rank + 1.0))
            first = tf.reduce_sum(hvd.broadcast(value, 1) * (rank + 1.0))
        return tape.gradient(total, value), tape.gradient(rows, value), tape.gradient(first, value)

    of_sum, of_rows, of_first = gradients(mine)
    check(of_sum, np.full((3, 5), 2.0))
    check(of_rows, np.full((3, 5), 1.5))
    check(of_first, np.full((3, 5), 1.5 if rank == 1 else 0.0))

# A tape: equal to the whole batch.
weights = tf.Variable(tf.ones([4, 2]) * (1.0 + rank))
unused = tf.Variable(1.0)
table = tf.Variable(tf.ones([6, 2]))
hvd.broadcast_variables([weights, table], root_rank=0)
check(weights, np.ones((4, 2)))
x = np.random.default_rng(9).normal(size=(8, 4)).astype("float32")
part = tf.constant(np.split(x, size)[rank])


def loss_of(data: tf.Tensor, ids: list[int]) -> tf.Tensor:
    return tf.reduce_mean(tf.square(data @ weights)) + tf.reduce_mean(tf.square(tf.gather(table, ids)))


with tf.GradientTape() as plain:
    whole = (loss_of(tf.constant(x[:4]), [0, 2]) + loss_of(tf.constant(x[4:]), [1, 3])) / 2
expected = plain.gradient(whole, [weights, unused, table])
tape = tf.GradientTape()
with tape:
    loss = loss_of(part, [rank, rank + 2])
reduced = hvd.DistributedGradientTape(tape).gradient(loss, [weights, unused, table])
check(reduced[0], expected[0].numpy())
assert reduced[1] is None
assert isinstance(reduced[2], tf.IndexedSlices)
check(tf.convert_to_tensor(reduced[2]), tf.convert_to_tensor(expected[2]).numpy())
with hvd.DistributedGradientTape(tf.GradientTape(), sparse_as_dense=True, gradient_predivide_factor=2.0) as wrapped:
    loss = loss_of(part, [rank, rank + 2])
dense = wrapped.gradient(loss, {"w": weights, "t": table})
check(dense["w"], expected[0].numpy())
check(dense["t"], tf.convert_to_tensor(expected[2]).numpy())

# What differs is named; XLA is refused by name; join.
try:
    hvd.allreduce(tf.ones([2 + rank]), name="loss")
except hvd.HorovodInternalError as error:
    assert "rank 0 allreduce 'allreduce.loss.float32' (Average of float32 [2])" in str(error), error
else:
    raise AssertionError("shapes differ")
try:
    tf.function(lambda value: hvd.allreduce(value), jit_compile=True)(mine)
except tf.errors.InvalidArgumentError as error:
    assert "cordee_allreduce_needs_jit_compile_False" in str(error)
else:
    raise AssertionError("XLA compiled a call into Python")
if rank == 0:
    check(hvd.allreduce(tf.constant([4.0])), np.array([2.0]))
assert hvd.join().numpy() == 0
hvd.barrier()
print(f"ok {rank}", file=sys.stderr if rank else sys.stdout)

"""`fit` of Keras with Horovod's callbacks and optimizer, on the backend that KERAS_BACKEND names."""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np

import cordee.horovod.keras as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = (x.sum(1, keepdims=True) ** 2).astype("float32")
x_test, y_test = x[:20], y[:20]


def make_model(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])


def share(data: np.ndarray) -> np.ndarray:
    """Return this rank's half of every batch of 16."""
    return np.concatenate([np.split(batch, size)[rank] for batch in np.split(data, 4)])


expected = make_model(0)
expected.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
history = expected.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0, validation_data=(x_test, y_test))

model = make_model(rank)  # of which rank 0's counts
optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
assert hvd.DistributedOptimizer(optimizer) is optimizer and isinstance(optimizer, keras.optimizers.SGD)
model.compile(optimizer, "mse")
own = model.fit(
    share(x), share(y), batch_size=16 // size, epochs=3, shuffle=False, verbose=0, validation_data=(x_test, y_test),
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()],
)  # fmt: skip
for got, wanted in zip(model.get_weights(), expected.get_weights(), strict=True):
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
np.testing.assert_allclose(own.history["loss"], history.history["loss"], rtol=1e-4)
np.testing.assert_allclose(own.history["val_loss"], history.history["val_loss"], rtol=1e-4)

# Rates rise batch by batch, and fall at given epochs.
rates: list[float] = []


class Recorder(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))


start = [np.array(weight) for weight in model.get_weights()]
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
model.fit(
    share(x), share(y), batch_size=8, epochs=4, shuffle=False, verbose=0,
    callbacks=[
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1, warmup_epochs=2),
        hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.1, multiplier=lambda epoch: 0.1, start_epoch=3),
        Recorder(),
    ],
)  # fmt: skip
np.testing.assert_allclose(rates[:8], [0.1 / size * (1 + (size - 1) * step / 8) for step in range(1, 9)], rtol=1e-5)
np.testing.assert_allclose(rates[8:12], [0.1] * 4, rtol=1e-5)
np.testing.assert_allclose(rates[12:], [0.01] * 4, rtol=1e-5)
# The rates were those that the steps used.
model.set_weights(start)
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
model.fit(
    share(x), share(y), batch_size=8, epochs=1, shuffle=False, verbose=0,
    callbacks=[hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.1, multiplier=lambda e: 1 - e, staircase=False)],
)  # fmt: skip
expected.set_weights(start)
expected.compile(keras.optimizers.SGD(0.1), "mse")
for batch in range(4):
    expected.optimizer.learning_rate = 0.1 * (1 - batch / 4)
    expected.train_on_batch(x[16 * batch : 16 * batch + 16], y[16 * batch : 16 * batch + 16])
for got, wanted in zip(model.get_weights(), expected.get_weights(), strict=True):
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)

assert hvd.allreduce(float(rank)) == (size - 1) / 2
assert hvd.allgather(np.array([rank])).tolist() == [0, 1]
assert hvd.broadcast(np.array([rank]), 1).tolist() == [1]
for bad in ({"backward_passes_per_step": 2}, {"op": hvd.Adasum}):
    try:
        hvd.DistributedOptimizer(keras.optimizers.SGD(), **bad)
    except NotImplementedError:
        continue
    raise AssertionError(bad)
if rank == 0:
    model.save(sys.argv[1] + f"/{keras.backend.backend()}.keras")
hvd.allgather(np.array([1]))  # the file is there
loaded = hvd.load_model(sys.argv[1] + f"/{keras.backend.backend()}.keras")
loaded.fit(share(x), share(y), batch_size=8, epochs=1, shuffle=False, verbose=0)
for weight in loaded.get_weights():
    everybody = hvd.allgather(weight[None])
    np.testing.assert_array_equal(everybody[0], everybody[1])
print(f"ok {keras.backend.backend()}", file=sys.stderr if rank else sys.stdout)

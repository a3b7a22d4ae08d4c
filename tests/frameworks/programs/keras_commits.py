"""Commits in the middle of an epoch of Keras's `fit` have the weights of that batch."""

import itertools

import keras
import numpy as np

import cordee.horovod.keras as hvd

hvd.init()
numbers = np.random.default_rng(0)
x, y = numbers.integers(-4, 5, (48, 6)).astype("float32"), numbers.integers(-2, 3, (48, 2)).astype("float32")
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, kernel_initializer="zeros")])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(2.0**-6, momentum=0.5)), loss="mse")
state = hvd.elastic.KerasState(model, epoch=0)
committed = []


class Recording(keras.callbacks.Callback):
    """Keeps what was committed."""

    def on_train_batch_end(self, batch, logs=None):
        committed.append(state._commits.state().tensors["stateful.model.v0"].clone().numpy())


@hvd.elastic.run
def train(state):
    callbacks = [hvd.elastic.CommitStateCallback(state), Recording()]
    model.fit(x, y, batch_size=12, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)


train(state)
assert len(committed) == 4
assert all(not np.array_equal(one, other) for one, other in itertools.pairwise(committed))
np.testing.assert_array_equal(committed[-1], model.variables[0].numpy())
state.restore()
np.testing.assert_array_equal(committed[-1], model.variables[0].numpy())
print("ok", keras.backend.backend())

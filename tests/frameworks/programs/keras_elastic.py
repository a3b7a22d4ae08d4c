"""A Keras model trained by hand under `cordee run --elastic`, with a rank that is killed: prints its weights.

Gradients are whole numbers and rates powers of two, and a batch is of 12 samples on any number of ranks: weights are
the same bits whoever computes them. With TensorFlow the step is a `tf.function`.
"""

import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np

backend = keras.backend.backend()
if backend == "tensorflow":
    import tensorflow as tf

    import cordee.horovod.tensorflow as hvd

    State = hvd.elastic.TensorFlowKerasState
else:
    import cordee.horovod.keras as hvd

    State = hvd.elastic.KerasState

hvd.init()
numbers = np.random.default_rng(0)
inputs, targets = numbers.integers(-4, 5, (48, 6)), numbers.integers(-2, 3, (48, 2))
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, use_bias=False, kernel_initializer="zeros")])
optimizer = keras.optimizers.SGD(2.0**-4, momentum=0.5)


def gradient(x, y):
    """Of the sum of products of outputs and targets."""
    if backend == "tensorflow":
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x) * y)
        return hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, model.trainable_variables)
    return [keras.ops.convert_to_tensor(hvd.allreduce(x.T @ y, name="gradient", op=hvd.Sum))]


def step(x, y):
    optimizer.apply(gradient(x, y), model.trainable_variables)


if backend == "tensorflow":
    step = tf.function(step)


@hvd.elastic.run
def train(state):
    own = 12 // hvd.size()
    while state.batch < 12:
        first = 12 * (state.batch % 4) + own * hvd.rank()
        if state.batch == 5 and hvd.rank() == 1 and "kill" in sys.argv and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        step(*(part[first : first + own].astype("float32") for part in (inputs, targets)))
        state.batch += 1
        state.commit()


optimizer.build(model.trainable_variables)
state = State(model, optimizer, batch=0)
train(state)
if hvd.rank() == 0:
    print("weights", model.get_weights()[0].astype("float64").ravel() @ 2.0 ** np.arange(12))

"""The towers of the classic TensorFlow examples: each computes gradients on its part of the batch, all apply the mean.

Here a tower is a process, and the mean is taken in shared memory:

    python examples/tensorflow_towers.py
    cordee run -n 2 examples/tensorflow_towers.py

Both print the same: a tower's loss is the mean over its part, and the parts are equal.
"""

import argparse

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import cordee.horovod.tensorflow as hvd


def tower_loss(variables: list[tf.Variable], images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    kernel, bias, weights, out, out_bias = variables
    hidden = tf.nn.relu(tf.nn.conv2d(images, kernel, strides=1, padding="SAME") + bias)
    hidden = tf.reshape(tf.nn.max_pool2d(hidden, 2, 2, "SAME"), [-1, 4 * 4 * 8])
    logits = tf.nn.relu(hidden @ weights) @ out + out_bias
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def average_gradients(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    """Return the mean of each gradient over all towers; all gradients go in one exchange."""
    return hvd.grouped_allreduce(gradients, op=hvd.Average)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=64, help="of all towers together")
    arguments = parser.parse_args()

    hvd.init()
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype("float32")
    labels = digits.target.astype("int32")
    tf.random.set_seed(hvd.rank())  # the weights are those of the first tower
    shapes = [[3, 3, 1, 8], [8], [128, 32], [32, 10], [10]]
    if hvd.rank() == 0:
        tf.random.set_seed(0)
    variables = [tf.Variable(tf.random.normal(shape, stddev=0.1)) for shape in shapes]
    hvd.broadcast_variables(variables, root_rank=0)

    @tf.function
    def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tower_loss(variables, x, y)
        *gradients, mean_loss = average_gradients([*tape.gradient(loss, variables), loss])
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.5 * gradient)
        return mean_loss

    order = np.random.default_rng(0)
    for step in range(1, arguments.steps + 1):
        batch = order.choice(len(images), arguments.batch_size, replace=False)
        part = np.split(batch, hvd.size())[hvd.rank()]
        loss = train_step(tf.constant(images[part]), tf.constant(labels[part]))
        if step % 10 == 0 and hvd.rank() == 0:
            print(f"step {step}  loss {float(loss):.3f}", flush=True)


if __name__ == "__main__":
    main()

"""What one rank computes alone: the same for both ways of running a program, as nothing of it is under test."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from fuzzing.programs import LENGTH

LOCAL = {
    "sin": jnp.sin,
    "tanh": jnp.tanh,
    "affine": lambda a: 0.7 * a + 0.2,
    "roll": lambda a: jnp.roll(a, 1),
    "name": lambda a: checkpoint_name(jnp.sin(a), "kept"),
    "product": lambda a, b: jnp.sin(a * b),
    "sum": lambda a, b: jnp.tanh(a + b),
    "plus": lambda a, b: a + b,
    "dot": lambda a, b: jnp.tanh(a * (a @ b)),
    "copy": lambda *a: a[0],
}
STEPS = 7
"""Of the fixed-point iterations, which converge fast as what they communicate is made small by this factor:"""
COPIES = 12000
WEAK = 0.002


def constant(rank, salt):
    return np.cos(np.arange(LENGTH) + 1.3 * rank + 0.7 * salt)


def weights(size):
    """With which the rows of a stacked result are added up."""
    return [0.6 - 0.25 * i for i in range(size)]


def rows(rank, root):
    """How many elements of a vector a rank has where arrays are divided by rows."""
    return (rank + root) % (LENGTH + 1)


def owners(rank, root, peer, size):
    """The new owner of each row that a rank has where rows migrate; -1: nobody."""
    return [(2 * rank + i * peer + root) % (size + 1) - 1 for i in range(rows(rank, root))]


def as_rows(x, size, count):
    """So many rows made of a vector, one number each; of many vectors, of which each has a column."""
    stacked = jnp.concatenate([x * (j + 1) for j in range(size)], axis=-1)
    return jnp.moveaxis(stacked[..., :count], -1, 0)


def padded(x, length):
    return jnp.concatenate([x, jnp.zeros(length - x.shape[0], x.dtype)])


def combine_rows(x, size):
    """A vector of elements that were put one behind the other."""
    return combine(padded(x, size * LENGTH).reshape(size, LENGTH))


def combine(rows):
    return sum(weight * row for weight, row in zip(weights(len(rows)), rows, strict=True))


def together(results):
    """Of operations that are waited for together."""
    return sum(y / (i + 1) for i, y in enumerate(results))


def many(x):
    """Copies of a vector, and more than are sent at once."""
    return jnp.broadcast_to(x, (COPIES, *x.shape))


def tie(x):
    """The same value on all ranks, with the derivative of `x`."""
    return x - jax.lax.stop_gradient(x) + 0.5


def to_integer(x):
    return jnp.round(4 * x).astype(jnp.int32)


def from_integer(x):
    return x / 4.0


def rows_of(x, length):
    """What a scan goes through, made of one vector."""
    return [x * (1 + 0.2 * j) for j in range(length)]


def with_everything(result, values):
    return result + 0.1 * sum(values)

"""Typed random keys (`jax.random.key`): MPI moves the words that they are made of, on an axis more, the last one.

What checks arguments sees keys, whose shape has no such axis; what binds operations turns them into words, and the
words that come back into keys (`_primitive.operation`).
"""

import functools
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi._jax import internals


def is_key(x: Any) -> bool:
    """Whether an array, or its type, is of typed keys."""
    return type(x) is not internals.ConcreteArray and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def among(xs: Iterable[Any]) -> bool:
    """Whether one of the arrays is of typed keys."""
    return any(map(is_key, xs))


@functools.cache
def _kind(dtype: Any) -> tuple[Any, int]:
    """The implementation of keys, as `jax.random.wrap_key_data` takes it, and how many axes their words have."""
    with internals.no_trace():
        key = jnp.zeros((), dtype)
        return jax.random.key_impl(key), jax.random.key_data(key).ndim


def impl(dtype: Any) -> Any:
    """The implementation of keys of this dtype, as `jax.random.wrap_key_data` takes it."""
    return _kind(dtype)[0]


def axes(x: Any) -> int:
    """How many axes the words of an array have more than the array: none, unless it is of keys."""
    return _kind(x.dtype)[1] if is_key(x) else 0


def words_of(impl: str) -> tuple[int, ...]:
    """The shape of the words of one key of an implementation."""
    return tuple(jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl))).shape)


def types(xs: Iterable[Any]) -> tuple[Any, ...]:
    """The dtype of each array if it is of keys, else None: what `like` needs to know, and is hashed and compared."""
    return tuple(x.dtype if is_key(x) else None for x in xs)


def words(x: Any) -> Any:
    """The words of keys; other arrays as they are."""
    return jax.random.key_data(x) if is_key(x) else x


def like(result: Any, dtype: Any) -> Any:
    """The keys of this dtype that are made of these words; the array as it is if the dtype is of no keys, or None."""
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return result
    return jax.random.wrap_key_data(result, impl=_kind(dtype)[0])


def pad(x: Any, pads: Sequence[tuple[int, int]]) -> Any:
    """`jnp.pad` by zeros; keys by keys of zeros."""
    return like(jnp.pad(words(x), [*pads, *[(0, 0)] * axes(x)]), x.dtype)


def signature(xs: Iterable[Any]) -> np.uint32:
    """A number of 32 bits by which ranks find that their keys are of different implementations."""
    return np.uint32(zlib.crc32(repr(types(xs)).encode()))

"""Typed random keys (`jax.random.key`): MPI moves the words of a key, on one more axis, the last one.

Checks of arguments see keys, whose shape does not have that axis. Code that binds operations turns keys into words, and
received words into keys (`_primitive.operation`).
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmpi._jax import internals


def is_key(x: Any) -> bool:
    """Return whether an array, or a type, is of typed keys."""
    return type(x) is not internals.ConcreteArray and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def among(xs: Iterable[Any]) -> bool:
    return any(map(is_key, xs))


@functools.cache
def _kind(dtype: Any) -> tuple[Any, int]:
    """Return the implementation of keys, as `jax.random.wrap_key_data` takes it, and how many axes their words have."""
    with internals.no_trace():
        key = jnp.zeros((), dtype)
        return jax.random.key_impl(key), jax.random.key_data(key).ndim


def impl(dtype: Any) -> Any:
    """Return the implementation of keys of this dtype, as `jax.random.wrap_key_data` takes it."""
    return _kind(dtype)[0]


def axes(x: Any) -> int:
    """Return how many more axes the words of an array have than the array: none, unless it is of keys."""
    return _kind(x.dtype)[1] if is_key(x) else 0


def words_of(impl: str) -> tuple[int, ...]:
    return tuple(jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl))).shape)


def types(xs: Iterable[Any]) -> tuple[Any, ...]:
    """Return the dtype of each array if it is of keys, else None. `like` needs these; they are hashed and compared."""
    return tuple(x.dtype if is_key(x) else None for x in xs)


def words(x: Any) -> Any:
    """Return the words of keys; other arrays as they are."""
    return jax.random.key_data(x) if is_key(x) else x


def like(result: Any, dtype: Any) -> Any:
    """Return the keys of this dtype made of these words; the array as it is if the dtype is None or not of keys."""
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return result
    return jax.random.wrap_key_data(result, impl=_kind(dtype)[0])


def pad(x: Any, pads: Sequence[tuple[int, int]]) -> Any:
    """Pad as `jnp.pad` does, with zeros; keys with keys of zeros."""
    return like(jnp.pad(words(x), [*pads, *[(0, 0)] * axes(x)]), x.dtype)

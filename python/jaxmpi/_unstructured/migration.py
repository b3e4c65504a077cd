"""`jaxmpi.migrate`: rows of arrays move to new owners, which are known at run time.

Rows are sorted by owner and sent like `alltoallv`, with the same derivatives. Each array would be a call of MPI. So the
arrays are joined first: one for each dtype that has derivatives, and one of bits for all others.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI

from jaxmpi._jax import internals
from jaxmpi._mpi import communicators, plans
from jaxmpi._operations.by_counts import migrate_rows
from jaxmpi._primitive import arguments, keys
from jaxmpi._primitive import counts as by_counts


def migrate(
    tree: Any, new_owner: Any, *, rows: int | None = None, count: Any = None, comm: MPI.Comm | None = None
) -> tuple[Any, jax.Array, jax.Array]:
    """Move each row of arrays to a rank of its own, for example particles to the rank of their part of space.

    Row i of all arrays goes to rank `new_owner[i]`, which is known at run time. All ranks call it, with pytrees of the
    same structure, dtypes and shapes of rows. The ranks first exchange the numbers of rows, and then send the rows:
    one call of MPI for each floating-point or complex dtype, and one for integers, truth values and all else. The map
    is linear, and the transpose brings the rows back. Under `jax.vmap` a batch travels in the same messages, and all of
    it has the same owners.

    Args:
      tree: array of shape `(n, ...)` of any dtype that can be communicated, or a pytree of arrays with the same `n`.
      new_owner: array of integers of shape `(n,)`: the rank that gets the row, or -1 for a row that nobody gets.
      rows: the number of rows that the results can hold, static. None: `n`.
      count: how many rows there are, if the others are padding. Padding is not sent, and its owners are not read. A
        scalar, which may be known at run time. None: `n`.
      comm: an intra-communicator. None: a clone of COMM_WORLD.

    Returns:
      Three values, `(tree, count, received)`. The arrays have shape `(rows, ...)`: first the rows from rank 0, then the
      rows from rank 1 and so on. Rows from one rank keep the order that they had there. Zeros follow. `count`, a
      scalar, is the number of rows, and `received`, of shape `(size,)`, the number of rows from each rank. Both have
      dtype int32.

    Raises:
      ValueError, TypeError: arrays, owners or a count of the wrong shape or dtype. While tracing, before anything is
        sent; other ranks then wait.
      jax.errors.JaxRuntimeError: at run time, on all ranks: the `new_owner` of a rank contains a number that is no
        rank, or the `count` is negative or more than `n`. This rank sends nothing. Or at run time, on each rank that it
        concerns: more rows arrive than the results can hold.
    """
    resolved = communicators.resolve(comm, "migrate")
    leaves, names, structure = arguments.leaves(tree, "migrate", "tree")
    owners = _integers(new_owner)
    own = by_counts.rows_of(leaves, names, "migrate") if leaves else owners.size
    if owners.shape != (own,):
        which = f"each row of {names[0]}" if leaves else "each row"
        raise ValueError(
            f"migrate: new_owner must be of shape ({own},), a rank for {which}; got shape {owners.shape}. Its values "
            "for rows that are padding are not read: count= says how many are not."
        )
    if all(0 in x.shape[1:] for x in leaves):  # an array in their place travels, so that all ranks check the rows
        results = migrate((jnp.zeros(own, bool), tree), owners, rows=rows, count=count, comm=comm)
        (_, moved), total, received = lax.optimization_barrier(results)
        return moved, total, received
    room = by_counts.room(rows, own, "migrate")
    groups = _groups(leaves)
    counted = None if count is None else by_counts.numbers(count, (), "migrate", "count")
    joined, sent = _sort(resolved.size, groups, leaves, owners, counted)
    kinds = tuple((x.shape[1:], x.dtype) for x in leaves)
    facts = [(name, shape, dtype) for name, (shape, dtype) in zip(names, kinds, strict=True)]
    signature = plans.signature("migrate", facts) % (1 << 31)
    moved, received = migrate_rows(resolved, joined, jax.tree.structure(joined), sent, room, signature)
    total = jnp.sum(received, dtype=jnp.int32)
    return jax.tree.unflatten(structure, _separate(groups, kinds, moved)), total, received


def _integers(new_owner: Any) -> jax.Array:
    if isinstance(new_owner, np.ndarray) and new_owner.dtype.kind in "iu" and new_owner.dtype.itemsize == 8:
        # JAX may cut them to 32 bits. A number that is no rank must remain none.
        least, most = (-2 if new_owner.dtype.kind == "i" else 0), 2**31 - 1
        new_owner = new_owner.clip(least, most).astype(np.int32)
    owners = arguments.array(new_owner, "migrate", "new_owner")
    if not jnp.issubdtype(owners.dtype, jnp.integer):
        raise TypeError(f"migrate: new_owner must be integers, the ranks of the rows, got dtype {owners.dtype}.")
    return owners


def _groups(leaves: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Return the positions of the arrays that are joined to one, on all ranks alike, because it depends on dtypes
    alone. Random keys stay alone, because `alltoallv` compares them."""
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        kind = i if keys.is_key(x) else x.dtype if internals.inexact(x) else "bits"
        groups.setdefault(kind, []).append(i)
    return tuple(map(tuple, groups.values()))


@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _sort(
    size: int, groups: tuple[tuple[int, ...], ...], leaves: list[Any], owners: jax.Array, count: jax.Array | None
) -> tuple[list[Any], jax.Array]:
    """Return the joined arrays, with rows sorted by owner, and the number of rows for each rank. The numbers may be
    codes for an error instead."""
    order, sent = _order(size, owners, count)
    # If there are no rows, the result must still depend on `x`, because other ranks have a batch if `x` is one.
    ordered = [x.at[order].get(mode="promise_in_bounds", unique_indices=True) if x.size else x for x in leaves]
    return [_join([ordered[i] for i in group]) for group in groups], sent


def _order(size: int, owners: jax.Array, count: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return the rows in the order of sending, with rows that are not sent at the end, and the counts."""
    rows = owners.shape[0]
    if owners.dtype.itemsize < 4:
        owners = owners.astype(jnp.int32)
    least = -2 if jnp.issubdtype(owners.dtype, jnp.signedinteger) else 0
    owners = jnp.clip(owners, least, size).astype(jnp.int32)
    own = None if count is None else by_counts.possible(count, rows)
    owners = owners if own is None else jnp.where(jnp.arange(rows, dtype=own.dtype) < own, owners, -1)
    wrong = jnp.any((owners == -2) | (owners == size))
    order, counts = _by_destination(size, jnp.where(owners < 0, size, owners))
    counts = jnp.where(wrong, by_counts.NO_SUCH_RANK, counts)
    return order, counts if own is None else jnp.where(own < 0, by_counts.IMPOSSIBLE, counts)


def _by_destination(size: int, destination: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sort destinations from 0 to `size`, and keep the order of rows with the same one. Return the order and the number
    of rows for each destination but the last."""
    rows = destination.shape[0]
    index, bounds = jnp.arange(rows, dtype=jnp.uint32), np.arange(size + 1, dtype=np.uint32)
    if (size + 1) * rows > 1 << 32:
        destination, order = lax.sort((destination.astype(jnp.uint32), index), num_keys=1, is_stable=True)
    else:  # one number for each pair, which XLA sorts in a fifth of the time
        destination = lax.sort(destination.astype(jnp.uint32) * np.uint32(rows) + index, is_stable=False)
        order, bounds = destination % np.uint32(max(rows, 1)), bounds * np.uint32(rows)
    return order, jnp.diff(jnp.searchsorted(destination, bounds)).astype(jnp.int32)


def _join(arrays: Sequence[Any]) -> Any:
    """Join arrays along their rows: row i of the result is row i of all, one behind the other."""
    if len(arrays) == 1:
        return arrays[0]
    word = _word([x.dtype for x in arrays])
    bits = arrays
    if word is not None:  # on one more axis if an element takes several words
        bits = [lax.bitcast_convert_type(x.astype(_whole(x.dtype)), word) for x in arrays]
    return jnp.concatenate([x.reshape(x.shape[0], math.prod(x.shape[1:])) for x in bits], axis=1)


@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _separate(
    groups: tuple[tuple[int, ...], ...], kinds: tuple[tuple[tuple[int, ...], Any], ...], joined: list[Any]
) -> list[Any]:
    """Return the arrays, with these shapes of rows and dtypes."""
    arrays: list[Any] = [None] * len(kinds)
    for group, rows in zip(groups, joined, strict=True):
        if len(group) == 1:
            arrays[group[0]] = rows
            continue
        word = _word([kinds[i][1] for i in group])
        start = 0
        for i in group:
            shape, dtype = kinds[i]
            each = 1 if word is None else _itemsize(dtype) // word.itemsize
            size = math.prod(shape) * each
            part = lax.slice_in_dim(rows, start, start + size, axis=1)
            start += size
            if word is not None:
                words = part.reshape(rows.shape[0], *shape, *([each] if each > 1 else []))
                part = lax.bitcast_convert_type(words, _whole(dtype)).astype(dtype)
            arrays[i] = part.reshape(rows.shape[0], *shape)
    return arrays


# --- arrays of different dtypes that travel as bits ------------------------------------------------------------------


def _word(dtypes: Sequence[Any]) -> Any:
    """Return the unsigned integer that divides all dtypes, or None if all dtypes are the same and need no words."""
    if all(dtype == dtypes[0] for dtype in dtypes):
        return None
    return np.dtype(f"u{min(map(_itemsize, dtypes))}")


def _whole(dtype: Any) -> Any:
    """Return the dtype of whole bytes that represents truth values, or integers of fewer bits."""
    if dtype == jnp.bool_:
        return np.dtype(np.uint8)
    if jnp.iinfo(dtype).bits < 8:
        return np.dtype(np.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else np.uint8)
    return dtype


def _itemsize(dtype: Any) -> int:
    return int(np.dtype(_whole(dtype)).itemsize)

"""Plans on devices: XLA composes the messages in the memory of the device, and takes them apart.

The core gets one operand, all messages that are sent, and writes one result, all messages that are received. So the
arrays stay on the device, whose compiler fuses the copies, and one copy down and one copy up carry what travels. The
messages are byte by byte those that the core composes of arrays on a CPU.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmpi._jax import internals
from jaxmpi._mpi import plans
from jaxmpi._mpi.plans import Box

_WORDS: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}
_COMBINE: dict[str, Callable[..., Any]] = {"SUM": lax.add, "MAX": lax.max, "MIN": lax.min}
_REDUCE: dict[str, Callable[..., Any]] = {"SUM": jnp.sum, "MAX": jnp.max, "MIN": jnp.min}


class Composed:
    """The messages of a plan as an operand and a result. `started`: of an exchange in two calls."""

    def __init__(self, plan: plans.Plan, started: bool = False):
        self._exchange = plan.exchange
        sizes = [np.dtype(aval.dtype).itemsize for aval in self._exchange.avals]
        self._word = _WORDS[min([4, *sizes])]
        """The type of the operand and of the result: a message is made of whole words."""
        self._of = plans.of_messages(plan, self._word.itemsize, started)
        self.plan = self._of.plan
        sent, received = (internals.ShapedArray((size,), self._word) for size in self._of.sizes)
        self.operands, self.results = [sent], [received]
        self.shown = sent
        """The array of the call, for reports."""

    def pack(self, *arrays: jax.Array) -> list[jax.Array]:
        """Return the operand. The labels, and what lies between the parts, are zero."""
        pieces: list[jax.Array] = []
        end = 0
        for index, begin in sorted(self._of.sent.items(), key=lambda item: item[1]):
            move = self._exchange.moves[index]
            words = _words_of(_read(arrays[move.leaf], move.read), self._word)
            pieces += [jnp.zeros(begin - end, self._word), words]
            end = begin + words.size
        pieces.append(jnp.zeros(self._of.sizes[0] - end, self._word))
        return [lax.concatenate(pieces, 0)]

    def unpack(self, *operands: jax.Array) -> list[jax.Array]:
        """Return the results, from the arrays and the messages that have been received."""
        *arrays, messages = operands
        of = self._exchange
        results = [jnp.zeros(y.shape, y.dtype) for y in of.results] if of.zeroed else list(arrays)
        for fill in of.fills:
            value = np.asarray(fill.value).astype(of.results[fill.leaf].dtype)
            part = jnp.broadcast_to(value, fill.written.counts)
            results[fill.leaf] = _write(results[fill.leaf], fill.written, part, None)
        arriving = {index: move for index, move in enumerate(of.moves) if move.dest == of.rank}
        own = {i: _read(arrays[m.leaf], m.read).reshape(-1) for i, m in arriving.items() if i not in self._of.received}
        # Read before anything is written: otherwise XLA keeps a copy of the field to read from.
        own = lax.optimization_barrier(own)
        for index, move in arriving.items():  # sums in this order, on which the last bits depend
            if index in own:
                part = own[index]
            else:
                begin, dtype = self._of.received[index], np.dtype(of.avals[move.leaf].dtype)
                end = begin + move.read.size * dtype.itemsize // self._word.itemsize
                part = _of_words(lax.slice(messages, (begin,), (end,)), dtype)
            results[move.leaf] = _write(results[move.leaf], move.written, _walked_back(part, move.written), of.combines)
        return results


class Begun(Composed):
    """The start of an exchange: the result is a request."""

    def __init__(self, plan: plans.Plan, request: Any):
        super().__init__(plan, started=True)
        self.results = [internals.ShapedArray(request.shape, request.dtype)]

    def unpack(self, *operands: jax.Array) -> list[jax.Array]:
        return [operands[-1]]


class Ended(Composed):
    """The end of an exchange: the last operand is a request."""

    def __init__(self, plan: plans.Plan, request: Any):
        super().__init__(plan, started=True)
        self.operands, (self.shown,) = [request], self.results

    def pack(self, *operands: jax.Array) -> list[jax.Array]:
        return [operands[-1]]

    def unpack(self, *operands: jax.Array) -> list[jax.Array]:
        *fields, _, messages = operands
        return super().unpack(*fields, messages)


# --- words -----------------------------------------------------------------------------------------------------------


def _words_of(x: jax.Array, word: np.dtype[Any]) -> jax.Array:
    """Return the bytes of an array as words."""
    if jnp.issubdtype(x.dtype, jnp.bool_):
        x = x.astype(np.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    return lax.bitcast_convert_type(x, word).reshape(-1)


def _of_words(words: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Return the elements that are made of these words, one after the other."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return words.astype(bool)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = _of_words(words, np.empty(0, dtype).real.dtype).reshape(-1, 2)
        return lax.complex(parts[:, 0], parts[:, 1])
    each = dtype.itemsize // words.dtype.itemsize
    return lax.bitcast_convert_type(words.reshape(-1, each) if each > 1 else words, dtype)


# --- boxes -----------------------------------------------------------------------------------------------------------


def _order(box: Box) -> list[int]:
    """Return the axes of a box in the order in which they are walked."""
    axes = list(range(len(box.counts)))
    walk = () if box.walk is None else box.walk
    return axes[: len(axes) - len(walk)] + [axis % len(axes) for axis in walk]


def _indices(box: Box) -> Any:
    """Return the indices of a box with a list."""
    assert box.listed is not None
    values = box.listed[1].values
    return values.astype(np.int32) if values.max(initial=0) <= np.iinfo(np.int32).max else values


def _read(x: jax.Array, box: Box) -> jax.Array:
    """Return the elements of a box, in the order in which they are walked."""
    for axis, (start, count, step) in enumerate(zip(box.starts, box.counts, box.steps, strict=True)):
        if box.listed is not None and box.listed[0] == axis:
            x = jnp.take(x, _indices(box), axis, mode="clip")
            continue
        low, high = sorted((start, start + step * (count - 1)))
        x = lax.slice_in_dim(x, low, high + 1, abs(step) or 1, axis)
        if step < 0:
            x = lax.rev(x, (axis,))
        elif step == 0:
            x = jnp.broadcast_to(x, (*x.shape[:axis], count, *x.shape[axis + 1 :]))
    return jnp.transpose(x, _order(box))


def _walked_back(part: jax.Array, box: Box) -> jax.Array:
    """Return elements that lie in the order of the walk as an array of the shape of the box."""
    order = _order(box)
    return jnp.transpose(part.reshape([box.counts[axis] for axis in order]), tuple(np.argsort(order)))


def _write(x: jax.Array, box: Box, part: jax.Array, combines: str | None) -> jax.Array:
    """Return the array with other elements in a box, or with elements that are combined with those in the box."""
    index: list[Any] = []
    for axis, (start, count, step) in enumerate(zip(box.starts, box.counts, box.steps, strict=True)):
        if step < 0:
            part = lax.rev(part, (axis,))
        elif step == 0 and count > 1:
            assert combines is not None  # an element is written once
            part = _REDUCE[combines](part, axis, keepdims=True).astype(x.dtype)
        low, high = sorted((start, start + step * (count - 1)))
        index.append(slice(low, high + 1, abs(step) or 1))
    if box.listed is not None:
        index[box.listed[0]] = _indices(box)
    elif all(part.step == 1 for part in index):
        starts = [part.start for part in index]
        if combines is not None:
            part = _COMBINE[combines](lax.slice(x, starts, [part.stop for part in index]), part)
        return lax.dynamic_update_slice(x, part, starts)
    place = x.at[tuple(index)]
    how: Any = {None: place.set, "SUM": place.add, "MAX": place.max, "MIN": place.min}[combines]
    return how(part, mode="promise_in_bounds")

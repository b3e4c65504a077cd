"""What the families of operations share: how a pytree is checked and how an operation is applied to the leaves.

Stack the arrays of all ranks into one long vector: then an operation is a map of it. If the map is linear, the tangent
is the same operation on the tangents, and the transpose is the adjoint map. The adjoints are operations again, so there
are derivatives of any order. The one exception is `allreduce` of a sum: see `reductions.Allreduce`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

from jaxmpi._jax import internals
from jaxmpi._jax.dependence import dependent_zeros
from jaxmpi._mpi import communicators
from jaxmpi._mpi.library import CONSTANTS, DATATYPES
from jaxmpi._mpi.strings import Text
from jaxmpi._primitive import arguments, keys, lowering
from jaxmpi._primitive.lowering import P
from jaxmpi._primitive.operation import Operation
from jaxmpi._primitive.params import Common, kept

CHECK = communicators.CHECK
"""Whether ranks compare values that must be the same on all of them."""

SUM = arguments.reduction(MPI.SUM, "reduce")

MOST_ARRAYS: int = CONSTANTS["MOST_ARRAYS"]
"""The most arrays that one call takes."""
_SMALL, _MOST_BYTES = 1 << 15, 1 << 22
"""Arrays of at most the first number of bytes are communicated together, because copying them costs less than an
operation for each. The second number is the most bytes of a group."""

Arrays = Sequence[Any]
Leaf = Callable[..., jax.Array]
"""Checks one leaf and converts it to an array: (leaf, *more, operation, argument) -> array."""

common = kept(Common)


def typed(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def is_opaque(x: Any) -> bool:
    """Return whether MPI moves the elements of an array, but does not reduce them."""
    return DATATYPES[np.dtype(x.dtype).name].kind == "opaque"


def sums(xs: Arrays, ys: Arrays) -> list[Any]:
    return [x + y for x, y in zip(xs, ys, strict=True)]


def zeros_dependent_on(values: Arrays, templates: Arrays) -> list[Any]:
    """Return zeros as cotangents of templates. They depend on the communicated values: otherwise the transpose of the
    transpose would not communicate on this rank."""
    return [dependent_zeros([value], template) for value, template in zip(values, templates, strict=True)]


class Collective(Operation[P]):
    """An operation in which all ranks take part, on any number of arrays of one dtype, each as if it were alone."""

    variadic = True

    def result(self, aval: Any, params: P) -> Any:
        return aval

    def results(self, avals: Arrays, params: P) -> list[Any]:
        return [self.result(aval, params) for aval in avals]

    def largest(self, aval: Any, params: P) -> Any:
        """Return the type of the largest array that any rank has, from the type of the operand here."""
        return aval

    def elements(self, arrays: Arrays) -> int:
        return sum(math.prod(x.shape) for x in arrays)

    def apply_to_all(self, params: P, arrays: Arrays) -> list[Any]:
        """Apply the operation to each of the arrays; small arrays of the same dtype travel together. All ranks pass
        arrays of the same sizes and dtypes, so they form the same groups. Return the results in order."""
        if keys.among(arrays):
            types = lowering.types(self, arrays, params)
            words = self.apply_to_all(params, list(map(keys.words, arrays)))
            return [keys.like(y, of_array.dtype) for y, of_array in zip(words, types, strict=True)]
        if len(arrays) == 1:
            return self.apply(params, *arrays)
        results: list[Any] = [None] * len(arrays)
        for group in self._groups(params, arrays):
            for i, result in zip(group, self.apply(params, *(arrays[i] for i in group)), strict=True):
                results[i] = result
        return results

    def _groups(self, params: P, arrays: Arrays) -> list[list[int]]:
        groups: list[list[int]] = []
        unfilled: dict[Any, tuple[list[int], int]] = {}  # of each dtype the last group of small arrays, and the bytes
        for i, x in enumerate(arrays):
            largest = self.largest(jax.typeof(x), params)
            size = math.prod(largest.shape) * np.dtype(largest.dtype).itemsize
            group, filled = unfilled.get(x.dtype, ([], 0))
            if not group or size > _SMALL or filled + size > _MOST_BYTES or len(group) == MOST_ARRAYS:
                groups.append(group := [])
                filled = 0
            group.append(i)
            if size <= _SMALL:
                unfilled[x.dtype] = (group, filled + size)
        return groups

    def apply_to_tree(self, params: P, x: Any, check: Leaf, *more: Any) -> Any:
        """Check all leaves of `x`, then apply the operation to all of them."""
        if type(x) is internals.ConcreteArray:  # as below, but faster
            return self.apply(params, check(x, *more, self.shown, "x"))[0]
        leaves, structure = checked(self.shown, x, check, *more)
        return jax.tree.unflatten(structure, self.apply_to_all(params, leaves))

    def batch(self, axis: Any, operands: Arrays, axes: Arrays, params: P) -> tuple[list[Any], list[Any]]:
        if None not in axes:
            return super().batch(axis, operands, axes, params)
        # Arrays that are not mapped, and then arrays that are mapped.
        single = [i for i, at in enumerate(axes) if at is None]
        mapped = [i for i, at in enumerate(axes) if at is not None]
        results, positions = [None] * len(operands), [None] * len(operands)
        for i, result in zip(single, self.bind(*(operands[i] for i in single), call=params), strict=True):
            results[i] = result
        results_of_mapped = super().batch(axis, [operands[i] for i in mapped], [axes[i] for i in mapped], params)
        for i, result, at in zip(mapped, *results_of_mapped, strict=True):
            results[i], positions[i] = result, at
        return results, positions


def checked(operation: str, x: Any, check: Leaf, *more: Any) -> tuple[list[jax.Array], Any]:
    """Check all leaves of `x`. Return the leaves as arrays, and the structure."""
    leaves, structure = arguments.pytree(x, operation, "x")
    try:
        return [check(leaf, *more, operation, "x") for leaf in leaves], structure
    except (TypeError, ValueError):
        arguments.leaves(x, operation, "x", lambda leaf, *names: check(leaf, *more, *names))  # again, to name the leaf
        raise


def differing_cotangents(operation: str) -> Text:
    """Return the error if the cotangents of an allreduce differ, with the line of the program that makes it."""
    return arguments.with_calling_line(
        f"the cotangent of an {operation} differs from that of rank 0, though what is computed from its result must "
        "be the same on all ranks: gradients would be wrong. Pass what the ranks use differently, such as the "
        f"parameters of a model, through jaxmpi.replicate first. The {operation} is at"
    )

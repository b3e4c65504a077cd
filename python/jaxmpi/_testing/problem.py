"""The one function of all ranks, with the variables and the results."""

import inspect
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxmpi._jax import internals
from jaxmpi._primitive import arguments
from jaxmpi._testing.together import Ranks


@dataclass(frozen=True)
class Leaf:
    """An array among the arguments, or among the results."""

    name: str
    invariant: bool
    """Whether all ranks have one value. Otherwise the value of each rank is a variable, or a result, of its own."""


class Problem:
    """A function of all ranks at one point. The floating-point and complex arrays among the results are differentiated,
    with respect to the floating-point and complex arrays among the arguments."""

    def __init__(self, f: Callable[..., Any], args: Any, invariant: Any, invariant_out: Any) -> None:
        if not isinstance(args, (tuple, list)):
            raise TypeError(f"check_grads: args must be a tuple of the arguments of f, got {args!r}.")
        names = _names(f, len(args))
        chosen = _positions(invariant, names)
        paths, self._structure = jax.tree_util.tree_flatten_with_path(tuple(args))
        named = [Leaf(_name(names, path), path[0].idx in chosen) for path, _ in paths]
        self._leaves = [leaf for _, leaf in paths]
        self._which = [i for i, leaf in enumerate(self._leaves) if _is_variable(leaf)]
        for i in self._which:
            self._leaves[i] = arguments.array(self._leaves[i], "check_grads", named[i].name)
        if not self._which:
            raise ValueError("check_grads: args have no array of floating-point or complex numbers on this rank.")
        self._f, self._invariant_out = f, invariant_out
        self.variables = [named[i] for i in self._which]
        self.shared = [
            (leaf.name, x) for leaf, x in zip(named, self._leaves, strict=True) if leaf.invariant and _is_array(x)
        ]
        """The arrays that must be the same on all ranks, integers too, with names."""

    @property
    def values(self) -> list[Any]:
        """The values of the variables on this rank."""
        return [_copy(self._leaves[i]) for i in self._which]

    def call(self, *values: Any) -> Any:
        """Return the result of f for these values of the variables."""
        leaves = list(self._leaves)
        for i, value in zip(self._which, values, strict=True):
            leaves[i] = value
        return self._f(*jax.tree.unflatten(self._structure, map(_copy, leaves)))

    def apply(self, function: Callable[..., Any]) -> Any:
        """Return the result of another function of the arguments."""
        return function(*jax.tree.unflatten(self._structure, map(_copy, self._leaves)))

    def function(self, *values: Any) -> list[Any]:
        """Return the results of f that are differentiated, for these values of the variables."""
        return [y for y in jax.tree.leaves(self.call(*values)) if internals.inexact(y)]

    def results(self, result: Any) -> tuple[list[Leaf], list[np.ndarray]]:
        """Return descriptions and values of the differentiated parts of `result`, which f has returned."""
        kinds = _of_leaves(self._invariant_out, result)
        paths, _ = jax.tree_util.tree_flatten_with_path(result)
        every = [
            (Leaf("result" + jax.tree_util.keystr(path), kind), y) for kind, (path, y) in zip(kinds, paths, strict=True)
        ]
        differentiated = [(leaf, np.asarray(y)) for leaf, y in every if internals.inexact(y)]
        if not differentiated:
            raise ValueError("check_grads: f returns no array of floating-point or complex numbers.")
        return [leaf for leaf, _ in differentiated], [y for _, y in differentiated]

    def select(self, gradient: Any) -> list[Any]:
        """Return the leaves of a gradient, a pytree like the arguments, that belong to variables."""
        leaves = jax.tree.leaves(gradient)
        if len(leaves) == len(self._leaves):
            leaves = [leaves[i] for i in self._which]
        shapes, expected = ([np.shape(x) for x in xs] for xs in (leaves, self.values))
        if shapes != expected:
            raise TypeError(
                "check_grads: gradient must return a tuple with a pytree like each of args, as jax.grad(f, argnums) "
                f"does with all argnums. Its arrays have shapes {shapes}, but args have {expected}."
            )
        return leaves

    def compare(self, ranks: Ranks) -> None:
        """Raise ValueError, on all ranks, if their arguments do not match, or an invariant one is not the same."""
        described = ranks.gather([(leaf.name, leaf.invariant) for leaf in self.variables])
        if (other := next((rank for rank, names in enumerate(described) if names != described[0]), None)) is not None:
            listed = [", ".join(name for name, _ in described[rank]) for rank in (0, other)]
            raise ValueError(
                "check_grads: all ranks must have arrays of the same names among args, and the same ones invariant. "
                f"Rank 0 has {listed[0]}, and rank {other} {listed[1]}."
            )
        for name, x in self.shared:
            if (difference := ranks.difference(x)) is not None:
                raise ValueError(
                    f"check_grads: {name} is invariant, so it must be the same on all ranks, but it is {difference}.\n"
                    "Let all ranks begin with the same, for example what jaxmpi.bcast sends from rank 0. If each "
                    "rank has its own,\nleave it out of invariant."
                )


def _copy(leaf: Any) -> Any:
    """Return a new array, because a function may donate the arguments."""
    if not isinstance(leaf, jax.Array) or internals.is_tracer(leaf):
        return leaf
    with internals.no_trace():
        return leaf.copy()


def _is_array(leaf: Any) -> bool:
    """Return whether it is an array or a number, or a type of arrays. Functions and texts of a module are constants."""
    kinds = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, numbers.Number)
    return isinstance(leaf, kinds) or hasattr(leaf, "__jax_array__")


def _is_variable(leaf: Any) -> bool:
    return _is_array(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct) and internals.inexact(leaf)


def _names(f: Callable[..., Any], count: int) -> list[str]:
    """Return the names of the first parameters of a function, or args[0] and so on if they have none."""
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        parameters = []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in positional][:count]
    return names + [f"args[{i}]" for i in range(len(names), count)]


def _name(names: Sequence[str], path: Sequence[Any]) -> str:
    return names[path[0].idx] + jax.tree_util.keystr(tuple(path[1:]))


def _positions(invariant: Any, names: Sequence[str]) -> set[int]:
    """Return the positions of the arguments that the user gives by positions or names."""
    positions = set()
    for which in (invariant,) if isinstance(invariant, (str, int)) else tuple(invariant):
        if isinstance(which, str) and which in names:
            positions.add(names.index(which))
        elif isinstance(which, int) and -len(names) <= which < len(names):
            positions.add(which % len(names))
        else:
            raise ValueError(
                f"check_grads: invariant must be positions or names of arguments, {', '.join(names)}; got {which!r}."
            )
    return positions


def _of_leaves(prefix: Any, tree: Any) -> list[bool]:
    """Return a truth value for each leaf of `tree`, as a prefix of it says."""
    try:
        whole = jax.tree.map(lambda one, part: jax.tree.map(lambda _: bool(one), part), prefix, tree)
    except ValueError as error:
        raise ValueError(
            "check_grads: invariant_out must be True, False, or a pytree of these that is a prefix of the result of f. "
            f"Got {prefix!r}, and f returns {jax.tree.structure(tree)}."
        ) from error
    return jax.tree.leaves(whole)

"""Checks the arguments of users, before anything is sent. Errors name operation, argument, value and what to try."""

import ctypes
import functools
import operator
import threading
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import jaxmpi._core as _core
from jaxmpi._jax import internals
from jaxmpi._mpi import call_sites, static, tags
from jaxmpi._mpi.communicators import Communicator
from jaxmpi._mpi.library import DATATYPES, OWN_OPERATIONS, Datatype, handle_of
from jaxmpi._mpi.strings import Text, text_of
from jaxmpi._primitive import envelope, keys
from jaxmpi._primitive.effect import Unsupported
from jaxmpi._primitive.jit import Token

_ARITHMETIC = ("SUM", "PROD", "MAX", "MIN")
_LOGICAL = ("LAND", "LOR", "LXOR")
_BITWISE = ("BAND", "BOR", "BXOR")
_PREDEFINED = (*_ARITHMETIC, *_LOGICAL, *_BITWISE, "MAXLOC", "MINLOC", "REPLACE", "NO_OP")
_NUMBERS = {name: _core.reduction(handle_of(getattr(MPI, name)), name) for name in (*_ARITHMETIC, *_LOGICAL, *_BITWISE)}

# The predefined reductions of each kind of datatype, with the MPI operation that does them: on truth values MPI has
# only the logical operations, which give the same results as the bitwise ones, MAX and MIN.
REDUCTIONS: dict[str, dict[str, str]] = {
    "logical": {
        **{name: name for name in _LOGICAL},
        **dict(zip(_BITWISE, _LOGICAL, strict=True)),
        "MAX": "LOR",
        "MIN": "LAND",
    },
    "integer": {name: name for name in (*_ARITHMETIC, *_LOGICAL, *_BITWISE)},
    "floating": {name: name for name in _ARITHMETIC},
    "half": {name: name for name in _ARITHMETIC},
    "complex": {name: name for name in ("SUM", "PROD")},
    "opaque": {},
}


@dataclass(frozen=True, eq=False)
class Reduction:
    """A reduction as a parameter: predefined (by name) or user-made (by number). One object for each."""

    name: str
    number: int | None = None
    op: MPI.Op | None = field(default=None, compare=False, repr=False)
    """The user's operation: compiled programs look here whether the user has freed it."""

    def alive(self) -> bool:
        """Return whether the user has not freed it."""
        return self.op is None or self.op != MPI.OP_NULL

    def number_for(self, datatype: Datatype) -> int:
        """Return the core's number of the reduction for elements of this type."""
        if self.number is not None:
            return self.number
        if (own := OWN_OPERATIONS[datatype.name].get(self.name)) is not None:
            return own
        if self.name not in (possible := REDUCTIONS[datatype.kind]):
            raise TypeError(
                f"MPI.{self.name} is not defined for dtype {datatype.name}, and a derivative here needs it: convert to "
                "another dtype first, such as float32."
            )
        return _NUMBERS[possible[self.name]]


_reductions = {handle_of(getattr(MPI, name)): Reduction(name) for name in _PREDEFINED}


class Status:
    """An MPI.Status as a parameter of compiled programs. They write to it whenever they run, so it is never freed."""

    __slots__ = ("mpi", "number")

    def __init__(self, mpi: MPI.Status):
        self.mpi, self.number = mpi, _core.register(MPI._addressof(mpi))

    def copy_to(self, other: MPI.Status) -> None:
        ctypes.memmove(MPI._addressof(other), MPI._addressof(self.mpi), MPI._sizeof(MPI.Status))


def with_calling_line(text: str) -> Text:
    """Return a text that ends with the line of the user's program that called the package, directly or through JAX."""
    return text_of(f"{text} {call_sites.here()}")


_statuses: dict[int, Status] = {}
_eager = threading.local()


def status(value: Any, operation: str) -> Status | None:
    """Return the status that a program writes to: the user's own while tracing, one per thread for eager calls.

    So eager calls share a program even if each passes a new MPI.Status; `_with_status` copies the result to it.
    """
    if value is None:
        return None
    if not isinstance(value, MPI.Status):
        raise TypeError(f"{operation}: status must be an MPI.Status or None, got {value!r}.")
    if internals.trace_state_clean():
        if not hasattr(_eager, "status"):
            _eager.status = Status(MPI.Status())
        return _eager.status
    address = MPI._addressof(value)
    if address not in _statuses:
        _statuses[address] = Status(value)
    return _statuses[address]


@functools.cache
def _row(dtype: Any) -> Datatype | str:
    if dtype == jax.dtypes.float0:  # the derivative of integers
        return "float0"
    name = str(dtype) if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype).name
    return DATATYPES.get(name, name)


def datatype(dtype: Any, operation: str, argument: str) -> Datatype:
    """Return the row of a dtype. Raise TypeError if it cannot be communicated."""
    row = _row(dtype)
    if isinstance(row, str):
        raise TypeError(
            f"{operation}: {argument} has dtype {row}, which cannot be communicated; use {argument}.astype(...). "
            f"Possible: {', '.join(DATATYPES)}."
        )
    return row


_IN_PLACE = (
    "pass the array itself. Results are new arrays, which share memory with their operands where nothing else needs "
    "these."
)
_NO_ARRAYS = {
    type(MPI.IN_PLACE): _IN_PLACE,
    type(MPI.BOTTOM): _IN_PLACE,
    MPI.Datatype: "in the place of mpi4py's [x, count, datatype] pass x alone, which knows its size and dtype.",
    **dict.fromkeys(static.CLASSES, "pass it as comm= or op=."),
}


def never_an_array(kind: type, advice: str) -> None:
    """Make an object of this type an error in the place of an array, even if `jnp.asarray` accepts it or it is a
    pytree. The error gives the advice."""
    _NO_ARRAYS[kind] = advice


def _is_no_array(x: Any) -> bool:
    return type(x) in _NO_ARRAYS


def _as_array(x: Any, operation: str, argument: str) -> jax.Array:
    if type(x) is internals.ConcreteArray or (isinstance(x, jax.Array) and not internals.is_tracer(x)):
        if (devices := internals.devices_of_array(x)) > 1:
            raise Unsupported(f"{operation}: {argument} is {internals.spread(devices)}")
        return x
    if isinstance(x, jax.Array):
        return x
    if (advice := _NO_ARRAYS.get(type(x))) is not None:
        raise TypeError(f"{operation}: {argument} is {_name_of(x)}, which is no array: {advice}")
    try:
        return jnp.asarray(x)
    except (OverflowError, TypeError, ValueError) as error:
        raise TypeError(
            f"{operation}: {argument} must hold JAX arrays, numbers, or what jnp.asarray makes an array of; got {x!r} "
            f"of type {type(x).__name__}. JAX says: {error}"
        ) from error


def _name_of(x: Any) -> str:
    """Return mpi4py's constants by their names: in some versions they are integers, and look like integers."""
    constants = {"MPI.IN_PLACE": MPI.IN_PLACE, "MPI.BOTTOM": MPI.BOTTOM}
    return next((name for name, value in constants.items() if value is x), repr(x))


def array(x: Any, operation: str, argument: str) -> jax.Array:
    """Return one leaf of an input as a JAX array."""
    x = _as_array(x, operation, argument)
    if not keys.is_key(x):
        datatype(x.dtype, operation, argument)
    return x


def template(x: Any, operation: str, argument: str) -> jax.Array:
    """Return one leaf of a template, of which only shape, dtype and batching are used."""
    if isinstance(x, jax.ShapeDtypeStruct):
        x = jnp.zeros(x.shape, x.dtype)
    return array(x, operation, argument)


def stacked(x: Any, size: int, operation: str, argument: str) -> jax.Array:
    x = array(x, operation, argument)
    if x.ndim == 0 or x.shape[0] != size:
        raise ValueError(
            f"{operation}: the first axis of {argument} must be the number of ranks, {size}, one entry for each; got "
            f"shape {x.shape}. Reshape it, for example to ({size}, -1)."
        )
    return x


def integer(value: Any, operation: str, argument: str) -> int:
    """Return a static integer. Raise TypeError for anything else, a traced value for example."""
    if type(value) is int:
        return value
    if internals.is_tracer(value):
        raise TypeError(
            f"{operation}: {argument} must be known when the function is compiled, got the traced value {value}. "
            "Mark it static (jax.jit(..., static_argnums=...)), or take it from the enclosing scope."
        )
    try:
        if not _is_no_array(value):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(
        f"{operation}: {argument} must be a Python or NumPy integer, got {_name_of(value)} of type "
        f"{type(value).__name__}."
    )


def rank(value: Any, comm: Communicator, operation: str, argument: str, also: tuple[int, ...] = ()) -> int:
    """Return a rank of `comm`, or one of the special values in `also`."""
    value = integer(value, operation, argument)
    if not (0 <= value < comm.size or value in also):
        special = "".join(f" or MPI.{name}" for name in ("PROC_NULL", "ANY_SOURCE") if getattr(MPI, name) in also)
        raise ValueError(
            f"{operation}: {argument} must be a rank of the communicator, 0 to {comm.size - 1}{special}; got {value}."
        )
    return value


def peer(value: Any, comm: Communicator, operation: str, argument: str) -> Any:
    """Return a rank to receive from (`source`) or to send to (`dest`); may be traced."""
    if (traced := envelope.at_run_time(value, operation, argument)) is not None:
        return traced
    also = (MPI.ANY_SOURCE, MPI.PROC_NULL) if argument == "source" else (MPI.PROC_NULL,)
    return rank(value, comm, operation, argument, also)


def tag(value: Any, operation: str, argument: str, also: tuple[int, ...] = ()) -> Any:
    """Return a tag; may be traced."""
    if (traced := envelope.at_run_time(value, operation, argument)) is not None:
        return traced
    value = integer(value, operation, argument)
    if not (0 <= value <= tags.LIMIT or value in also):
        special = " or MPI.ANY_TAG" if also else ""
        raise ValueError(f"{operation}: {argument} must be between 0 and {tags.LIMIT}{special}; got {value}.")
    if value in tags.KEPT:
        raise ValueError(f"{operation}: {argument} {value} is a tag that jaxmpi keeps for itself: choose another.")
    return value


def reduction(op: Any, operation: str) -> Reduction:
    """Return the reduction of a call. Raise TypeError if `op` is not an MPI.Op, ValueError if it has been freed."""
    if not isinstance(op, MPI.Op):
        raise TypeError(
            f"{operation}: op must be an mpi4py operation such as MPI.SUM, got {op!r} of type {type(op).__name__}."
        )
    if op == MPI.OP_NULL:
        raise ValueError(f"{operation}: op is MPI.OP_NULL: it has been freed. Pass a live operation.")
    if isinstance(op, static.Static):  # MPI may have reused the handle
        if not op.lifetime.alive():
            raise ValueError(f"{operation}: op is {op!r}, which has been freed. Pass a live operation.")
        return op.lifetime
    handle = handle_of(op)
    known = _reductions.get(handle)
    if known is None or (known.op is not None and known.op != op):  # freed, and MPI has reused the handle
        name = f"user-defined ({handle:#x})"
        number = _core.reduction(handle, name, MPI._addressof(op), MPI._sizeof(op))
        known = _reductions[handle] = Reduction(name, number, op)
    return known


class _Kept:
    """A leaf that is not an array, as a node without leaves. A tree made of the structure has the leaf itself again."""

    def __init__(self, leaf: Any):
        self.leaf = leaf


jax.tree_util.register_pytree_node(_Kept, lambda kept: ((), kept.leaf), lambda leaf, _: leaf)


def _is_kept(x: Any) -> bool:
    """Return whether a leaf is a function or a dtype, which models have beside their arrays. A text is not kept: it
    would look as if it had been communicated."""
    if isinstance(x, (type, np.dtype)):
        return True
    return callable(x) and not isinstance(x, MPI.Op) and not hasattr(x, "__array__") and not hasattr(x, "__jax_array__")


def only_arrays(x: Any) -> Any:
    """Return the tree with the same arrays and numbers as leaves, and with all other leaves in its structure."""
    return _only_arrays(x, *jax.tree.flatten(x, is_leaf=_is_no_array))


def _only_arrays(x: Any, leaves: list[Any], structure: Any) -> Any:
    if len(leaves) < 2:
        return x
    kept = [type(leaf) is not internals.ConcreteArray and _is_kept(leaf) for leaf in leaves]
    if all(kept) or not any(kept):  # without an array there is nothing to communicate: an error
        return x
    pairs = zip(leaves, kept, strict=True)
    return jax.tree.unflatten(structure, [_Kept(leaf) if is_kept else leaf for leaf, is_kept in pairs])


def pytree(x: Any, operation: str, argument: str) -> tuple[list[Any], Any]:
    """Return the leaves that are arrays or numbers, and the structure, which has everything else. Raise TypeError for
    None and tokens, which have no leaves."""
    if x is None or isinstance(x, Token):
        raise TypeError(
            f"{operation}: {argument} is {x}, which has no array: nothing would be communicated, and other ranks may "
            "wait for it. Pass an array, or a pytree of arrays."
        )
    leaves, structure = jax.tree.flatten(x, is_leaf=_is_no_array)
    arrays = _only_arrays(x, leaves, structure)
    return (leaves, structure) if arrays is x else jax.tree.flatten(arrays, is_leaf=_is_no_array)


def leaves(x: Any, operation: str, argument: str, check: Any = array) -> tuple[list[Any], list[str], Any]:
    """Return the leaves as `check(leaf, operation, name)` returns them, their names, and their structure."""
    pytree(x, operation, argument)
    paths, structure = jax.tree_util.tree_flatten_with_path(only_arrays(x), is_leaf=_is_no_array)
    names = [f"{argument}{jax.tree_util.keystr(path)}" for path, _ in paths]
    return [check(leaf, operation, name) for (_, leaf), name in zip(paths, names, strict=True)], names, structure


def reducible(x: Any, op: Reduction, operation: str, argument: str) -> jax.Array:
    """Return one leaf of an input to a reduction. Raise TypeError if MPI has no reduction like this for the dtype."""
    x = _as_array(x, operation, argument)
    if keys.is_key(x):
        raise TypeError(
            f"{operation}: {argument} has dtype {x.dtype}, of random keys, which are moved, not reduced. To reduce the "
            "words that they are made of, pass jax.random.key_data(key)."
        )
    row = datatype(x.dtype, operation, argument)
    possible = REDUCTIONS[row.kind]
    if op.name in possible or op.name not in _PREDEFINED:
        return x
    hint = f"possible: {', '.join('MPI.' + name for name in possible)}" if possible else "it can be moved, not reduced"
    advice = " To count, convert to an integer first." if row.kind == "logical" else ""
    which = "" if argument == "x" else f" of {argument}"
    raise TypeError(f"{operation}: op MPI.{op.name} is not defined for dtype {row.name}{which}; {hint}.{advice}")


def stacked_reducible(x: Any, size: int, op: Reduction, operation: str, argument: str) -> jax.Array:
    return stacked(reducible(x, op, operation, argument), size, operation, argument)


NOT_FROM_ZERO = ("PROD", "LAND", "BAND", "MAX", "MIN")
"""The reductions with another identity than zero, for some dtypes at least."""


def identity(name: str, dtype: Any) -> Any:
    """Return the identity element of the reduction; zero for a user-made reduction, which may have none."""
    kind = np.dtype(dtype)
    logical = kind.kind == "b"
    if name in ("PROD", "LAND") or (logical and name in ("BAND", "MIN")):
        return np.ones((), kind)
    if name == "BAND":
        return ~np.zeros((), kind)
    if name not in ("MAX", "MIN") or logical:
        return np.zeros((), kind)
    if jnp.issubdtype(kind, jnp.inexact):
        return np.asarray(-np.inf if name == "MAX" else np.inf, kind)
    return np.asarray(getattr(jnp.iinfo(kind), "min" if name == "MAX" else "max"), kind)


def one_message(source: Any, x: Any, operation: str) -> Any:
    """Return the source. Raise ValueError for several messages from any source, because they could come from different
    ranks. For a source that is known at run time, return a number instead that the core rejects as a rank."""
    leaves = len(jax.tree.leaves(only_arrays(x)))
    if leaves <= 1:
        return source
    if not isinstance(source, int):
        return jnp.where(source == MPI.ANY_SOURCE, jnp.int32(envelope.ANY_OF_SEVERAL), source)
    if source == MPI.ANY_SOURCE:
        raise ValueError(
            f"{operation}: a pytree of {leaves} arrays is as many messages, and with source=MPI.ANY_SOURCE they could "
            "come from different ranks. Name the source, or receive one array at a time."
        )
    return source

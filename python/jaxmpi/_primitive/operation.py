"""An operation as an object that communicates when it is applied, and its compiled programs for eager calls."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

from jaxmpi._jax import internals
from jaxmpi._jax.dependence import depends_on
from jaxmpi._mpi import call_sites, communicators, timeline
from jaxmpi._mpi.communicators import Communicator
from jaxmpi._primitive import arguments, keys
from jaxmpi._primitive.jit import eager
from jaxmpi._primitive.lowering import P
from jaxmpi._primitive.params import TANGENT, Common, Comparing, Reducing
from jaxmpi._primitive.rules import Transformed

KNOWN: "list[Operation[Any]]" = []
"""All operations."""


class Operation(Transformed[P]):
    """A primitive that communicates."""

    def __init__(self, name: str, adjoint: "Operation[Any] | None" = None) -> None:
        """`adjoint`: an operation that was made earlier. Each of the two is the adjoint of the other."""
        super().__init__(name)
        if adjoint is not None:
            self.adjoint, adjoint.adjoint = adjoint, self
        KNOWN.append(self)

    def __copy__(self) -> "Operation[P]":
        return self

    def __deepcopy__(self, memo: Any) -> "Operation[P]":
        return self  # of a request that has it

    adjoint: Any
    """The operation whose map is the transpose, if it is another one. The second of the two sets it."""

    def apply(self, params: P, *operands: Any) -> list[Any]:
        """Apply the operation, and return the results. Outside of any trace this calls the compiled program."""
        if internals.trace_state_clean():
            return _call(self, params.comm, params, operands)
        if params.derivative == TANGENT:  # a value that a JVP rule communicates, too
            roles = self.roles(len(operands), params)
            first = next((i for i, role in enumerate(roles) if role != "host"), None)
            operands = tuple(
                depends_on(x, [], always=True) if i == first or self.variadic else x for i, x in enumerate(operands)
            )
        return self.bind(*operands, call=params)

    def execute(self, *operands: Any, call: P) -> list[Any]:
        return _call(self, call.comm, call, operands)

    def apply_to_leaves(self, params: Sequence[P], operands: Sequence[Sequence[Any]]) -> list[Any]:
        """Apply the operation to each leaf of a pytree, with parameters for each leaf. Return the result of each; None
        if there is none.

        Outside of any trace the leaves are one program: an error of one leaf is an error of all results.
        """
        if keys.among(x for xs in operands for x in xs):
            types = [self.types(xs, call) for call, xs in zip(params, operands, strict=True)]
            self.compare_keys(params[0], [x for xs in operands for x in xs])
            words = self.apply_to_leaves(params, [list(map(keys.words, xs)) for xs in operands])
            return [
                keys.like(y, of_leaf[0].dtype) if of_leaf else None for y, of_leaf in zip(words, types, strict=True)
            ]
        if len(operands) < 2 or not internals.trace_state_clean():
            results_of_leaves = [self.apply(call, *xs) for call, xs in zip(params, operands, strict=True)]
            return [ys[0] if ys else None for ys in results_of_leaves]
        results = _call(self, params[0].comm, tuple(params), [x for xs in operands for x in xs])
        return results or [None] * len(operands)

    def compare_keys(self, params: P, arrays: Sequence[Any]) -> None:
        """Raise an error on all ranks, with JAXMPI_CHECK, if their keys are of different implementations. The numbers
        of words may agree all the same."""
        if not (communicators.CHECK and keys.among(arrays)):
            return
        own = keys.signature(arrays)
        least, most = ~own, own
        largest = Reducing(params.comm, arguments.reduction(MPI.MAX, self.core_name))
        (extremes,) = _agree_p.apply(largest, np.array([least, most], np.uint32))
        text = arguments.with_calling_line(
            f"the keys that {self.shown} is called with are not of the same implementations (jax.random.key_impl) "
            f"on all ranks; here they are {', '.join(str(x.dtype) for x in arrays if keys.is_key(x))}. The call is at"
        )
        check_p.apply(Comparing(params.comm, text), extremes[0] != ~extremes[1])


def is_ours(primitive: Any) -> bool:
    return isinstance(primitive, Operation)


def in_derivative(equation: Any) -> bool:
    """Return whether an equation is an operation that a derivative communicates."""
    return is_ours(equation.primitive) and equation.params["call"].derivative is not None


class Check(Operation[Comparing]):
    """An operation that raises an error if one of several truth values is true on this rank.

    Truth values have no cotangent. But the operation has an effect, so it is transposed with the computation around it.
    """

    def results(self, avals: Sequence[Any], params: Comparing) -> list[Any]:
        return []

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any], params: Comparing) -> list[Any]:
        return []


check_p = Check("check")
_agree_p: Operation[Reducing] = Operation("allreduce")
"""The reduction of numbers by which ranks see whether they agree. It has no derivative."""


# --- eager calls -----------------------------------------------------------------------------------------------------

_REPORTS_ALL_LINES = communicators.CHECK or timeline.ON
"""Whether the line of every eager call is reported to the core, which is slow. Otherwise only the lines of nonblocking
calls are reported, so that a request that nobody waits for can be named."""

_reported: set[Any] = set()
_MOST_REPORTED = 4096


def _report_line(primitive: Operation[Any], params: Any, operands: Sequence[Any], program: Any) -> None:
    """Report the line of an eager call, once for each program and shapes."""
    frame = call_sites.frame()
    code = frame.f_code
    call = (program, code.co_filename, code.co_firstlineno, frame.f_lasti, *((x.shape, x.dtype) for x in operands))
    if call in _reported:
        return
    if len(_reported) == _MOST_REPORTED:
        _reported.clear()
    _reported.add(call)
    if not primitive.identity:
        for call_params, xs in _each_of(params, tuple(map(jax.typeof, operands))):
            primitive.add_site(xs, call_params, call_sites.of_frame(frame))


def _each_of(params: Any, operands: Sequence[Any]) -> list[tuple[Any, Sequence[Any]]]:
    """Return the parameters and operands of each operation of an eager program."""
    if type(params) is not tuple:
        return [(params, operands)]
    width = len(operands) // len(params)
    return [(call, operands[i * width : (i + 1) * width]) for i, call in enumerate(params)]


def _call(primitive: Operation[Any], comm: Communicator, params: Any, operands: Sequence[Any]) -> list[Any]:
    """Call the compiled program of an operation, or of several operations with a tuple of parameters, also with
    `jax.disable_jit`."""
    find = comm.programs or _finds_programs_of(comm)
    program = find(primitive, params)
    if _REPORTS_ALL_LINES or primitive.starts:
        _report_line(primitive, params, operands, program)
    if not internals.jit_disabled.value:
        return program(*operands)
    with jax.disable_jit(False):
        return program(*operands)


call_sites.makes_eager_calls(_call)


def _finds_programs_of(comm: Communicator) -> Callable[..., Any]:
    """Return what finds the compiled programs of eager calls on a communicator: one for each set of parameters. JAX
    handles shapes and dtypes. At most 4096 programs are kept."""

    @functools.lru_cache(maxsize=4096)
    def find(primitive: Operation[Any], params: Common | tuple[Common, ...]) -> Callable[..., Any]:
        return eager(lambda *args: [y for call, xs in _each_of(params, args) for y in primitive.bind(*xs, call=call)])

    comm.programs = find
    return find


def eager_programs() -> int:
    """Return how many programs of eager calls are kept."""
    return sum(comm.programs.cache_info().currsize for comm in communicators.known() if comm.programs is not None)

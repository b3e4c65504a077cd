"""An operation as an object that communicates when it is applied, and its compiled programs for eager calls."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Generic

import jax

from jaxmpi._jax import internals, primitives
from jaxmpi._jax.dependence import depends_on
from jaxmpi._mpi import call_sites, communicators, timeline
from jaxmpi._mpi.communicators import Communicator
from jaxmpi._mpi.library import OPERATIONS
from jaxmpi._primitive import effect, keys, lowering, rules
from jaxmpi._primitive.effect import Unsupported
from jaxmpi._primitive.jit import eager
from jaxmpi._primitive.lowering import P
from jaxmpi._primitive.params import TANGENT, Common, Comparing

KNOWN: "list[Operation[Any]]" = []
"""All operations."""


class Operation(primitives.Primitive, Generic[P]):
    """A primitive that communicates, always with a list of results. The name is a name in csrc/core/ops.def.

    An operation is a class that declares below what differs from the defaults, and an object of this class.
    """

    multiple_results = True

    identity = False
    """Whether it is the identity; only the transpose communicates. The core has no operation for it."""
    works_in_place = False
    """Whether a result may alias the operand of the same number, where `params.in_place` is set."""
    variadic = False
    """Whether it takes any number of arrays."""
    starts = False
    """Whether it starts something that a wait completes: the result is a request, an array of two numbers for each
    array of a batch."""
    waits = False
    """Whether the operands are requests. Their tangents are requests, too: it is linear in them. They are not made to
    depend on the differentiated inputs."""

    # --- what an operation declares: types, buffers and attributes ---

    def results(self, avals: Sequence[Any], params: P) -> Sequence[Any]:
        """Return the types of the results from the types of the operands: by default the type of the last one."""
        return avals[-1:]

    def templates(self, params: P) -> int:
        """Return how many operands are templates, after the operands that the core has."""
        return 0

    root_sends = False
    """Whether only root passes operands that MPI reads to the core. On other ranks they are templates, too."""
    root_receives = False
    """Whether only root passes results to the core. On other ranks each of them is the operand of the same number."""

    def aliases(self, operands: int, params: P) -> bool:
        """Return whether results take the place of their operands."""
        return operands == 1 and self.works_in_place and params.in_place  # type: ignore[attr-defined]

    def static_attributes(self, avals: Sequence[Any], params: P) -> dict[str, Any]:
        """Return the attributes that follow from the types of the operands."""
        return {}

    def composed(self, avals: Sequence[Any], params: P) -> Any:
        """Return what XLA does before and after the call for arrays on a device: a `_operations.composed.Composed`.
        None: nothing."""
        return None

    def elements(self, arrays: Sequence[Any]) -> int:
        """Return how many elements of these arrays are communicated, for reports."""
        return sum(math.prod(x.shape) for x in arrays[:1])

    # --- what an operation declares: batches and derivatives ---

    def batch_at(self, params: P) -> tuple[int, int]:
        """Return the position of the batch axis in mapped operands, and then in the results."""
        return 0, 0

    def why_not_differentiable(self, params: P) -> str:
        """Return why no derivative can be taken; empty if one can be taken."""
        return ""

    nondifferentiable_on_all_ranks = False
    """Whether all ranks alike refuse a derivative, and none refuses where the operands have no tangents: then the
    results are constants, as results of integers are."""

    def tangent(self, primals: Sequence[Any], tangents: Sequence[Any], results: Sequence[Any], params: P) -> list[Any]:
        """Return the tangents of the results. Operands without tangent have None. By default the operation is linear in
        the operands that MPI reads."""
        operands = [x if t is None else t for x, t in zip(primals, tangents, strict=True)]
        return self.bind(*operands, call=params.linear())

    some_differentiable = False
    """Whether it has a `tangent_of_some`, for operands and templates of which only some have a differentiable dtype."""

    def tangent_of_some(self, primals: Sequence[Any], tangents: Sequence[Any], params: P) -> Any:
        """Return the tangent of the first result; None if it is zero."""
        raise NotImplementedError

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any], params: P) -> list[Any]:
        """Return the cotangents of the operands in which it is linear; `operands` has only their shape and dtype."""
        raise NotImplementedError

    def of_batch(self, axis: Any, params: P) -> P:
        return params

    batch, jvp, transpose_all = rules.batch, rules.jvp, rules.transpose_all

    # --- what follows ---

    def __init__(self, name: str, adjoint: "Operation[Any] | None" = None) -> None:
        """`adjoint`: an operation that was made earlier. Each of the two is the adjoint of the other."""
        super().__init__(f"jaxmpi.{name}")
        row = None if self.identity else OPERATIONS[name]
        self.core_name, self.shown, self.function = (
            (name, name, 0) if row is None else (row.row, row.shown, row.function)
        )
        """The name of the row in ops.def, the name that users know, and the number of the function there."""
        lowering.lower_to(self, "jaxmpi_{}")
        rules.define(self, type(self).transpose is not Operation.transpose)
        if adjoint is not None:
            self.adjoint, adjoint.adjoint = adjoint, self
        KNOWN.append(self)

    def __reduce__(self) -> str:
        return self.name  # a copy, of a request that has it, is the operation itself

    adjoint: Any
    """The operation whose map is the transpose, if it is another one. The second of the two sets it."""

    def bind_with_trace(self, trace: Any, args: Any, *more: Any) -> Any:
        if type(trace).__name__ == "JetTrace" and any(map(internals.inexact, args)):
            raise Unsupported(
                f"jaxmpi.{self.shown}: jax.experimental.jet has no rule for communication. Nested jax.jvp gives the "
                "same derivatives, on all ranks alike."
            )
        if effect.cannot_be_traced.get():
            raise effect.unsupported("a function with jax.custom_jvp or jax.custom_vjp that looks at values")
        if type(trace) is internals.DynamicJaxprTrace:
            communicators.refuse_in_child_of_fork()
            lowering.find_site(self, args, more[-1]["call"])
        return super().bind_with_trace(trace, args, *more)

    def apply(self, params: P, *operands: Any) -> list[Any]:
        """Apply the operation, and return the results. Outside of any trace this calls the compiled program."""
        if internals.trace_state_clean():
            return _call(self, params.comm, params, operands)
        if params.derivative == TANGENT:  # a value that a JVP rule communicates, too
            roles = lowering.roles_of(self, len(operands), params)
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
            types = [lowering.types(self, xs, call) for call, xs in zip(params, operands, strict=True)]
            words = self.apply_to_leaves(params, [list(map(keys.words, xs)) for xs in operands])
            return [
                keys.like(y, of_leaf[0].dtype) if of_leaf else None for y, of_leaf in zip(words, types, strict=True)
            ]
        if len(operands) < 2 or not internals.trace_state_clean():
            results_of_leaves = [self.apply(call, *xs) for call, xs in zip(params, operands, strict=True)]
            return [ys[0] if ys else None for ys in results_of_leaves]
        results = _call(self, params[0].comm, tuple(params), [x for xs in operands for x in xs])
        return results or [None] * len(operands)


def is_ours(primitive: Any) -> bool:
    return isinstance(primitive, Operation)


class OfValues(Operation[P]):
    """An operation without results. The operands get no cotangents. But the operation has an effect, so it is
    transposed with the computation around it."""

    def results(self, avals: Sequence[Any], params: P) -> list[Any]:
        return []

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any], params: P) -> list[Any]:
        return []


check_p: Operation[Comparing] = OfValues("check")
"""An operation that raises an error if one of several truth values is true on this rank."""


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
            lowering.add_site(primitive, xs, call_params, call_sites.of_frame(frame))


def _each_of(params: Any, operands: Sequence[Any]) -> list[tuple[Any, Sequence[Any]]]:
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
    return sum(comm.programs.cache_info().currsize for comm in communicators.known() if comm.programs is not None)

"""Assumptions about JAX on which derivatives rely, each with a computation that tests it.

Before the first derivative of something that communicates, these computations are traced on COMM_SELF and the
operations in them counted. Nothing is compiled or sent. If an operation is missing or in another place, derivatives are
refused. If JAX lacks a function, or the function has other parameters, the import already fails: see `hooks.HOOKS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from mpi4py import MPI

from jaxmpi._derivatives import hooks
from jaxmpi._jax import internals, jaxprs, primitives
from jaxmpi._operations import collectives, messages
from jaxmpi._primitive import effect
from jaxmpi._primitive.effect import EFFECT, Unsupported
from jaxmpi._primitive.operation import is_ours

Operations = list[tuple[str, str, str]]
"""The operations of a computation, in order. Each has the primitive around it (`scan`, `cond`, ... or empty), a name,
and the communicated quantity (`tangent`, `cotangent`; empty: a value)."""


@dataclass(frozen=True)
class Assumption:
    """A behaviour of JAX, a computation that needs it, and the operations that the computation has because of it."""

    what: str
    computation: Callable[[], Any]
    expected: Operations


def operations(jaxpr: Any, inside: str = "") -> Operations:
    """Return the operations of a jaxpr and of the jaxprs inside."""
    result: Operations = []
    for equation in jaxprs.open_jaxpr(jaxpr).eqns:
        if is_ours(equation.primitive):
            result.append((inside, equation.primitive.core_name, equation.params["call"].derivative or ""))
            continue
        within = inside if equation.primitive in effect.CALLS else equation.primitive.name
        for inner in jaxprs.inner_jaxprs(equation.params):
            result += operations(inner, within)
    return result


# --- the computations ------------------------------------------------------------------------------------------------


def _bcast(x: Any = 1.0) -> Any:
    return collectives.bcast(x, 0, comm=MPI.COMM_SELF)


def _send(x: Any) -> None:
    messages.send(x, 0, comm=MPI.COMM_SELF)


def _recv() -> Any:
    return messages.recv(0.0, 0, tag=0, comm=MPI.COMM_SELF)


def _received_in_steps(x: Any) -> Any:
    return _repeat(lambda c: c + _recv(), x)


def _forward(f: Callable[[Any], Any]) -> Any:
    return jax.make_jaxpr(lambda x: jax.jvp(f, (x,), (x,))[1])(1.0)


def _reverse(f: Callable[[Any], Any]) -> Any:
    return jax.make_jaxpr(lambda x: jax.vjp(f, x)[1](x))(1.0)


def _repeat(step: Callable[[Any], Any], x: Any) -> Any:
    return lax.scan(lambda c, _: (step(c), None), x, None, length=2)[0]


def _value_ignored(x: Any) -> Any:
    _send(x)
    return 0


def _unused(f: Callable[[], Any]) -> Any:
    from jax._src.interpreters import partial_eval

    closed: Any = jax.make_jaxpr(lambda x: (f(), x)[1])(1.0)
    return partial_eval.dce_jaxpr(jaxprs.open_jaxpr(closed), [True])[0]


def _custom_jvp(x: Any) -> Any:
    function = jax.custom_jvp(_bcast)
    function.defjvp(lambda primals, tangents: (function(*primals), _bcast(tangents[0])))
    return function(1.0) * x


def _custom_vjp(x: Any) -> Any:
    function = jax.custom_vjp(_bcast)
    function.defvjp(lambda x: (function(x), None), lambda _, ct: (_bcast(ct),))
    return function(1.0) * x


def _custom_vjp_ignored(x: Any) -> Any:
    function = jax.custom_vjp(lambda x: x)
    function.defvjp(lambda x: (x, None), lambda _, ct: (_bcast(ct),))
    return (function(x), x)[1]


def _solve(b: Any) -> Any:
    return lax.custom_linear_solve(lambda u: 2 * _bcast(u), b, lambda f, b: f(b), lambda f, b: f(b))


def _transposed(receive: Callable[[], Any]) -> Any:
    return jax.make_jaxpr(lambda ct: jax.linear_transpose(lambda x: x + receive(), 1.0)(ct))(1.0)


def _called(f: Callable[[], Any]) -> Any:
    """Make a nested call like the calls into which JAX divides a checkpoint."""
    closed: Any = jax.make_jaxpr(lambda: jax.jit(f)())()
    (equation,) = closed.eqns
    call = equation.replace(primitive=primitives.closed_call_p, params={"call_jaxpr": equation.params["jaxpr"]})
    return jaxprs.evaluate(closed.replace(jaxpr=closed.jaxpr.replace(eqns=[call])))[0]


def _received_by_custom_jvp() -> Any:
    function = jax.custom_jvp(lambda _: _recv())
    function.defjvp(lambda primals, tangents: (function(*primals), tangents[0]))
    return function(1.0)


def _received_by_custom_vjp() -> Any:
    function = jax.custom_vjp(lambda _: _recv())
    function.defvjp(lambda x: (function(x), None), lambda _, ct: (ct,))
    return function(1.0)


def _mapped() -> Any:
    """Transpose an unused linear solve under a `vmap` over the cotangents."""
    gradient = lambda ct: jax.vjp(lambda x: (_solve(x), x)[1], 1.0)[1](ct)[0]  # noqa: E731
    return _one_operation_if(_shapes_of_solves(jax.vmap(gradient)) == [(), (2,)])


def _solved_once() -> Any:
    """Solve a linear system of constants in a function under a `vmap`."""
    return _one_operation_if(_shapes_of_solves(jax.vmap(lambda x: x * _solve(1.0))) == [()])


def _root_ignored(x: Any) -> Any:
    one = jnp.ones(())
    return (lax.custom_root(lambda u: u - _bcast(one), 1.0, lambda f, u: u - f(u), lambda _, y: y), x)[1]


def _shapes_of_solves(f: Callable[[Any], Any]) -> list[tuple[int, ...]]:
    equations = jax.make_jaxpr(f)(jnp.ones(2)).jaxpr.eqns
    return [e.outvars[0].aval.shape for e in equations if e.primitive.name == "custom_linear_solve"]


def _one_operation_if(right: bool) -> Any:
    return jax.make_jaxpr(lambda x: _bcast(x) if right else x)(1.0)


def _dropped() -> Any:
    """Test a primitive that communicates and whose own rule drops it. jaxmpi must refuse it."""
    from jax._src.interpreters import partial_eval

    primitive = primitives.Primitive("jaxmpi.dropped")
    primitive.def_effectful_abstract_eval(lambda x: (x, {EFFECT}))
    partial_eval.dce_rules[primitive] = lambda *_: ([False], None)
    try:
        _unused(lambda: primitive.bind(1.0))
    except NotImplementedError:
        return _one_operation_if(True)
    finally:
        del partial_eval.dce_rules[primitive]
    return _one_operation_if(False)


def _newer_checkpoint() -> Any:
    from jax._src import ad_checkpoint

    return _reverse(lambda x: x + ad_checkpoint.remat3(_value_ignored)(x))


def _hidden() -> Any:
    """Test a primitive, like in other libraries, whose abstract evaluation does not report the effect inside."""
    primitive = primitives.Primitive("jaxmpi.forgetful")

    def evaluate(x: Any) -> Any:
        result = jax.eval_shape(lambda x: _bcast(x), x)
        return internals.ShapedArray(result.shape, result.dtype)

    primitive.def_abstract_eval(evaluate)
    (equation,) = jax.make_jaxpr(primitive.bind)(1.0).eqns
    return _one_operation_if(bool(equation.effects))


def _expecting(expected: Operations, computations: dict[str, Callable[[], Any]]) -> list[Assumption]:
    return [Assumption(what, computation, expected) for what, computation in computations.items()]


_VALUE_THEN_TANGENT = [("", "bcast", ""), ("", "bcast", "tangent")]
_SOLVE = 2 * [("custom_linear_solve", "bcast", ""), ("custom_linear_solve", "reduce", "cotangent")]
ASSUMPTIONS = (
    *_expecting(
        [("", "bcast", ""), ("", "reduce", "cotangent")],
        {
            "a trace that differentiates receives each primitive, also where no operand has a tangent": lambda: (
                _reverse(lambda x: x * _bcast())
            ),
            "traced nested calls of constants are differentiated in reverse mode": lambda: _reverse(
                lambda x: x * _called(_bcast)
            ),
        },
    ),
    *_expecting(
        _VALUE_THEN_TANGENT,
        {
            "a trace in forward mode receives each primitive, too": lambda: _forward(lambda x: x * _bcast()),
            "nested calls of constants are differentiated": lambda: _forward(lambda x: x * jax.jit(lambda: _bcast())()),
            "traced nested calls of constants are differentiated": lambda: _forward(lambda x: x * _called(_bcast)),
        },
    ),
    Assumption(
        "branches of constants are differentiated",
        lambda: _forward(lambda x: x * lax.cond(x > 0, lambda: _bcast(), lambda: 1.0)),
        [("cond", "bcast", ""), ("cond", "bcast", "tangent")],
    ),
    Assumption(
        "loops of constants are differentiated",
        lambda: _forward(lambda x: x * lax.while_loop(lambda c: c < 9, lambda c: _bcast(c) + 1, 1.0)),
        [("while", "bcast", ""), ("while", "bcast", "tangent")],
    ),
    Assumption(
        "scans of constants are differentiated",
        lambda: _forward(lambda x: x * _repeat(_bcast, 1.0)),
        [("scan", "bcast", ""), ("scan", "bcast", "tangent")],
    ),
    *_expecting(
        [("scan", "recv", ""), ("scan", "send", "cotangent")],
        {
            "a receive in a scan is executed in each step, in the derivative too": lambda: _reverse(_received_in_steps),
            "a receive in a scan in a checkpoint is executed in each step, in the derivative too": lambda: _reverse(
                jax.checkpoint(_received_in_steps)
            ),
        },
    ),
    *_expecting(
        [("", "send", ""), ("", "recv", "cotangent")],
        {
            "a checkpoint without a differentiable result stays in a derivative": lambda: _reverse(
                lambda x: x + jax.checkpoint(_value_ignored)(x)
            ),
            **({"one method calls the newer checkpoint": _newer_checkpoint} if hooks.HAS_NEWER_CHECKPOINT else {}),
        },
    ),
    Assumption(
        "a checkpoint without operands and results stays where JAX leaves out unused equations",
        lambda: _unused(lambda: jax.checkpoint(lambda: _value_ignored(1.0))()),
        [("", "send", "")],
    ),
    Assumption(
        "branches without a differentiable result in a checkpoint stay in a derivative",
        lambda: _reverse(lambda x: x + jax.checkpoint(lambda x: lax.cond(x > 0, _value_ignored, lambda x: 0, x))(x)),
        [("cond", "send", ""), ("cond", "recv", "cotangent")],
    ),
    Assumption(
        "the rule of a custom_jvp function is called for constants",
        lambda: _forward(_custom_jvp),
        [("custom_jvp_call", "bcast", ""), ("", "bcast", "")],
    ),
    Assumption(
        "the rule of a custom_jvp function is called for constants in reverse mode",
        lambda: _reverse(_custom_jvp),
        [("custom_jvp_call", "bcast", ""), ("", "reduce", "cotangent")],
    ),
    Assumption(
        "the rules of a custom_vjp function are called for constants",
        lambda: _reverse(_custom_vjp),
        [("custom_vjp_call", "bcast", ""), ("", "bcast", "")],
    ),
    Assumption(
        "the rules of a custom_vjp function in a scan in a checkpoint are called for constants",
        lambda: _reverse(jax.checkpoint(lambda x: _repeat(_custom_vjp, x))),
        [("scan", "bcast", ""), ("scan", "bcast", "")],
    ),
    Assumption(
        "a linear solve of constants is differentiated, and so is the matrix in it",
        lambda: _forward(lambda x: x * _solve(1.0)),
        [*_SOLVE, *_VALUE_THEN_TANGENT, *_SOLVE],
    ),
    *_expecting(
        [("", "send", "cotangent")],
        {
            "a transpose of a function transposes the communication in it": lambda: _transposed(jax.jit(_recv)),
            "a transpose of a function transposes the communication in a custom_jvp function of constants": lambda: (
                _transposed(_received_by_custom_jvp)
            ),
            "a transpose of a function transposes the communication in a custom_vjp function of constants": lambda: (
                _transposed(_received_by_custom_vjp)
            ),
        },
    ),
    *_expecting(
        [("", "bcast", "")],
        {
            "the backward rule of a custom_vjp function stays where nothing uses the function": lambda: _reverse(
                _custom_vjp_ignored
            ),
            "one function starts a transposition, and what no cotangent reaches depends on all cotangents": _mapped,
            "one function transposes the matrix of a linear solve, and this is no derivative": _solved_once,
            "jaxmpi notices if a primitive drops communication that nothing uses": _dropped,
            "jaxmpi sees the communication in a primitive of another library": _hidden,
            "the derivative of a root of constants is taken, and stays where nothing uses it": lambda: (
                _one_operation_if(operations(_reverse(_root_ignored))[-1:] == [("", "reduce", "cotangent")])
            ),
        },
    ),
)


# --- before the first derivative -------------------------------------------------------------------------------------


@dataclass
class State:
    """The result of the test of the assumptions."""

    tested: bool = False
    """Whether the test has begun. The test itself takes derivatives, and these are allowed."""
    broken: str | None = None
    """The first assumption that does not hold."""


_state = State()


def broken() -> str | None:
    """Return the first assumption that does not hold, or None if all hold. This traces, and sends nothing."""
    for assumption in ASSUMPTIONS:
        try:
            counted: Any = operations(assumption.computation())
        except Exception as error:
            counted = f"{type(error).__name__}: {error}"
        if counted != assumption.expected:
            return f"{assumption.what} (expected {assumption.expected}, found {counted})"
    return None


def check() -> None:
    """Raise NotImplementedError if this JAX breaks an assumption. The first call tests them all."""
    if not _state.tested:
        _state.tested = True
        with (  # tracing does not depend on the place of the first derivative
            internals.no_trace(),
            internals.without_constant_folding(),
            jax.disable_jit(False),
            internals.without_leak_checks(),
            jax.transfer_guard("allow"),
        ):
            _state.broken = broken()
    if _state.broken is not None:
        raise Unsupported(
            f"jaxmpi: derivatives of communication are refused. JAX {jax.__version__} breaks an assumption on which "
            f"they rely: {_state.broken}. {internals.ADVICE}"
        )


def install() -> None:
    """Install the hooks into JAX's differentiation, which call `check` before the first derivative."""
    hooks.install(check)

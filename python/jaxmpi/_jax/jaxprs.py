"""Jaxprs: what is inside them, and how they are evaluated."""

import functools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax._src import core
from jax._src.interpreters import mlir as private_mlir
from jax._src.interpreters import partial_eval
from jax._src.sharding_impls import UnspecifiedValue

from jaxmpi._jax import internals, primitives
from jaxmpi._jax.primitives import Literal


def open_jaxpr(jaxpr: Any) -> Any:
    """Return the open jaxpr in a closed one; an open one itself."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def constants(jaxpr: Any) -> Sequence[Any]:
    """Return the values of the constants of a closed jaxpr; an empty sequence for an open one."""
    return getattr(jaxpr, "consts", ())


def change_open(jaxpr: Any, change: Callable[[Any], Any]) -> Any:
    """Return a jaxpr, closed or not, with `change` applied to the open jaxpr."""
    inner = open_jaxpr(jaxpr)
    return change(inner) if inner is jaxpr else jaxpr.replace(jaxpr=change(inner))


def called_name(params: dict[str, Any]) -> str:
    """Return the name of the parameter that is the jaxpr of a nested call."""
    return "jaxpr" if "jaxpr" in params else "call_jaxpr"


def called(params: dict[str, Any]) -> Any:
    return params[called_name(params)]


def inner_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    """The jaxprs inside an equation with these parameters, without their constants."""
    for value in params.values():
        for inner in value if isinstance(value, tuple) else (value,):
            jaxpr = open_jaxpr(inner)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def of_equation(jaxpr: Any, equation: Any) -> Any:
    """Return a jaxpr of one equation of `jaxpr` alone, with all operands as arguments."""
    operands = [core.Var(jax.typeof(x.val)) if isinstance(x, Literal) else core.Var(x.aval) for x in equation.invars]
    results = [core.Var(x.aval) for x in equation.outvars]
    equation = equation.replace(invars=operands, outvars=results)
    names = jaxpr.debug_info._replace(arg_names=("",) * len(operands), result_paths=("",) * len(results))
    return jaxpr.replace(
        constvars=[], invars=operands, outvars=results, eqns=[equation], debug_info=names, effects=equation.effects
    )


def evaluate(jaxpr: Any, *args: Any) -> list[Any]:
    """Return the results of a jaxpr, closed or not, in the current trace."""
    return core.eval_jaxpr(open_jaxpr(jaxpr), constants(jaxpr), *args)


def without_objects(closed: Any) -> Any:
    """Return a closed jaxpr whose primitives that newer versions of JAX represent by objects have been lowered."""
    high = getattr(closed, "is_high", False) or getattr(open_jaxpr(closed), "is_high", False)
    if not high:
        return closed
    lower: Any = getattr(partial_eval, "lower_jaxpr2", partial_eval.lower_jaxpr)
    return lower(closed)


def variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def body(equation: Any, needed: Container[Any]) -> tuple[str, Any, list[bool]] | None:
    """Return the computation inside a loop or a nested call: the parameter's name, itself, and which arguments
    are kept. Return None for any other equation.

    Kept are the operands that every step of a loop uses, and the operands of a call that are `needed` after it, or
    literals. The carried values and rows of a loop are not kept.
    """
    params = equation.params
    match equation.primitive.name:
        case "scan":
            name, keep = "jaxpr", [True] * parts_of_scan(params)[0]
        case "while":
            name, keep = "body_jaxpr", [True] * params["body_nconsts"]
        case "pjit" | "jit":  # the older name, the newer one
            name, keep = "jaxpr", [isinstance(x, Literal) or x in needed for x in equation.invars]
        case _:
            return None
    inner = params[name]
    return name, inner, keep + [False] * (len(inner.jaxpr.invars) - len(keep))


def elements(jaxpr: Any, effect: internals.Effect) -> float:
    """Return about how many elements a jaxpr computes, except by equations with the effect; infinity if unknown."""
    total = 0.0
    for equation in open_jaxpr(jaxpr).eqns:
        inner = list(inner_jaxprs(equation.params))
        if equation.primitive.name == "while":
            return math.inf
        if inner:
            total += equation.params.get("length", 1) * sum(elements(one, effect) for one in inner)
        elif equation.primitive.name == "dot_general":  # at most
            total += math.prod(x.aval.size for x in equation.invars)
        elif effect not in equation.effects:
            total += sum(getattr(x.aval, "size", 1) for x in equation.outvars)
    return total


def parts_of_scan(params: dict[str, Any]) -> tuple[int, int]:
    """Return how many of a scan's first operands are constants, and how many after them are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    first, carried, _ = params["ft_in"].unpack()  # from 0.12 on: a tree of constants, carried values and rows
    return len(list(first)), len(list(carried))


def divide_as_scan(
    params: dict[str, Any], operands: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Return a scan's constants, carried values and rows among the operands."""
    constants, carried = parts_of_scan(params)
    return operands[:constants], operands[constants : constants + carried], operands[constants + carried :]


def lower_calls_inline(effect: internals.Effect) -> None:
    """Make nested calls with the effect be lowered inline.

    In jaxlib 0.12, XLA may execute a loop twice, or crash, if a function with an ordered effect and without array
    operands is called inside another (`tests/primitive/test_order.py`). XLA would inline the calls anyway.
    """
    for primitive in (
        primitives.jit_p,
        primitives.call_p,
        primitives.closed_call_p,
        getattr(core, "eval_jaxpr_p", None),
    ):
        if primitive is not None:
            entry = private_mlir._lowerings[primitive]
            own: Any = getattr(entry, "rule", entry)  # the rule itself in JAX 0.6
            internals.mlir.register_lowering(primitive, functools.partial(_lower_call, own, effect))


def _lower_call(own: Any, effect: internals.Effect, ctx: Any, *args: Any, **params: Any) -> Any:
    inner = called(params)
    placed = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    if effect not in inner.effects or not all(isinstance(x, UnspecifiedValue) for x in placed):
        return own(ctx, *args, **params)
    return internals.mlir.lower_fun(functools.partial(evaluate, inner), multiple_results=True)(ctx, *args)

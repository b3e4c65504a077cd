"""Transposition: every cotangent depends on all cotangents with which a transposition started."""

from collections.abc import Callable
from typing import Any

import jax
from jax._src import core
from jax._src.interpreters import ad as private_ad

from jaxmpi._derivatives.rewrites import returning, with_carry, with_output
from jaxmpi._jax import internals, jaxprs, primitives, runtime_token
from jaxmpi._jax.dependence import cotangents, depends_on, depends_on_p, solving
from jaxmpi._jax.primitives import Literal
from jaxmpi._primitive.effect import CALLS, EFFECT, ZERO, Unsupported, during


def transpose_matrix(own: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    transposed = own(*args)

    def call(x: Any) -> Any:
        with during(solving, True):
            return transposed(x)

    return call


def transpose(own: Callable[..., Any], jaxpr: Any, stack: Any, consts: Any, primals: Any, cts: Any, **more: Any) -> Any:
    """Transpose a computation with one more result, the dual of a trace that differentiates.

    There each operand depends on all inputs. Here the additional result depends on all results of operations, so that
    all their cotangents depend on the cotangent of that result. So a map of a cotangent on one rank is a map on all.
    """
    if EFFECT not in jaxpr.effects:
        return own(jaxpr, stack, consts, primals, cts, **more)
    if runtime_token.repeats_backward_pass():
        raise FloatingPointError(runtime_token.REPEATED)
    known = [x for x in cts if type(x) is not internals.ad.Zero and internals.inexact(x)]
    zero = depends_on(None, known, like=ZERO, always=not solving.get())
    arguments = zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *primals), strict=False)
    linear = {x for x, value in arguments if isinstance(value, _LINEAR)}
    jaxpr = _with_result_of_all(jaxpr, linear)
    try:
        with during(cotangents, (zero,)):
            return own(jaxpr, stack, consts, primals, [*cts, zero], **more)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        of_execution = isinstance(error, jax.errors.JaxRuntimeError)
        if of_execution or isinstance(error, Unsupported) or not any(map(_makes_constant_depend, jaxpr.eqns)):
            raise
        raise Unsupported(
            "jaxmpi: a function that communicates cannot be transposed (by jax.linear_transpose, custom_linear_solve, "
            "custom_root). If it multiplies or divides by the result of an operation on constants, compute that "
            "outside of it: operands of operations count as depending on the argument, as on other ranks they may."
        ) from error


def _makes_constant_depend(equation: Any) -> bool:
    """Return whether an equation makes a constant depend on the argument of a function that is transposed, as
    `partially_evaluate` does."""
    params = equation.params
    return equation.primitive is depends_on_p and params["has_value"] and not params["always"] and not params["unless"]


_LINEAR = tuple(getattr(private_ad, name) for name in ("UndefinedPrimal", "GradAccum") if hasattr(private_ad, name))
"""The types that stand for the linear arguments of a function while it is transposed."""


def _with_result_of_all(jaxpr: Any, linear: set[Any]) -> Any:
    """Return a jaxpr with one more result, which is linear in the results of all equations that communicate. `linear`:
    the arguments in which the computation is linear."""
    linear = set(linear)
    equations, communicated = [], []
    for equation in jaxpr.eqns:
        if linear.isdisjoint(jaxprs.variables(equation.invars)):
            equations.append(equation)
            continue
        replacements = [equation]
        if EFFECT in equation.effects:
            outvars = [core.Var(x.aval) if isinstance(x, core.DropVar) else x for x in equation.outvars]
            replacements = _with_result(equation.replace(outvars=outvars), linear)
            if not getattr(equation.primitive, "starts", False):  # the cotangent of a request depends on it in the wait
                communicated += [x for e in replacements for x in e.outvars if internals.inexact(x.aval)]
        linear.update(x for e in replacements for x in e.outvars)
        equations += replacements
    result = core.Var(jax.typeof(ZERO))
    params = {"has_value": False, "always": False, "unless": 0, "shape": ZERO.shape, "dtype": jax.typeof(ZERO).dtype}
    depends = core.new_jaxpr_eqn(communicated, [result], depends_on_p, params, set())
    return returning(jaxpr.replace(eqns=[*equations, depends]), [*jaxpr.outvars, result])


def _with_result(equation: Any, linear: set[Any]) -> list[Any]:
    """Return the equations for a nested call, branch or loop. If it has no differentiable result, it also returns one
    of the values in which it is linear."""
    possible = [
        i
        for i, x in enumerate(equation.invars)
        if not isinstance(x, Literal) and x in linear and internals.inexact(x.aval)
    ]
    params = equation.params
    if any(internals.inexact(x.aval) for x in equation.outvars) or not possible:
        return [equation]
    which = possible[0]
    if equation.primitive is primitives.scan_p:
        return with_carry(equation, which)
    if equation.primitive in CALLS:
        name = jaxprs.called_name(params)
        changed = {name: with_output(params[name], which)}
        if "out_shardings" in params:
            changed["out_shardings"] = (*params["out_shardings"], internals.UNSPECIFIED)
            changed["out_layouts"] = (*params["out_layouts"], None)
    elif equation.primitive is primitives.cond_p:
        changed = {"branches": tuple(with_output(branch, which - 1) for branch in params["branches"])}
    else:
        return [equation]
    outvars = [*equation.outvars, core.Var(equation.invars[which].aval)]
    return [equation.replace(params={**params, **changed}, outvars=outvars)]

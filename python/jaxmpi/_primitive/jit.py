"""Tokens, which are not needed, and `jit`, which avoids the cost of the effect.

The token that the public functions take and return is only for programs that thread one through: a pytree without
leaves, so that it costs nothing and may still cross `jit`, `scan` and `cond`.

A computation with an ordered effect does not use JAX's fast path for calling compiled code; a call costs twenty times
as much. `jit` here discharges the effect: the function becomes one primitive without effect, the region, whose lowering
creates a token of its own. The link to earlier and later calls is the array that JAX itself would pass on.
"""

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import jax
import numpy as np

from jaxmpi._jax import internals, jaxprs, primitives, runtime_token
from jaxmpi._primitive.effect import EFFECT

F = TypeVar("F", bound=Callable[..., Any])


class Token:
    """Stands for "after everything before". Has no leaves; all tokens are equal.

    Any token is accepted as input: this one, None, a JAX token, an array. It is returned as it is, and None as a
    `Token`. Order does not depend on it.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "Token()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Token)

    def __hash__(self) -> int:
        return hash(Token)


jax.tree_util.register_pytree_node(Token, lambda token: ((), None), lambda _, leaves: Token())


# --- the region --------------------------------------------------------------------------------------------------

_region = primitives.Primitive("jaxmpi.region")
_region.multiple_results = True


def _region_abstract_eval(link: Any, *args: Any, jaxpr: Any, returns_link: bool) -> list[Any]:
    return [internals.ShapedArray(link.shape, link.dtype)] * returns_link + jaxpr.out_avals


def _region_lowering(ctx: Any, link: Any, *args: Any, jaxpr: Any, returns_link: bool) -> list[Any]:
    inner = ctx.replace(
        avals_in=list(ctx.avals_in[1:]),
        avals_out=list(ctx.avals_out[returns_link:]),
        tokens_in=internals.mlir.TokenSet({EFFECT: internals.create_token()}),
    )
    with internals.without_constant_folding():
        results = internals.mlir.lower_fun(internals.jaxpr_as_fun(jaxpr), multiple_results=True)(inner, *args)
    if ctx.module_context.platforms == ("cpu",):
        done = ctx.replace(avals_in=[internals.abstract_token], avals_out=[internals.abstract_token])
        _lower_done(done, inner.tokens_out.get(EFFECT), comm=np.int64(0))
    # The link need not depend on the operations: results of an execution are ready only when all of it is done.
    return [link] * returns_link + list(results)


_lower_done = internals.ffi_lowering("jaxmpi_done", has_side_effect=True)


def _region_implementation(*args: Any, **params: Any) -> Any:
    """Raise an error: JAX repeats a compiled function operation by operation, to find the operation that made a NaN."""
    raise FloatingPointError(runtime_token.REPEATED)


_region.def_abstract_eval(_region_abstract_eval)
_region.def_impl(_region_implementation)
internals.mlir.register_lowering(_region, _region_lowering)
internals.keep(_region)


# If a result aliases an operand that is needed afterwards, XLA copies the operand first. From about this size on (when
# the copy no longer fits in a cache) the copy is slower than a result in new memory.
_COPY_BYTES = 8 << 20


def _in_place(closed: Any, kept: Iterable[bool]) -> Any:
    """Return the computation with `in_place` of each operation set by what is needed after it (`_primitive.params`).

    An operation works in place if nothing needs the operand afterwards; otherwise only if it is small and `in_place`
    was set. Operands of later equations, results of the jaxpr, constants, and the arguments that are `kept` are needed.
    The bodies of loops and nested calls are treated in the same way.
    """
    jaxpr = closed.jaxpr
    needed = {*jaxpr.constvars, *jaxprs.variables(jaxpr.outvars)}
    needed.update(variable for variable, keep in zip(jaxpr.invars, kept, strict=True) if keep)
    equations = []
    for equation in reversed(jaxpr.eqns):
        operands = jaxprs.variables(equation.invars)
        params: dict[str, Any] = {}
        if getattr(equation.primitive, "works_in_place", False) and operands:
            replaced = operands[: len(equation.outvars)]
            small = sum(x.aval.size * x.aval.dtype.itemsize for x in replaced) < _COPY_BYTES
            free = not any(x in needed for x in replaced)
            alone = len(equation.outvars) <= 1  # arrays that are communicated together are copied anyway
            call = equation.params["call"]
            in_place = alone and (free or (small and call.in_place))
            params = {"call": dataclasses.replace(call, in_place=in_place)}
        elif EFFECT in equation.effects and (body := jaxprs.body(equation, needed)) is not None:
            name, inner, inner_kept = body
            params = {name: _in_place(inner, inner_kept)}
        equations.append(equation.replace(params={**equation.params, **params}) if params else equation)
        needed.update(operands)
    return closed.replace(jaxpr=jaxpr.replace(eqns=equations[::-1]))


_SHORT = 1000
"""The most elements of a computation for a CPU that XLA executes in the calling thread. XLA's own limit counts
floating-point operations. A wrong guess costs time (csrc/python/runtime_token.c)."""


def _is_short(jaxpr: Any) -> bool:
    return jax.default_backend() == "cpu" and len(jaxpr.out_avals) > 0 and jaxprs.elements(jaxpr, EFFECT) < _SHORT


def _discharge(function: Callable[..., Any], donated: bool) -> Callable[..., Any]:
    """Return `function` with the link as an additional first argument and first result, and without the effect.

    The first result is None if the computation is so short that XLA executes it in the calling thread, unless the link
    comes in a tuple. It is an empty tuple if there is no effect to discharge.
    """

    def discharged(link: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=lambda x: x is None)
        traced = [i for i, leaf in enumerate(leaves) if internals.is_tracer(leaf)]

        def of_traced(*values: Any) -> Any:
            filled = list(leaves)
            for i, value in zip(traced, values, strict=True):
                filled[i] = value
            args, kwargs = jax.tree.unflatten(structure, filled)
            return function(*args, **kwargs)

        operands = [leaves[i] for i in traced]
        jaxpr, shape = jax.make_jaxpr(of_traced, return_shape=True)(*operands)
        jaxpr = jaxprs.without_objects(jaxpr)
        always = isinstance(link, tuple)
        (link,) = link if always else (link,)
        if jaxpr.effects == {EFFECT}:
            returns_link = always or not _is_short(jaxpr)
            jaxpr = _in_place(jaxpr, [not donated] * len(operands))
            results = _region.bind(link, *operands, jaxpr=jaxpr, returns_link=returns_link)
            link = results.pop(0) if returns_link else None
        else:  # nothing to discharge, or other effects, which JAX must see
            link = ()
            results = internals.jaxpr_as_fun(jaxpr)(*operands)
        return link, jax.tree.unflatten(jax.tree.structure(shape), results)

    try:
        signature = inspect.signature(function)
        first = inspect.Parameter("_link", inspect.Parameter.POSITIONAL_ONLY)
        discharged.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[first, *signature.parameters.values()]
        )
    except (TypeError, ValueError):  # some builtins have no signature
        pass
    discharged.__name__ = discharged.__qualname__ = getattr(function, "__name__", "function")
    return discharged


def _behind_link(argnums: Any) -> Any:
    """Return argument numbers, shifted by the link, which comes first."""
    if argnums is None:
        return None
    if not hasattr(argnums, "__index__"):
        return tuple(_behind_link(i) for i in argnums)
    return operator.index(argnums) + (argnums >= 0)


def _discharged_jit(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    shifted = {name: _behind_link(value) if name.endswith("_argnums") else value for name, value in options.items()}
    donated = any(options.get(name) not in (None, ()) for name in ("donate_argnums", "donate_argnames"))
    return jax.jit(_discharge(function, donated), **shifted)


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` of arrays, compiled, for calls outside of any trace and of `jax.disable_jit`."""

    def staged(*args: Any) -> Any:
        with internals.without_constant_folding():
            return function(*args)

    return runtime_token.with_runtime_token(EFFECT, _discharged_jit(staged, {}))


# Options about the placement of operands or results: a tree of placements would need an entry for the link.
_PLAIN = ("in_shardings", "out_shardings", "device", "backend", "abstracted_axes")


@overload
def jit(function: F, /, **options: Any) -> F: ...
@overload
def jit(**options: Any) -> Callable[[F], F]: ...
def jit(function: Any = None, /, **options: Any) -> Any:
    """Compile a function that communicates as `jax.jit` does, at the cost of a call without communication.

    Order relative to calls of `jax.jit` and eager operations is kept, in both directions. Under another transformation,
    with `jax.disable_jit`, and with options that place operands or results (`in_shardings` and the like) it is
    `jax.jit`.

    Args:
      function: the function to compile; left out in a decorator with options.
      **options: options of `jax.jit`.

    Returns:
      The compiled function, with the methods `lower`, `trace`, `eval_shape` and `clear_cache` of `jax.jit`. Type
      checkers see `function` itself, without these methods.

    Raises:
      Exception: what `jax.jit` and the function raise; an error at run time when the program waits for the result.
    """
    if function is None:
        return functools.partial(jit, **options)
    plain = jax.jit(function, **options)
    if any(options.get(name) is not None for name in _PLAIN):
        return plain
    compiled = _discharged_jit(function, options)
    call = functools.wraps(function)(runtime_token.with_runtime_token(EFFECT, compiled, plain))

    def clear_cache() -> None:
        for cached in (plain, compiled):
            getattr(cached, "clear_cache")()  # noqa: B009 (JAX does not declare it)

    for name in ("lower", "trace", "eval_shape"):
        setattr(call, name, getattr(plain, name))
    call.clear_cache = clear_cache  # type: ignore[attr-defined]
    return call

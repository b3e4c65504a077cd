"""Jaxpr rewrites: jaxprs with an additional parameter, result or dependence."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import ad_checkpoint, core

from jaxmpi._jax import internals, jaxprs, primitives
from jaxmpi._jax.dependence import depends_on
from jaxmpi._jax.primitives import Literal
from jaxmpi._primitive import rules
from jaxmpi._primitive.effect import EFFECT, ZERO, JaxParams
from jaxmpi._primitive.operation import is_ours


def with_parameter_of_call(params: JaxParams) -> JaxParams:
    name = jaxprs.called_name(params)
    more = {"donated_invars": False, "in_shardings": internals.UNSPECIFIED, "in_layouts": None}
    more["prevent_cse"] = False  # of a checkpoint, which may have one per operand
    more = {key: (value, *params[key]) for key, value in more.items() if isinstance(params.get(key), tuple)}
    return {**params, name: with_parameter(params[name]), **more}


def with_parameter(jaxpr: Any) -> Any:
    """Return a jaxpr with one more parameter, the first, which is not used. It is cached by the original jaxpr, because
    JAX caches compiled code by the identity of jaxprs."""
    if (known := _jaxprs_with_parameter.get(jaxpr)) is not None:
        return known
    if jaxprs.open_jaxpr(jaxpr) is not jaxpr:
        wider = jaxprs.change_open(jaxpr, with_parameter)
    else:
        names = jaxpr.debug_info.arg_names
        names = jaxpr.debug_info._replace(arg_names=None if names is None else ("", *names))
        wider = jaxpr.replace(invars=[core.Var(jax.typeof(ZERO)), *jaxpr.invars], debug_info=names)
    _jaxprs_with_parameter[jaxpr] = wider
    return wider


_jaxprs_with_parameter: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


def scan_with_carry(params: JaxParams, more: Any, operands: Sequence[Any]) -> list[Any]:
    """Bind a scan with these parameters that carries one more number. Return that number and the scan's results."""
    consts, init, xs = jaxprs.divide_as_scan(params, operands)

    def step(carry: Any, x: Any) -> Any:
        # JAX orders constants by first use and turns a carried value that no step changes into a constant. `depends_on`
        # without inputs, applied to each of them, keeps order and number.
        changed, *constant = [depends_on(value, []) for value in (carry[0], *consts)]
        result = jaxprs.evaluate(params["jaxpr"], *constant, *carry[1:], *x)
        return [changed, *result[: len(init)]], result[len(init) :]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(step, [more, *init], list(xs), **options)
    return [*carry, *ys]


def with_carry(equation: Any, which: int) -> list[Any]:
    """Return the equations of a scan that carries one more number, which is linear in the operand `which`."""

    def scan(*operands: Any) -> Any:
        more = depends_on(None, [operands[which]], like=ZERO)
        return scan_with_carry(equation.params, more, operands)

    with internals.without_constant_folding():
        structs = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars]
        closed = jax.make_jaxpr(scan)(*structs)
    jaxpr = jaxprs.open_jaxpr(closed)
    known = dict(zip(jaxpr.invars, equation.invars, strict=True))
    known.update(zip(jaxpr.outvars[1:], equation.outvars, strict=True))
    rename = lambda xs: [x if isinstance(x, Literal) else known.get(x, x) for x in xs]  # noqa: E731
    new = [e.replace(invars=rename(e.invars), outvars=rename(e.outvars)) for e in jaxpr.eqns]
    return [_as_linear_as(e, equation) if e.primitive is primitives.scan_p else e for e in new]


def _as_linear_as(made: Any, equation: Any) -> Any:
    """Return a rewritten scan, with one more carried value, that marks the same operands as linear as `equation`, with
    known constants before linear ones. JAX up to 0.9 transposes no other scan."""
    if "linear" not in made.params:
        return made
    params = made.params
    count, _ = jaxprs.parts_of_scan(params)
    before, _ = jaxprs.parts_of_scan(equation.params)
    linear = equation.params["linear"]
    marked = {x: linear[i] for i, x in enumerate(equation.invars[:before]) if not isinstance(x, Literal)}
    of_constants = [not isinstance(x, Literal) and marked.get(x, False) for x in made.invars[:count]]
    order = sorted(range(count), key=lambda i: of_constants[i])
    inner = params["jaxpr"].jaxpr
    changed = {
        "jaxpr": params["jaxpr"].replace(jaxpr=inner.replace(invars=_in_order(inner.invars, order))),
        "linear": (*(of_constants[i] for i in order), True, *linear[before:]),
    }
    return made.replace(invars=_in_order(made.invars, order), params={**params, **changed})


def _in_order(values: Sequence[Any], order: Sequence[int]) -> list[Any]:
    return [*(values[i] for i in order), *values[len(order) :]]


def with_output(jaxpr: Any, which: int) -> Any:
    return jaxprs.change_open(jaxpr, lambda jaxpr: returning(jaxpr, [*jaxpr.outvars, jaxpr.invars[which]]))


def with_results_of(jaxpr: Any, which: Sequence[int]) -> tuple[Any, int]:
    """Return a jaxpr that also returns all results of these equations, and their number."""
    equations = list(jaxpr.eqns)
    for i in which:
        names = [core.Var(x.aval) if isinstance(x, core.DropVar) else x for x in equations[i].outvars]
        equations[i] = equations[i].replace(outvars=names)
    more = [x for i in which for x in equations[i].outvars]
    return returning(jaxpr.replace(eqns=equations), [*jaxpr.outvars, *more]), len(more)


def returning(jaxpr: Any, results: Sequence[Any]) -> Any:
    return jaxpr.replace(outvars=[*results], debug_info=jaxpr.debug_info._replace(result_paths=("",) * len(results)))


def that_depends_on_arguments(closed: Any, constants: int) -> Any:
    """Return a closed jaxpr in which all communication depends on the arguments after the first `constants`. It is
    cached by the original jaxpr, because JAX caches compiled code by the identity of jaxprs."""
    if closed is None or EFFECT not in closed.effects:
        return closed
    by_constants = _jaxprs_that_depend.setdefault(closed, {})
    if constants not in by_constants:

        def evaluate(*args: Any) -> Any:
            inputs = [x for x in args[constants:] if internals.inexact(x)]
            return _evaluate_depending(
                closed, args, [depends_on(None, inputs, like=ZERO)] if len(inputs) > 1 else inputs
            )

        with internals.no_trace(), internals.without_constant_folding():
            by_constants[constants] = jax.make_jaxpr(evaluate)(*closed.in_avals)
    return by_constants[constants]


_jaxprs_that_depend: "weakref.WeakKeyDictionary[Any, dict[int, Any]]" = weakref.WeakKeyDictionary()


def _evaluate_depending(closed: Any, args: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Return the results of a jaxpr in which each operation, also inside calls, branches and loops, has an operand that
    depends on the differentiated inputs."""
    evaluate = functools.partial(_evaluate_depending, inputs=inputs)
    jaxpr = jaxprs.open_jaxpr(closed)
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*jaxprs.constants(closed), *args), strict=True))
    read = lambda atoms: [x.val if isinstance(x, Literal) else values[x] for x in atoms]  # noqa: E731
    for equation in jaxpr.eqns:
        primitive, params, operands = equation.primitive, equation.params, read(equation.invars)
        if EFFECT in equation.effects and primitive in _REWRITES:
            results = _REWRITES[primitive](evaluate, params, operands)
        else:
            for i in rules.dependent_operands(primitive, operands) if is_ours(primitive) else ():
                operands[i] = depends_on(operands[i], inputs)
            results = jaxprs.evaluate(jaxprs.of_equation(jaxpr, equation), *operands)
        values.update(zip(equation.outvars, results, strict=True))
    return read(jaxpr.outvars)


def _rewrite_checkpoint(evaluate: Any, params: Any, operands: Any) -> Any:
    inner, options = params["jaxpr"], {name: params[name] for name in ("policy", "prevent_cse")}
    return jax.checkpoint(lambda *xs: evaluate(inner, xs), **options)(*operands)


def _rewrite_scan(evaluate: Any, params: Any, operands: Any) -> Any:
    consts, init, rows = jaxprs.divide_as_scan(params, operands)

    def step(carry: Any, row: Any) -> Any:
        results = evaluate(params["jaxpr"], [*consts, *carry, *row])
        return results[: len(init)], results[len(init) :]

    carry, ys = jax.lax.scan(step, init, rows, **{name: params[name] for name in ("length", "reverse", "unroll")})
    return [*carry, *ys]


def _rewrite_while(evaluate: Any, params: Any, operands: Any) -> Any:
    """Bind the rewritten primitive: `vmap` makes loops with a batched predicate, which `jax.lax.while_loop` refuses."""
    inputs = evaluate.keywords["inputs"]
    tests, steps = params["cond_nconsts"], params["body_nconsts"]

    def rewritten(closed: Any) -> Any:
        avals = [*map(jax.typeof, inputs), *closed.in_avals]
        return jax.make_jaxpr(lambda *xs: _evaluate_depending(closed, xs[len(inputs) :], xs[: len(inputs)]))(*avals)

    changed = {"cond_jaxpr": rewritten(params["cond_jaxpr"]), "cond_nconsts": tests + len(inputs)}
    changed |= {"body_jaxpr": rewritten(params["body_jaxpr"]), "body_nconsts": steps + len(inputs)}
    return primitives.while_p.bind(*inputs, *operands[:tests], *inputs, *operands[tests:], **{**params, **changed})


def _rewrite_cond(evaluate: Any, params: Any, operands: Any) -> Any:
    branches = [lambda *xs, branch=branch: evaluate(branch, xs) for branch in params["branches"]]
    return jax.lax.switch(operands[0], branches, *operands[1:])


_REWRITES: dict[Any, Callable[..., list[Any]]] = {
    ad_checkpoint.remat_p: _rewrite_checkpoint,
    primitives.closed_call_p: lambda evaluate, params, operands: evaluate(jaxprs.called(params), operands),
    primitives.jit_p: lambda evaluate, params, operands: evaluate(jaxprs.called(params), operands),
    primitives.scan_p: _rewrite_scan,
    primitives.while_p: _rewrite_while,
    primitives.cond_p: _rewrite_cond,
}

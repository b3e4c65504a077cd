"""Jaxprs made again with an additional parameter, result or dependence."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import ad_checkpoint, core
from jax.extend.core import Literal, primitives

from jaxmpi._jax import internals, jaxprs
from jaxmpi._jax.dependence import depends_on
from jaxmpi._primitive.communication import ZERO, Params, is_ours
from jaxmpi._primitive.order import EFFECT


def with_parameter_of_call(params: Params) -> Params:
    name = jaxprs.called_name(params)
    more = {"donated_invars": False, "in_shardings": internals.UNSPECIFIED, "in_layouts": None}
    more["prevent_cse"] = False  # of a checkpoint, which may have one per operand
    more = {key: (value, *params[key]) for key, value in more.items() if isinstance(params.get(key), tuple)}
    return {**params, name: with_parameter(params[name]), **more}


def with_parameter(jaxpr: Any) -> Any:
    """A jaxpr with one more parameter, the first, which is not used. Cached by the jaxpr, since JAX caches compiled
    code by the identity of jaxprs."""
    if (known := _widened_jaxprs.get(jaxpr)) is not None:
        return known
    if jaxprs.open_jaxpr(jaxpr) is not jaxpr:
        wider = jaxprs.change_open(jaxpr, with_parameter)
    else:
        names = jaxpr.debug_info.arg_names
        names = jaxpr.debug_info._replace(arg_names=None if names is None else ("", *names))
        wider = jaxpr.replace(invars=[core.Var(jax.typeof(ZERO)), *jaxpr.invars], debug_info=names)
    _widened_jaxprs[jaxpr] = wider
    return wider


_widened_jaxprs: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


def scan_with_carry(params: Params, more: Any, operands: Sequence[Any]) -> list[Any]:
    """A scan with these parameters that carries one more number. Returns that number and the scan's results."""
    constants, carried = jaxprs.parts_of_scan(params)
    consts, init, xs = (
        operands[:constants],
        operands[constants : constants + carried],
        operands[constants + carried :],
    )

    def step(carry, x):
        # JAX orders constants by first use and turns a carried value that no step changes into a constant. `depends_on`
        # without inputs, of all of them, keeps order and number.
        changed, *same = [depends_on(value, []) for value in (carry[0], *consts)]
        result = jaxprs.evaluate(params["jaxpr"], *same, *carry[1:], *x)
        return [changed, *result[:carried]], result[carried:]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(step, [more, *init], list(xs), **options)
    return [*carry, *ys]


def with_carry(equation: Any, which: int) -> list[Any]:
    """The equations of a scan that carries one more number, which is linear in the operand `which`."""

    def scan(*operands):
        more = depends_on(None, [operands[which]], like=ZERO)
        return scan_with_carry(equation.params, more, operands)

    with internals.without_constant_folding():
        structs = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars]
        closed = jax.make_jaxpr(scan)(*structs)
    jaxpr = jaxprs.open_jaxpr(closed)
    known = dict(zip(jaxpr.invars, equation.invars, strict=True))
    known.update(zip(jaxpr.outvars[1:], equation.outvars, strict=True))
    rename = lambda xs: [x if isinstance(x, Literal) else known.get(x, x) for x in xs]  # noqa: E731
    made = [e.replace(invars=rename(e.invars), outvars=rename(e.outvars)) for e in jaxpr.eqns]
    return [_as_linear_as(e, equation) if e.primitive is primitives.scan_p else e for e in made]


def _as_linear_as(made: Any, equation: Any) -> Any:
    """A scan made again, with one more carried value, that says of its operands what `equation` says: which of them
    are linear, and with known constants before linear ones. JAX up to 0.9 transposes no other."""
    if "linear" not in made.params:
        return made
    params = made.params
    count, _ = jaxprs.parts_of_scan(params)
    before, _ = jaxprs.parts_of_scan(equation.params)
    linear = equation.params["linear"]
    said = {x: linear[i] for i, x in enumerate(equation.invars[:before]) if not isinstance(x, Literal)}
    of_constants = [not isinstance(x, Literal) and said.get(x, False) for x in made.invars[:count]]
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
    """A jaxpr that also returns one of its arguments."""
    return jaxprs.change_open(jaxpr, lambda jaxpr: with_results(jaxpr, [jaxpr.invars[which]]))


def with_results(jaxpr: Any, more: Sequence[Any]) -> Any:
    return _returning(jaxpr, [*jaxpr.outvars, *more])


def with_results_of(jaxpr: Any, which: Sequence[int]) -> tuple[Any, int]:
    """A jaxpr that also returns all results of these of its equations, and how many they are."""
    equations = list(jaxpr.eqns)
    for i in which:
        names = [core.Var(x.aval) if isinstance(x, core.DropVar) else x for x in equations[i].outvars]
        equations[i] = equations[i].replace(outvars=names)
    more = [x for i in which for x in equations[i].outvars]
    return with_results(jaxpr.replace(eqns=equations), more), len(more)


def without_results(jaxpr: Any, count: int) -> Any:
    """A jaxpr that returns all but the last results."""
    return _returning(jaxpr, jaxpr.outvars[: len(jaxpr.outvars) - count])


def _returning(jaxpr: Any, results: Sequence[Any]) -> Any:
    return jaxpr.replace(outvars=[*results], debug_info=jaxpr.debug_info._replace(result_paths=("",) * len(results)))


def depending(closed: Any, constants: int) -> Any:
    """The same computation, in which everything communicated depends on the arguments after the first `constants`.
    Cached by the computation, since JAX caches compiled code by the identity of jaxprs."""
    if closed is None or EFFECT not in closed.effects:
        return closed
    made = _depending_jaxprs.setdefault(closed, {})
    if constants not in made:

        def evaluate(*args):
            seeds = [x for x in args[constants:] if internals.inexact(x)]
            return _evaluate_depending(closed, args, [depends_on(None, seeds, like=ZERO)] if len(seeds) > 1 else seeds)

        with internals.no_trace(), internals.without_constant_folding():
            made[constants] = jax.make_jaxpr(evaluate)(*closed.in_avals)
    return made[constants]


_depending_jaxprs: "weakref.WeakKeyDictionary[Any, dict[int, Any]]" = weakref.WeakKeyDictionary()


def _evaluate_depending(closed: Any, args: Sequence[Any], seeds: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr with each operation, also inside calls, branches and loops, given an operand that depends
    on the seeds."""
    again = functools.partial(_evaluate_depending, seeds=seeds)
    jaxpr = jaxprs.open_jaxpr(closed)
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*jaxprs.constants(closed), *args), strict=True))
    read = lambda atoms: [x.val if isinstance(x, Literal) else values[x] for x in atoms]  # noqa: E731
    for equation in jaxpr.eqns:
        primitive, params, operands = equation.primitive, equation.params, read(equation.invars)
        if EFFECT in equation.effects and primitive in _REMADE:
            results = _REMADE[primitive](again, params, operands)
        else:
            for i in primitive.linked(operands) if is_ours(primitive) else ():
                operands[i] = depends_on(operands[i], seeds)
            results = jaxprs.evaluate(jaxprs.of_equation(jaxpr, equation), *operands)
        values.update(zip(equation.outvars, results, strict=True))
    return read(jaxpr.outvars)


def _remake_checkpoint(again, params, operands):
    inner, options = params["jaxpr"], {name: params[name] for name in ("policy", "prevent_cse")}
    return jax.checkpoint(lambda *xs: again(inner, xs), **options)(*operands)


def _remake_scan(again, params, operands):
    constants, carried = jaxprs.parts_of_scan(params)
    same, init, rows = operands[:constants], operands[constants : constants + carried], operands[constants + carried :]

    def step(carry, row):
        results = again(params["jaxpr"], [*same, *carry, *row])
        return results[:carried], results[carried:]

    carry, ys = jax.lax.scan(step, init, rows, **{name: params[name] for name in ("length", "reverse", "unroll")})
    return [*carry, *ys]


def _remake_while(again, params, operands):
    """Binds the primitive: `vmap` makes loops with a batched predicate, which `jax.lax.while_loop` refuses."""
    seeds = again.keywords["seeds"]
    tests, steps = params["cond_nconsts"], params["body_nconsts"]

    def remade(closed):
        avals = [*map(jax.typeof, seeds), *closed.in_avals]
        return jax.make_jaxpr(lambda *xs: _evaluate_depending(closed, xs[len(seeds) :], xs[: len(seeds)]))(*avals)

    changed = {"cond_jaxpr": remade(params["cond_jaxpr"]), "cond_nconsts": tests + len(seeds)}
    changed |= {"body_jaxpr": remade(params["body_jaxpr"]), "body_nconsts": steps + len(seeds)}
    return primitives.while_p.bind(*seeds, *operands[:tests], *seeds, *operands[tests:], **{**params, **changed})


def _remake_cond(again, params, operands):
    branches = [lambda *xs, branch=branch: again(branch, xs) for branch in params["branches"]]
    return jax.lax.switch(operands[0], branches, *operands[1:])


_REMADE: dict[Any, Callable[..., list[Any]]] = {
    ad_checkpoint.remat_p: _remake_checkpoint,
    primitives.closed_call_p: lambda again, params, operands: again(jaxprs.called(params), operands),
    internals.jit_p: lambda again, params, operands: again(jaxprs.called(params), operands),
    primitives.scan_p: _remake_scan,
    primitives.while_p: _remake_while,
    primitives.cond_p: _remake_cond,
}

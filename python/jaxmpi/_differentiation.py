"""What JAX's differentiation is told of communication: its private names, and the places where it is told.

A derivative is communication, so all ranks must take part, also one on which an operation's operand depends on nothing
that is differentiated, or whose result nothing depends on. JAX leaves such operations out of derivatives. It is told
otherwise at the few places through which every primitive passes, also one that is not invented yet:

1. A trace that differentiates remembers the values that it was started with. What communicates gets an operand whose
   tangent is linear in all of them: so it is differentiated on every rank, and everywhere in the same pass.
2. A function with a derivative of its own (`jax.custom_jvp`, `jax.custom_vjp`) that communicates gets such operands, so
   that its rule is called on every rank.
3. Where JAX divides a computation into a known part and the rest, no equation that communicates is dropped.
4. Where it transposes, every cotangent depends on all that the transposition was started with.
5. Where it takes out of a loop what is the same in each step, and where it transposes a function, nothing that
   communicates is taken for known because its operands are.

`vmap` maps what depends on what it maps, and ranks must map alike. A derivative may depend on it on one rank alone, so
the links of 1. and 4. are mapped by every `vmap` around them, and what is communicated with them; where a derivative is
differentiated further, by every one but that of `jacfwd`, which maps tangents alone (`_value_linked`).

What JAX opens by a rule of its own is in `_OPENED`, with what the rule needs; anything else that communicates inside is
refused. `_contract` holds JAX to all this before the first derivative.
"""

import contextlib
import contextvars
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import ad_checkpoint, core, custom_batching
from jax._src.interpreters import ad as private_ad
from jax._src.interpreters import partial_eval
from jax._src.lax.control_flow import solves
from jax.extend.core import Literal, primitives

try:
    from jax._src import hijax
except ImportError:  # before JAX 0.8
    hijax = None  # type: ignore[assignment]

from jaxmpi import _hidden, _jax
from jaxmpi._native import OPERATIONS
from jaxmpi._order import EFFECT

Params = dict[str, Any]
Link = Callable[..., Any]
"""(value or None, seeds, like, always, unless) -> the value, or zeros like the third, that JAX takes for a linear
function of all; with `always` whatever maps any of the computation by `vmap` maps it, too, unless it maps one of the
last."""

_link: Link
_link_primitive: _jax.Primitive
_check: Callable[[], None]


DERIVATIVE = "derivative"
"""Parameter of an operation on tangents or cotangents, which says of which. Its messages have tags of their own: they
are never taken for those of the function itself."""


HAS_NEWER_CHECKPOINT = "jaxpr" in getattr(getattr(ad_checkpoint, "RematTraced", None), "__annotations__", ())

HOOKS: tuple[tuple[Any, str, str, Callable[..., Any]], ...]
"""Functions of JAX, the parameters that they take, and what stands in their place."""


def install(link: Link, primitive: _jax.Primitive, check: Callable[[], None]) -> None:
    """Tells JAX. `link` binds a `primitive`; `check` is called before a derivative of what communicates is taken, and
    raises where it cannot be."""
    global _link, _link_primitive, _check
    _link, _link_primitive, _check = link, primitive, check
    for hook in HOOKS if _jax.KEEPS_EFFECTS else _REFUSALS:
        _jax.replace(*hook)
    if not _jax.KEEPS_EFFECTS:
        return
    _hidden.report()
    _hidden.report_of(private_ad.custom_lin_p, _pullback_communicates)
    if hasattr(hijax, "call_hi_primitive_linearized_p"):
        _hidden.report_of(hijax.call_hi_primitive_linearized_p, lambda _, params: EFFECT in params["_prim"].effects)
    _replace_rule(partial_eval.partial_eval_jaxpr_custom_rules, primitives.scan_p, _divide_checkpointed_scan)
    _replace_rule(partial_eval.dce_rules, ad_checkpoint.remat_p, _keep_checkpoint)


def _replace_rule(rules: dict[Any, Any], primitive: Any, instead: Callable[..., Any]) -> None:
    own = getattr(rules[primitive], "jaxmpi_own", rules[primitive])
    rules[primitive] = functools.partial(instead, own)
    rules[primitive].jaxmpi_own = own


@contextlib.contextmanager
def _during(variable: "contextvars.ContextVar[Any]", value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


# --- what communicates -----------------------------------------------------------------------------------------------

_PLAIN = (int, float, bool, str, type(None))


def communicates(params: Params) -> bool:
    """Whether a primitive with these parameters has computations inside that communicate."""
    return any(_inside(value) for value in params.values() if type(value) not in _PLAIN)


def _inside(value: Any) -> bool:
    if EFFECT in getattr(value, "effects", ()):
        return True
    if isinstance(value, (tuple, list)):
        return any(_inside(x) for x in value if type(x) not in _PLAIN)
    if hasattr(value, "eqns"):
        return False
    inner, more = getattr(value, "jaxpr", None), getattr(value, "params", None)  # of a primitive that is an object
    return (inner is not None and _inside(inner)) or (isinstance(more, dict) and communicates(more))


def _is_ours(primitive: Any) -> bool:
    return type(primitive) is Operation


class Operation(_jax.Primitive):
    """A primitive that communicates, always with a list of results."""

    multiple_results = True

    def bind_with_trace(self, trace, args, *more):
        if type(trace).__name__ == "JetTrace" and any(map(_jax.inexact, args)):
            raise NotImplementedError(
                f"{self.name}: jax.experimental.jet has no rule for communication. Nested jax.jvp gives the same "
                "derivatives, on all ranks alike."
            )
        if _cannot_be_traced.get():
            raise _refusal("a function with jax.custom_jvp or jax.custom_vjp that looks at values")
        return super().bind_with_trace(trace, args, *more)


def _communicates_when_called(function: Any, avals: Iterable[Any]) -> bool:
    """Whether a function that JAX has wrapped communicates; found out by tracing it, if it has not been."""
    if not function.transforms and (traced := getattr(function.f, "args", ())) and hasattr(traced[0], "effects"):
        return EFFECT in traced[0].effects
    try:
        return EFFECT in jax.make_jaxpr(lambda *xs: (function.call_wrapped(*xs), ())[1])(*avals).effects
    finally:
        _forget(function)


def _forget(function: Any) -> None:
    """Makes a wrapped function that was traced as if it had not been: it keeps the structure of what it returned."""
    for store in function.stores:
        if store:
            store.reset()


# --- 1. traces that differentiate ------------------------------------------------------------------------------------

_TRACERS = {private_ad.JVPTrace: private_ad.JVPTracer, private_ad.LinearizeTrace: private_ad.LinearizeTracer}
_seeds: "weakref.WeakKeyDictionary[Any, list[Any] | tuple[Any, ...]]" = weakref.WeakKeyDictionary()
"""The values, each with its tangent, with which a trace was started; a tuple once it has seen an operation, and no more
are added."""


def _begin(own: Callable[..., None], tracer: Any, trace: Any, primal: Any, tangent: Any) -> None:
    own(tracer, trace, primal, tangent)
    known = _seeds.get(trace)
    if known is None:
        known = _seeds[trace] = []
    if type(known) is list and type(tangent) is not _jax.ad.Zero and _jax.inexact(tangent):
        known.append((primal, tangent))


def _seeds_of(trace: Any) -> tuple[Any, ...]:
    seeds = _seeds.get(trace, ())
    if type(seeds) is not tuple:
        seeds = _seeds[trace] = tuple(seeds)
    return seeds


def _tangents(trace: Any, tracers: Sequence[Any]) -> list[Any]:
    return [trace.to_primal_tangent_pair(x)[1] for x in tracers]


def _linked(trace: Any, tracers: Sequence[Any], which: Iterable[int], why: str, always: bool = True) -> list[Any]:
    """The operands, of which those in `which` have tangents that are linear in all that `trace` differentiates.

    They are mapped by any `vmap` outside: on another rank they may depend on what it maps, and here on nothing.
    """
    tracers = list(tracers)
    seeds = _seeds_of(trace)
    for i in which:
        primal, tangent = trace.to_primal_tangent_pair(tracers[i])
        own = None if type(tangent) is _jax.ad.Zero else tangent
        if own is None and not seeds:
            raise NotImplementedError(
                f"{why} communicates in a function that is differentiated with respect to nothing on this rank: an "
                "empty pytree, or integers alone. All ranks take part in a derivative: give each a floating-point "
                "argument to differentiate with respect to."
            )
        with core.set_current_trace(getattr(trace, "tangent_trace", trace.parent_trace)):
            tangent = _link(own, [seed for _, seed in seeds], jax.typeof(primal), always)
        tracers[i] = _TRACERS[type(trace)](trace, primal, tangent)
    return tracers


def _differentiate_link(own: Callable[..., Any], trace: Any, primitive: Any, tracers: Sequence[Any], params: Params):
    """A derivative that is differentiated further is a value: see `_value_linked`."""
    tracers = tracers[: len(tracers) - params["unless"]]
    linked = any(type(tangent) is not _jax.ad.Zero for tangent in _tangents(trace, tracers))
    return _value_linked(trace, own(trace, primitive, tracers, {**params, "always": linked, "unless": 0}))


def _differentiate(own: Callable[..., Any], trace: Any, primitive: Any, tracers: Sequence[Any], params: Params) -> Any:
    _seeds_of(trace)
    if _is_ours(primitive):
        _check()
        which = [i for i, x in enumerate(tracers) if _jax.inexact(x)][:1]
        tracers = _linked(trace, tracers, which, primitive.name)
        return own(trace, primitive, tracers, params)
    if primitive is _link_primitive and params["always"]:
        return _differentiate_link(own, trace, primitive, tracers, params)
    if primitive in _OPENED:
        known = any(type(tangent) is not _jax.ad.Zero for tangent in _tangents(trace, tracers))
        if not communicates(params) and (known or not _derivative_communicates(trace, params)):
            return own(trace, primitive, tracers, params)
        _check()
        return _OPENED[primitive](functools.partial(_open, own), trace, primitive, tracers, params)
    if communicates(params) or _hidden.communicates(primitive, tracers, params):
        _check()
        if (possible := _hidden.differentiated_operands(primitive, params)) is None:
            raise _refusal(primitive.name)
        which = [i for i in possible if _jax.inexact(tracers[i])]
        return own(trace, primitive, _linked(trace, tracers, which, primitive.name), params)
    return own(trace, primitive, tracers, params)


def _refuse_old(own: Callable[..., Any], trace: Any, primitive: Any, tracers: Sequence[Any], params: Params) -> Any:
    if _is_ours(primitive) or communicates(params):
        raise NotImplementedError(
            f"jaxmpi: derivatives of communication need JAX 0.7 or newer, this is {jax.__version__}: it leaves out of "
            "a derivative what nothing on this rank depends on, though other ranks may."
        )
    return own(trace, primitive, tracers, params)


# --- what JAX opens --------------------------------------------------------------------------------------------------


def _one(trace: Any, tracers: Sequence[Any], start: int = 0, stop: int | None = None) -> list[int]:
    """An operand to be linked, among those from `start` to `stop`: one with a tangent if there is one; none if none can
    have."""
    possible = [i for i in range(start, len(tracers) if stop is None else stop) if _jax.inexact(tracers[i])]
    tangents = _tangents(trace, tracers)
    return [i for i in possible if type(tangents[i]) is not _jax.ad.Zero][:1] or possible[:1]


def _one_of_first_order(trace: Any, tracers: Sequence[Any], params: Params, start: int = 0) -> list[int]:
    """The same; none if there are derivatives inside, whose values must depend on what is differentiated, too, unless
    it has a dummy already."""
    return [] if _has_derivatives(params) and _widened.get() is not trace else _one(trace, tracers, start)


_widened: contextvars.ContextVar[Any] = contextvars.ContextVar("widened", default=None)
"""The trace for which a loop is made again, with a dummy."""


def _has_derivatives(params: Params) -> bool:
    """Whether a computation inside has derivatives of what communicates."""
    for inner in _jax.inner_jaxprs(params):
        for equation in inner.eqns:
            more = equation.params
            if equation.primitive is _link_primitive and more["always"]:
                return True
            if DERIVATIVE in more or (communicates(more) and _has_derivatives(more)):
                return True
    return False


_ZERO = np.zeros((), jax.dtypes.canonicalize_dtype(float))


def _dummy(trace: Any) -> Any:
    """A number of no meaning that depends on what is differentiated, as does its tangent."""
    (tracer,) = _linked(trace, [_ZERO], [0], "what")
    return _value_linked(trace, tracer)


def _value_linked(trace: Any, tracer: Any) -> Any:
    """The same, whose value is mapped by what maps the values that are differentiated, and by all that does not map
    their tangents: on another rank it may depend on it.

    What maps tangents alone, as `jax.jacfwd` does, expects a value that is not mapped. Inside of what JAX opens
    tangents tell nothing, as they are linked and always mapped; there the values depend on those outside.
    """
    primal, tangent = trace.to_primal_tangent_pair(tracer)
    values, tangents = zip(*_seeds_of(trace), strict=True) if _seeds_of(trace) else ((), ())
    with core.set_current_trace(trace.parent_trace):
        like = jax.typeof(primal)
        if type(trace) is private_ad.LinearizeTrace:
            primal = _link(primal, [], like, True)
        else:
            primal = _link(primal, values, like, not _opening.get(), () if _opening.get() else tangents)
    return primal if type(tangent) is _jax.ad.Zero else _TRACERS[type(trace)](trace, primal, tangent)


_opening: contextvars.ContextVar[bool] = contextvars.ContextVar("opening", default=False)
"""Whether JAX is differentiating the inside of what it opens."""


def _open(own: Callable[..., Any], *args: Any) -> Any:
    with _during(_opening, True):
        return own(*args)


def _open_call(own, trace, primitive, tracers, params):
    if which := _one_of_first_order(trace, tracers, params):
        return own(trace, primitive, _linked(trace, tracers, which, primitive.name), params)
    return own(trace, primitive, [_dummy(trace), *tracers], _with_parameter_of_call(params))


def _with_parameter_of_call(params: Params) -> Params:
    name = "jaxpr" if "jaxpr" in params else "call_jaxpr"
    more = {"donated_invars": False, "in_shardings": _jax.UNSPECIFIED, "in_layouts": None}
    more["prevent_cse"] = False  # of a checkpoint, where it may be one for each operand
    more = {key: (value, *params[key]) for key, value in more.items() if isinstance(params.get(key), tuple)}
    return {**params, name: _with_parameter(params[name]), **more}


def _with_parameter(jaxpr: Any) -> Any:
    """A jaxpr that has one more parameter, the first, of which it makes no use; the same one for the same jaxpr, as by
    that JAX knows what it has compiled."""
    if (known := _widened_jaxprs.get(jaxpr)) is not None:
        return known
    if hasattr(jaxpr, "jaxpr") and jaxpr.jaxpr is not jaxpr:
        wider = jaxpr.replace(jaxpr=_with_parameter(jaxpr.jaxpr))
    else:
        names = jaxpr.debug_info.arg_names
        names = jaxpr.debug_info._replace(arg_names=None if names is None else ("", *names))
        wider = jaxpr.replace(invars=[core.Var(jax.typeof(_ZERO)), *jaxpr.invars], debug_info=names)
    _widened_jaxprs[jaxpr] = wider
    return wider


_widened_jaxprs: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


def _open_scan(own, trace, primitive, tracers, params):
    if which := _one_of_first_order(trace, tracers, params):
        return own(trace, primitive, _linked(trace, tracers, which, "scan"), params)
    with _during(_widened, trace), core.set_current_trace(trace):
        return _scan_with_carry(params, _dummy(trace), tracers)[1:]


def _open_cond(own, trace, primitive, tracers, params):
    if which := _one_of_first_order(trace, tracers, params, 1):
        return own(trace, primitive, _linked(trace, tracers, which, "cond"), params)
    branches = tuple(map(_with_parameter, params["branches"]))
    return own(trace, primitive, [tracers[0], _dummy(trace), *tracers[1:]], {**params, "branches": branches})


def _open_while(own, trace, primitive, tracers, params):
    tests, steps = params["cond_nconsts"], params["body_nconsts"]
    if which := _one_of_first_order(trace, tracers, params, tests):
        return own(trace, primitive, _linked(trace, tracers, which, "while_loop"), params)
    of_test, of_step, init = tracers[:tests], tracers[tests : tests + steps], tracers[tests + steps :]
    with _during(_widened, trace), core.set_current_trace(trace):
        return jax.lax.while_loop(
            lambda state: _jax.evaluate(params["cond_jaxpr"], *of_test, *state[1:])[0],
            lambda state: [state[0], *_jax.evaluate(params["body_jaxpr"], *of_step, *state[1:])],
            [_dummy(trace), *init],
        )[1:]


def _open_linear_solve(own, trace, primitive, tracers, params):
    """A linear solve: linked are what its matrix depends on, and its right-hand side.

    The derivative of a matrix that communicates is communication, also where the matrix depends on nothing here. The
    solve for a derivative is mapped by what maps that, and with it what the matrix communicates: see `_depending`.
    """
    lengths, jaxprs = params["const_lengths"], params["jaxprs"]
    jaxprs = type(jaxprs)(*map(_depending, jaxprs, lengths))
    which = _one(trace, tracers, sum(lengths))
    if EFFECT in jaxprs.matvec.effects:
        if not _one(trace, tracers, 0, lengths.matvec):
            matvec = jaxprs.matvec
            with core.set_current_trace(trace.parent_trace):
                avals = [_ZERO, *(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in matvec.in_avals)]
                wider = jax.make_jaxpr(lambda _, *arguments: _jax.evaluate(matvec, *arguments))(*avals)
            jaxprs = jaxprs._replace(matvec=wider)
            lengths = lengths._replace(matvec=lengths.matvec + 1)
            tracers, which = [_dummy(trace), *tracers], [i + 1 for i in which]
        which = _one(trace, tracers, 0, lengths.matvec) + which
    params = {**params, "const_lengths": lengths, "jaxprs": jaxprs}
    return own(trace, primitive, _linked(trace, tracers, which, "custom_linear_solve"), params)


def _depending(closed: Any, constants: int) -> Any:
    """The same computation, in which what is communicated depends on the arguments after the first `constants`; the
    same one for the same computation, as by that JAX knows what it has compiled."""
    if closed is None or EFFECT not in closed.effects:
        return closed
    if (known := _depending_jaxprs.get(closed)) is None:

        def evaluate(*args):
            return _evaluate_linked(closed, args, [x for x in args[constants:] if _jax.inexact(x)])

        with _jax.no_trace(), _jax.without_constant_folding():
            known = _depending_jaxprs[closed] = jax.make_jaxpr(evaluate)(*closed.in_avals)
    return known


_depending_jaxprs: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


def _evaluate_linked(closed: Any, args: Sequence[Any], seeds: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr in which each operation, also in calls, branches and loops, has an operand that depends on
    the seeds."""
    again = functools.partial(_evaluate_linked, seeds=seeds)
    jaxpr = getattr(closed, "jaxpr", closed)
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*getattr(closed, "consts", ()), *args), strict=True))
    read = lambda atoms: [x.val if isinstance(x, Literal) else values[x] for x in atoms]  # noqa: E731
    for equation in jaxpr.eqns:
        primitive, params, operands = equation.primitive, equation.params, read(equation.invars)
        if EFFECT in equation.effects and primitive in _REMADE:
            results = _REMADE[primitive](again, params, operands)
        else:
            if _is_ours(primitive) and (which := [i for i, x in enumerate(operands) if _jax.inexact(x)]):
                operand = operands[which[0]]
                operands[which[0]] = _link(operand, seeds, jax.typeof(operand))
            results = _jax.evaluate(_jax.alone(jaxpr, equation), *operands)
        values.update(zip(equation.outvars, results, strict=True))
    return read(jaxpr.outvars)


def _remake_checkpoint(again, params, operands):
    inner, options = params["jaxpr"], {name: params[name] for name in ("policy", "prevent_cse")}
    return jax.checkpoint(lambda *xs: again(inner, xs), **options)(*operands)


def _remake_scan(again, params, operands):
    constants, carried = _jax.parts_of_scan(params)
    same, init, rows = operands[:constants], operands[constants : constants + carried], operands[constants + carried :]

    def step(carry, row):
        results = again(params["jaxpr"], [*same, *carry, *row])
        return results[:carried], results[carried:]

    carry, ys = jax.lax.scan(step, init, rows, **{name: params[name] for name in ("length", "reverse", "unroll")})
    return [*carry, *ys]


def _remake_while(again, params, operands):
    tests, steps = params["cond_nconsts"], params["body_nconsts"]
    of_test, of_step, init = operands[:tests], operands[tests : tests + steps], operands[tests + steps :]
    return jax.lax.while_loop(
        lambda state: again(params["cond_jaxpr"], [*of_test, *state])[0],
        lambda state: again(params["body_jaxpr"], [*of_step, *state]),
        init,
    )


def _remake_cond(again, params, operands):
    branches = [lambda *xs, branch=branch: again(branch, xs) for branch in params["branches"]]
    return jax.lax.switch(operands[0], branches, *operands[1:])


_REMADE: dict[Any, Callable[..., list[Any]]] = {
    ad_checkpoint.remat_p: _remake_checkpoint,
    primitives.closed_call_p: lambda again, params, operands: again(_jax.called(params), operands),
    _jax.jit_p: lambda again, params, operands: again(_jax.called(params), operands),
    primitives.scan_p: _remake_scan,
    primitives.while_p: _remake_while,
    primitives.cond_p: _remake_cond,
}


def _open_custom_vmap(own, trace, primitive, tracers, params):
    """Refused: what is mapped in its tangent is the user's rule to say, and may differ from rank to rank."""
    raise _refusal("a function with jax.custom_batching.custom_vmap")


def _open_object(own, trace, primitive, tracers, params):
    """A primitive that is an object, from JAX 0.9 on. How a root is differentiated depends on which operands can be."""
    which = [i for i, x in enumerate(tracers) if _jax.inexact(x)]
    if type(params["_prim"]) not in _OBJECTS or not which:
        raise _refusal(type(params["_prim"]).__name__)
    return own(trace, primitive, _linked(trace, tracers, which, type(params["_prim"]).__name__), params)


def _refusal(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"jaxmpi: {what} is not known to be differentiated on all ranks alike by JAX {jax.__version__} where it "
        "communicates. Communicate outside of it, or differentiate inside of it."
    )


def _checkpoint(own: Callable[..., Any], traced: Any, *args: Any) -> Any:
    """The newer kind of checkpoint, where it communicates, is the older one, which carries effects."""
    if EFFECT not in traced.jaxpr.effects:
        return own(traced, *args)
    jaxpr = getattr(traced.jaxpr, "jaxpr", traced.jaxpr)
    cse = getattr(traced, "prevent_cse", True)
    return ad_checkpoint.remat_p.bind(*args, jaxpr=jaxpr, prevent_cse=cse, differentiated=False, policy=traced.policy)


_OPENED: dict[Any, Callable[..., Any]] = {
    primitives.closed_call_p: _open_call,
    primitives.cond_p: _open_cond,
    primitives.linear_solve_p: _open_linear_solve,
    ad_checkpoint.remat_p: _open_call,
    primitives.scan_p: _open_scan,
    primitives.while_p: _open_while,
    custom_batching.custom_vmap_p: _open_custom_vmap,
    _jax.jit_p: _open_call,
    **({hijax.call_hi_primitive_p: _open_object} if hasattr(hijax, "call_hi_primitive_p") else {}),
}
_OBJECTS = {getattr(solves, name) for name in ("CustomRoot", "_RootLinearMap") if hasattr(solves, name)}


# --- 2. functions with derivatives of their own ----------------------------------------------------------------------


def _differentiate_custom_jvp(own, trace, primitive, function, rule, tracers, *more, **options):
    """All operands get tangents: the rule may communicate each of them, whether JAX has made it of zeros or not."""

    def asks(avals):
        return _communicates_when_called(function, avals) or _rule_communicates(rule, avals)

    possible, asked = _asked(trace, tracers, function, rule, asks)
    if asked:
        tracers = _linked(trace, tracers, _or_refuse(possible), "a function with jax.custom_jvp", False)
    with _during(_cannot_be_traced, asked is None and (not possible or _any_zero(trace, tracers, possible))):
        return own(trace, primitive, function, rule, tracers, *more, **options)


def _differentiate_custom_vjp(own, trace, primitive, function, forward, backward, tracers, *more, **options):
    """One operand has a tangent, so that the rules are called; a closed-over value, which is one too, may have none."""

    def call(tracers):
        return own(trace, primitive, function, forward, backward, tracers, *more, **options)

    out_trees = options["out_trees"] if "out_trees" in options else more[0]
    called = any(type(tangent) is not _jax.ad.Zero for tangent in _tangents(trace, tracers))
    possible, asked = _asked(
        trace,
        tracers,
        function,
        backward,
        lambda avals: (
            _communicates_when_called(function, avals)
            or (not called and _backward_communicates(forward, backward, avals, out_trees))
        ),
        called,
    )
    if not asked:
        with _during(_cannot_be_traced, asked is None and not called):
            return call(tracers)
    _or_refuse(possible)
    possible.sort(key=lambda i: _any_zero(trace, tracers, [i]))
    for i in possible:
        with contextlib.suppress(private_ad.CustomVJPException, *([] if i == possible[-1] else [AssertionError])):
            return call(_linked(trace, tracers, [i], "a function with jax.custom_vjp", False))
    raise _refusal("a function with jax.custom_vjp that has closed-over values alone")


def _any_zero(trace: Any, tracers: Sequence[Any], which: Iterable[int]) -> bool:
    """Whether an operand has no tangent."""
    return any(type(trace.to_primal_tangent_pair(tracers[i])[1]) is _jax.ad.Zero for i in which)


def _asked(
    trace: Any, tracers: Sequence[Any], function: Any, rule: Any, asks: Callable[[list[Any]], bool], *of: bool
) -> tuple[list[int], bool | None]:
    """The operands that can have tangents, and whether a function or its rule communicates: None where that cannot be
    found out by tracing them."""
    _seeds_of(trace)
    avals = [jax.typeof(x) for x in tracers]
    answers, key = _answers_for(function, rule, [*of, *avals])
    if (asked := answers.get(key)) is None:
        with core.set_current_trace(trace.parent_trace):
            try:
                asked = answers[key] = asks(avals)
            except Exception as error:
                if isinstance(error, NotImplementedError) and str(error).startswith(_OURS):
                    raise
    if asked:
        _check()
    return [i for i, x in enumerate(tracers) if _jax.inexact(x)], asked


def _answers_for(function: Any, rule: Any, operands: Sequence[Any]) -> tuple[dict[Any, bool], Any]:
    """What is known of a function and its rule already, and the key of its answer for these operands; nothing where it
    may depend on more than operands and their structure."""
    structure = [x for _, params in function.transforms for x in params]
    if all(type(x) is jax.tree_util.PyTreeDef for x in structure):
        with contextlib.suppress(TypeError):  # of what cannot be referred to weakly
            answers = _answers.setdefault(rule.f, weakref.WeakKeyDictionary()).setdefault(function.f, {})
            return answers, (*structure, *operands)
    return {}, None


_answers: "weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, dict[Any, bool]]]"
_answers = weakref.WeakKeyDictionary()


def _or_refuse(possible: list[int]) -> list[int]:
    if not possible:
        raise NotImplementedError(
            "jaxmpi: a function with jax.custom_jvp or jax.custom_vjp communicates and has no floating-point argument, "
            "so its rule is not called in a derivative. Give it one."
        )
    return possible


_cannot_be_traced: contextvars.ContextVar[bool] = contextvars.ContextVar("cannot_be_traced", default=False)
"""Whether operations are refused: it is not known that the function they are in is differentiated."""


def _rule_communicates(rule: Any, avals: Sequence[Any]) -> bool:
    """Whether the rule of a `jax.custom_jvp` function communicates."""

    def call(*xs):
        return rule.call_wrapped(*xs, *(x if _jax.inexact(x) else np.zeros(x.shape, jax.dtypes.float0) for x in xs))

    try:
        return EFFECT in jax.make_jaxpr(lambda *xs: (call(*xs), ())[1])(*avals).effects
    finally:
        _forget(rule)


def _backward_communicates(forward: Any, backward: Any, avals: Sequence[Any], out_trees: Callable[[], Any]) -> bool:
    """Whether the rules of a `jax.custom_vjp` function communicate."""
    try:
        traced, results = jax.make_jaxpr(
            lambda *xs: forward.call_wrapped(*[y for x in xs for y in (x, False)]), return_shape=True
        )(*avals)
        if EFFECT in traced.effects:
            return True
        _, residual_tree, *forwards = out_trees()
        sources = forwards[0] if forwards else [None] * residual_tree.num_leaves
        count = sum(source is None for source in sources)
        made, outs = iter(results[:count]), results[count:]
        residuals = [next(made) if source is None else avals[source] for source in sources]
        return _communicates_when_called(backward, [*residuals, *outs])
    finally:
        _forget(forward)


def _pullback_communicates(avals: Sequence[Any], params: Params) -> bool:
    """Whether what stands for the derivative of a `jax.custom_vjp` function communicates when it is transposed.

    If so it has the effect, and is transposed also where nothing depends on it. A rule that looks at values may.
    """
    try:
        may = _communicates_when_called(params["bwd"], [*avals[: params["num_res"]], *params["out_avals"]])
    except _LOOKS_AT_VALUES:
        return True
    except Exception:  # raised again where the rule is called
        return False
    if may:
        _check()
    return may


_LOOKS_AT_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def _derivative_communicates(trace: Any, params: Params) -> bool:
    """Whether a computation inside, which does not communicate, has a function with a rule that does."""
    return any(_rules_communicate(trace, inner) for inner in _jax.inner_jaxprs(params))


def _rules_communicate(trace: Any, jaxpr: Any) -> bool:
    if (known := _jaxprs_with_rules.get(jaxpr)) is None:
        known = _jaxprs_with_rules[jaxpr] = any(
            _rule_of_equation_communicates(trace, jaxpr, equation)
            if equation.primitive in (primitives.custom_jvp_call_p, primitives.custom_vjp_call_p)
            else _derivative_communicates(trace, equation.params)
            for equation in jaxpr.eqns
        )
    return known


_jaxprs_with_rules: "weakref.WeakKeyDictionary[Any, bool]" = weakref.WeakKeyDictionary()


def _rule_of_equation_communicates(trace: Any, jaxpr: Any, equation: Any) -> bool:
    alone = _jax.alone(jaxpr, equation)
    which = [i for i, x in enumerate(alone.invars) if _jax.inexact(x.aval)]

    def differentiated(*xs):
        def f(*varied):
            replaced = dict(zip(which, varied, strict=True))
            results = _jax.evaluate(alone, *(replaced.get(i, x) for i, x in enumerate(xs)))
            return [y for y in results if _jax.inexact(y)]

        varied = [xs[i] for i in which]
        if equation.primitive is primitives.custom_jvp_call_p:
            jax.jvp(f, varied, varied)
        else:
            results, pullback = jax.vjp(f, *varied)
            pullback(results)

    if not which:
        return False
    with core.set_current_trace(trace.parent_trace):
        try:
            return EFFECT in jax.make_jaxpr(differentiated)(*(x.aval for x in alone.invars)).effects
        except Exception:  # raised again where the function is called
            return False


# --- 3. what is divided ----------------------------------------------------------------------------------------------


def _keep(own: Callable[..., Any], trace: Any, tracers: Any, results: Any, primitive: Any, params: Any, *more: Any):
    equation = own(trace, tracers, results, primitive, params, *more)
    if EFFECT in equation.effects:
        trace.effect_handles.append(partial_eval.EffectHandle(list(tracers), equation))
    return equation


def _keep_checkpoint(own: Callable[..., Any], *args: Any) -> Any:
    """JAX drops a checkpoint that has neither operands nor results that are used, whatever its effects."""
    inputs, kept = own(*args)
    equation = args[-1]  # after which results are used and, from JAX 0.12 on, which operands are live
    if kept is None and EFFECT in equation.effects:
        return [True] * len(equation.invars), equation
    return inputs, kept


def _drop_none(own: Callable[..., Any], jaxpr: Any, *args: Any, **kwargs: Any) -> Any:
    """Sees to it that what nothing depends on is not dropped where it communicates."""
    kept, inputs = own(jaxpr, *args, **kwargs)
    if EFFECT in jaxpr.effects:
        before, after = (sum(EFFECT in equation.effects for equation in x.eqns) for x in (jaxpr, kept))
        if before != after:
            raise _refusal("a primitive that JAX leaves out where nothing depends on it")
    return kept, inputs


# --- 4. what is transposed -------------------------------------------------------------------------------------------

_cotangents: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("cotangents", default=())
"""The number that depends on all with which the transposition that is going on was started; empty outside of one."""

_solving: contextvars.ContextVar[bool] = contextvars.ContextVar("solving", default=False)
"""Whether the matrix of a linear solve is transposed, which is a value rather than a derivative."""


def zero_cotangent(like: Any) -> Any:
    """Zeros that depend on what a transposition was started with, for what has no cotangent: see `_transpose`."""
    return _link(None, _cotangents.get(), like, not _solving.get())


def _transpose_matrix(own: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    transposed = own(*args)

    def call(x):
        with _during(_solving, True):
            return transposed(x)

    return call


def _transpose(own: Callable[..., Any], jaxpr: Any, stack: Any, consts: Any, primals: Any, given: Any, **more: Any):
    """The dual of what a differentiating trace does: there each operand depends on all that comes in, here each result
    is depended on by all that goes out. So a cotangent is mapped on each rank by what maps it on any."""
    if EFFECT not in jaxpr.effects:
        return own(jaxpr, stack, consts, primals, given, **more)
    known = [x for x in given if type(x) is not _jax.ad.Zero and _jax.inexact(x)]
    zero = _link(None, known, jax.typeof(_ZERO), not _solving.get())
    arguments = zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *primals), strict=False)
    linear = {x for x, value in arguments if isinstance(value, _LINEAR)}
    linked = _with_link_of_all(jaxpr, linear)
    try:
        with _during(_cotangents, (zero,)):
            return own(linked, stack, consts, primals, [*given, zero], **more)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        of_execution = isinstance(error, jax.errors.JaxRuntimeError)
        if of_execution or str(error).startswith(_OURS) or not any(map(_is_linked_constant, jaxpr.eqns)):
            raise
        raise NotImplementedError(
            "jaxmpi: a function that communicates cannot be transposed (by jax.linear_transpose, custom_linear_solve, "
            "custom_root). If it multiplies or divides by the result of an operation on constants, compute that "
            "outside of it: operands of operations count as depending on the argument, as on other ranks they may."
        ) from error


def _is_linked_constant(equation: Any) -> bool:
    """Whether a value counts as depending on what a function is transposed with respect to: see `_leave`."""
    params = equation.params
    return equation.primitive is _link_primitive and params["own"] and not params["always"] and not params["unless"]


_OURS = ("jaxmpi", *(f"{name} " for name in OPERATIONS))
"""How the text of an error of ours begins."""

_LINEAR = tuple(getattr(private_ad, name) for name in ("UndefinedPrimal", "GradAccum") if hasattr(private_ad, name))
"""What stands for an argument in which a function is linear, while it is transposed."""


def _with_link_of_all(jaxpr: Any, linear: set[Any]) -> Any:
    """The same computation with one more result, which is linear in those of all that communicates in it; `linear` are
    its arguments in which it is."""
    linear = set(linear)
    equations, communicated = [], []
    for equation in jaxpr.eqns:
        if linear.isdisjoint(_jax.variables(equation.invars)):
            equations.append(equation)
            continue
        replacements = [equation]
        if EFFECT in equation.effects:
            outvars = [core.Var(x.aval) if isinstance(x, core.DropVar) else x for x in equation.outvars]
            replacements = _with_result(equation.replace(outvars=outvars), linear)
            communicated += [x for e in replacements for x in e.outvars if _jax.inexact(x.aval)]
        linear.update(x for e in replacements for x in e.outvars)
        equations += replacements
    result = core.Var(jax.typeof(_ZERO))
    params = {"own": False, "always": False, "unless": 0, "shape": _ZERO.shape, "dtype": _ZERO.dtype}
    link = core.new_jaxpr_eqn(communicated, [result], _link_primitive, params, set())
    return _with_results(jaxpr.replace(eqns=[*equations, link]), [result])


def _with_result(equation: Any, linear: set[Any]) -> list[Any]:
    """A nested call, branch or loop that returns a value it is linear in, too, where it returns nothing else."""
    possible = [
        i for i, x in enumerate(equation.invars) if not isinstance(x, Literal) and x in linear and _jax.inexact(x.aval)
    ]
    params = equation.params
    if any(_jax.inexact(x.aval) for x in equation.outvars) or not possible:
        return [equation]
    which = possible[0]
    if equation.primitive is primitives.scan_p:
        return _with_carry(equation, which)
    if equation.primitive in CALLS:
        name = "jaxpr" if "jaxpr" in params else "call_jaxpr"
        changed = {name: _with_output(params[name], which)}
        if "out_shardings" in params:
            changed["out_shardings"] = (*params["out_shardings"], _jax.UNSPECIFIED)
            changed["out_layouts"] = (*params["out_layouts"], None)
    elif equation.primitive is primitives.cond_p:
        changed = {"branches": tuple(_with_output(branch, which - 1) for branch in params["branches"])}
    else:
        return [equation]
    outvars = [*equation.outvars, core.Var(equation.invars[which].aval)]
    return [equation.replace(params={**params, **changed}, outvars=outvars)]


def _with_carry(equation: Any, which: int) -> list[Any]:
    """The equations of a scan that carries one more number, which is linear in operand number `which`."""

    def scan(*operands):
        more = _link(None, [operands[which]], jax.typeof(_ZERO))
        return _scan_with_carry(equation.params, more, operands)

    with _jax.without_constant_folding():
        structs = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars]
        closed = jax.make_jaxpr(scan)(*structs)
    jaxpr = getattr(closed, "jaxpr", closed)
    known = dict(zip(jaxpr.invars, equation.invars, strict=True))
    known.update(zip(jaxpr.outvars[1:], equation.outvars, strict=True))
    rename = lambda xs: [x if isinstance(x, Literal) else known.get(x, x) for x in xs]  # noqa: E731
    return [e.replace(invars=rename(e.invars), outvars=rename(e.outvars)) for e in jaxpr.eqns]


def _scan_with_carry(params: Params, more: Any, operands: Sequence[Any]) -> list[Any]:
    """A scan with these parameters that carries one more number: that, and its own results."""
    constants, carried = _jax.parts_of_scan(params)
    consts, init, xs = (
        operands[:constants],
        operands[constants : constants + carried],
        operands[constants + carried :],
    )

    def step(carry, x):
        # JAX orders constants by their first use, and makes one of a carried value that it sees to be handed on.
        changed, *same = [_link(value, [], jax.typeof(value)) for value in (carry[0], *consts)]
        result = _jax.evaluate(params["jaxpr"], *same, *carry[1:], *x)
        return [changed, *result[:carried]], result[carried:]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(step, [more, *init], list(xs), **options)
    return [*carry, *ys]


def _with_output(jaxpr: Any, which: int) -> Any:
    """A jaxpr that returns one of its arguments, too."""
    if hasattr(jaxpr, "jaxpr") and jaxpr.jaxpr is not jaxpr:
        return jaxpr.replace(jaxpr=_with_output(jaxpr.jaxpr, which))
    return _with_results(jaxpr, [jaxpr.invars[which]])


def _with_results(jaxpr: Any, more: Sequence[Any]) -> Any:
    names = jaxpr.debug_info._replace(result_paths=("",) * (len(jaxpr.outvars) + len(more)))
    return jaxpr.replace(outvars=[*jaxpr.outvars, *more], debug_info=names)


# --- 5. what is not known because its operands are -------------------------------------------------------------------

_HOISTING, _TRANSPOSING = "hoisting", "transposing"
_purpose: contextvars.ContextVar[str | None] = contextvars.ContextVar("purpose", default=None)
_PURPOSE = "jaxmpi_purpose"
"""Attribute of a trace: what it divides for, where that is not a derivative, and for a transposition the values that
are unknown. These refer to the trace, so it is kept nowhere else."""


def _divide(own: Callable[..., Any], function: Any, values: Sequence[Any], instantiate: Any = False) -> Any:
    """JAX divides by this function for two purposes, which it does not tell: see `_contract`."""
    transposing = instantiate is True and not any(value.is_known() for value in values)
    with _during(_purpose, _TRANSPOSING if transposing else _HOISTING):
        return own(function, values, instantiate)


def _divide_checkpointed_scan(own: Callable[..., Any], *args: Any) -> Any:
    with _during(_purpose, _HOISTING):
        return own(*args)


def _begin_to_divide(own: Callable[..., None], trace: Any, *args: Any) -> None:
    own(trace, *args)
    if (purpose := _purpose.get()) is not None:
        setattr(trace, _PURPOSE, (purpose, []))
        if purpose == _TRANSPOSING:
            _purpose.set(None)  # of this trace alone


def _begin_argument(own: Callable[..., Any], trace: Any, value: Any) -> Any:
    tracer = own(trace, value)
    purpose, inputs = getattr(trace, _PURPOSE, (None, []))
    if purpose == _TRANSPOSING and not tracer.is_known() and _jax.inexact(tracer):
        inputs.append(tracer)
    return tracer


def _leave(own: Callable[..., Any], trace: Any, primitive: Any, tracers: Sequence[Any], params: Params) -> Any:
    if not hasattr(trace, _PURPOSE) or not (
        _is_ours(primitive) or communicates(params) or _hidden.communicates(primitive, tracers, params)
    ):
        return own(trace, primitive, tracers, params)
    purpose, inputs = getattr(trace, _PURPOSE)
    tracers = [trace.to_jaxpr_tracer(x) for x in tracers]
    if purpose == _HOISTING:
        return _stage(trace, primitive, tracers, params)
    if primitive in CALLS:
        with core.set_current_trace(trace):
            return _jax.evaluate(_jax.called(params), *tracers)
    if _is_ours(primitive):
        possible = [i for i, x in enumerate(tracers) if _jax.inexact(x)]
        if possible and inputs and all(tracers[i].is_known() for i in possible):
            with core.set_current_trace(trace):
                tracers[possible[0]] = _link(tracers[possible[0]], inputs, tracers[possible[0]].aval)
    else:
        _Dependence.of_equation(primitive, params, [not x.is_known() for x in tracers])
    return own(trace, primitive, tracers, params)


def _leave_custom(
    own: Callable[..., Any], trace: Any, primitive: Any, function: Any, *more: Any, **options: Any
) -> Any:
    if hasattr(trace, _PURPOSE):
        tracers = next(x for x in more if isinstance(x, (list, tuple)))
        if _communicates_when_called(function, [jax.typeof(x) for x in tracers]):
            with core.set_current_trace(trace):
                return function.call_wrapped(*tracers)
    return own(trace, primitive, function, *more, **options)


def _stage(trace: Any, primitive: Any, tracers: Sequence[Any], params: Params) -> list[Any]:
    """Leaves an equation to the part that is executed later, whatever is known of its operands."""
    if tracers:
        return trace.default_process_primitive(primitive, [trace.instantiate_const(x) for x in tracers], params)
    avals, effects = primitive.abstract_eval(**params)
    results = [partial_eval.JaxprTracer(trace, partial_eval.PartialVal.unknown(aval), None) for aval in avals]
    source = _jax.current_source()
    equation = partial_eval.new_eqn_recipe(trace, [], results, primitive, params, effects, source)
    for result in results:
        result.recipe = equation
    return results


CALLS = (primitives.closed_call_p, ad_checkpoint.remat_p, _jax.jit_p)


class _Dependence:
    """Which values of a linear computation depend on its argument; refuses an operation that does not.

    It would be executed where others are transposed, and their messages meet.
    """

    @classmethod
    def of_jaxpr(cls, jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        depends = dict(zip(inner.invars, inputs, strict=True))
        for equation in inner.eqns:
            given = [not isinstance(x, Literal) and depends.get(x, False) for x in equation.invars]
            if _is_ours(equation.primitive):
                cls._refuse_constant(equation, given)
                results = [any(given)] * len(equation.outvars)
            elif communicates(equation.params):
                results = cls.of_equation(equation.primitive, equation.params, given)
            else:
                results = [any(given)] * len(equation.outvars)
            depends.update(zip(equation.outvars, results, strict=True))
        return [not isinstance(x, Literal) and depends.get(x, False) for x in inner.outvars]

    @classmethod
    def of_equation(cls, primitive: Any, params: Params, given: Sequence[bool]) -> list[bool]:
        given = list(given)
        if primitive in CALLS:
            return cls.of_jaxpr(_jax.called(params), given)
        if primitive is primitives.cond_p:
            branches = [cls.of_jaxpr(branch, given[1:]) for branch in params["branches"]]
            return [any(result) for result in zip(*branches, strict=True)]
        if primitive is primitives.scan_p:
            constants, carried = _jax.parts_of_scan(params)
            return cls._of_loop(params["jaxpr"], given, constants, carried)
        if primitive is primitives.while_p:
            return cls._of_loop(params["body_jaxpr"], given[params["cond_nconsts"] :], params["body_nconsts"], None)
        raise NotImplementedError(
            f"jaxmpi: what communicates in {primitive.name} cannot be transposed by jax.linear_transpose (or by "
            "custom_linear_solve without symmetric=True). Communicate outside of it."
        )

    @classmethod
    def _of_loop(cls, jaxpr: Any, given: list[bool], constants: int, carried: int | None) -> list[bool]:
        carried = len(given) - constants if carried is None else carried
        while True:
            results = cls.of_jaxpr(jaxpr, given)
            carry = [a or b for a, b in zip(given[constants:], results[:carried], strict=False)]
            if carry == given[constants : constants + carried]:
                return results
            given[constants : constants + carried] = carry

    @staticmethod
    def _refuse_constant(equation: Any, given: Sequence[bool]) -> None:
        if not any(given) and any(_jax.inexact(x.aval) for x in equation.invars):
            raise NotImplementedError(
                f"{equation.primitive.name} cannot be transposed (by jax.linear_transpose or custom_linear_solve): its "
                "operand is a constant on this rank. Let it depend on the function's argument, 0 * x for example."
            )


# --- the places ------------------------------------------------------------------------------------------------------

_BACKWARD = "backward_pass3" if hasattr(private_ad, "backward_pass3") else "backward_pass"  # the latter in JAX 0.7
_JVP, _LINEARIZE, _DIVIDE = private_ad.JVPTrace, private_ad.LinearizeTrace, partial_eval.JaxprTrace
_PRIMITIVE = "self primitive tracers params or self primitive args params"
_CUSTOM_JVP = "self primitive fun jvp tracers symbolic_zeros or self prim fun f_jvp tracers symbolic_zeros"
_CUSTOM_VJP = (
    "self primitive fun fwd bwd tracers out_trees symbolic_zeros or "
    "self prim fun fwd bwd tracers out_trees symbolic_zeros"
)
HOOKS = (
    (private_ad.JVPTracer, "__init__", "self trace primal tangent", _begin),
    (private_ad.LinearizeTracer, "__init__", "self trace primal tangent", _begin),
    (_JVP, "process_primitive", _PRIMITIVE, _differentiate),
    (_LINEARIZE, "process_primitive", _PRIMITIVE, _differentiate),
    (_JVP, "process_custom_jvp_call", _CUSTOM_JVP, _differentiate_custom_jvp),
    (_LINEARIZE, "process_custom_jvp_call", _CUSTOM_JVP, _differentiate_custom_jvp),
    (_JVP, "process_custom_vjp_call", _CUSTOM_VJP, _differentiate_custom_vjp),
    (_LINEARIZE, "process_custom_vjp_call", _CUSTOM_VJP, _differentiate_custom_vjp),
    (
        partial_eval,
        "new_eqn_recipe",
        "trace in_tracers out_tracers primitive params effects source_info ctx",
        _keep,
    ),
    (
        partial_eval,
        "dce_jaxpr",
        "jaxpr used_outputs instantiate or jaxpr used_outputs instantiate live_inputs",
        _drop_none,
    ),
    (private_ad, _BACKWARD, "jaxpr transform_stack consts primals_in cotangents_in", _transpose),
    (solves, "_transpose_one_output", "linear_fun primals", _transpose_matrix),
    (partial_eval, "trace_to_jaxpr_nounits", "fun pvals instantiate", _divide),
    (_DIVIDE, "__init__", "self parent_trace name_stack tag", _begin_to_divide),
    (_DIVIDE, "new_arg", "self pval", _begin_argument),
    (_DIVIDE, "process_primitive", _PRIMITIVE, _leave),
    (_DIVIDE, "process_custom_jvp_call", "self prim fun jvp tracers symbolic_zeros", _leave_custom),
    (_DIVIDE, "process_custom_vjp_call", "self prim f fwd bwd tracers out_trees symbolic_zeros", _leave_custom),
    *([(ad_checkpoint.RematTraced, "__call__", "self args", _checkpoint)] if HAS_NEWER_CHECKPOINT else []),
)
_REFUSALS = tuple((trace, "process_primitive", _PRIMITIVE, _refuse_old) for trace in (_JVP, _LINEARIZE, _DIVIDE))

"""What derivatives assume about the inside of JAX, each assumption broken on purpose: an error is due, never a number.

JAX is changed in this process, as a newer version might be, and put back. Nothing is sent but to this rank itself.
"""

import inspect
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest
from jax._src import ad_checkpoint
from jax._src.interpreters import ad as private_ad
from jax._src.interpreters import partial_eval
from jax.extend.core import primitives
from mpi4py import MPI

from jaxmpi import _contract, notoken
from jaxmpi._derivatives import higher_order, hooks
from jaxmpi._jax import internals

pytestmark = pytest.mark.one_rank
needs_derivatives = pytest.mark.skipif(not internals.KEEPS_EFFECTS, reason="no derivatives with this JAX")
TRIED = f"JAX 0.6.0 to {internals.NEWEST_TRIED}"
HOOKS = hooks.HOOKS if internals.KEEPS_EFFECTS else hooks._REFUSALS
REPORT = (partial_eval, "_cached_abstract_eval", "", lambda own, *args, **params: own(*args, **params))
FUNCTIONS = [*HOOKS, REPORT] if internals.KEEPS_EFFECTS else HOOKS
RULES = {
    "scan in a checkpoint": (partial_eval.partial_eval_jaxpr_custom_rules, primitives.scan_p),
    "checkpoint that is not used": (partial_eval.dce_rules, ad_checkpoint.remat_p),
}

REPORTS = {"custom_vjp backwards": private_ad.custom_lin_p}
if higher_order._OBJECTS:
    REPORTS["custom_root"] = internals.hijax.call_hi_primitive_linearized_p


def name_of(hook):
    return f"{hook[0].__name__.rpartition('.')[2]}.{hook[1]}"


each_hook = pytest.mark.parametrize("hook", HOOKS, ids=map(name_of, HOOKS))
each_function = pytest.mark.parametrize("hook", FUNCTIONS, ids=map(name_of, FUNCTIONS))


def broken():
    """What the check finds, without a derivative."""
    progress, _contract._state.progress = _contract._state.progress, _contract.Progress.TESTING
    try:
        with internals.no_trace(), jax.disable_jit(False):
            return _contract.broken()
    finally:
        _contract._state.progress = progress


@pytest.fixture
def unchecked(monkeypatch):
    """As in a process that has not taken a derivative yet."""
    monkeypatch.setattr(_contract, "_state", _contract.State())
    return _contract._state


@pytest.fixture
def myself():
    """A communicator of this rank alone, on which nothing may be left."""
    comm = MPI.COMM_SELF.Dup()
    yield comm
    assert not comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
    comm.Free()


def sending(comm):
    """A function that sends at once what it is given, and receives nothing."""

    def f(x):
        notoken.send(3 * x, 0, tag=1, comm=comm)
        return x * x

    return f


DERIVATIVES = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "vjp": lambda f, x: jax.vjp(f, x),
    "linearize": lambda f, x: jax.linearize(f, x),
    "grad-jit": lambda f, x: jax.jit(jax.grad(f))(x),
    "grad-of-jit": lambda f, x: jax.grad(jax.jit(f))(x),
    "hessian": lambda f, x: jax.hessian(f)(x),
    "checkpoint": lambda f, x: jax.grad(jax.checkpoint(f))(x),
}


def assert_refused(comm):
    """Derivatives are errors that say of which JAX, and which would do; nothing is sent."""
    for name, derivative in DERIVATIVES.items():
        with pytest.raises(NotImplementedError) as error:
            derivative(sending(comm), 2.0)
        assert f"JAX {jax.__version__} does not keep to" in str(error.value), name
        assert TRIED in str(error.value), name
        assert not comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG), name


# --- at import -------------------------------------------------------------------------------------------------------


@each_function
def test_function_that_is_missing(hook, monkeypatch):
    """In the class and in those it inherits from: then it has, if anything, a method that every object has."""
    owner, name, parameters, instead = hook
    owners = [x for x in getattr(owner, "__mro__", [owner]) if x is not object and name in vars(x)]
    for x in owners:
        monkeypatch.delattr(x, name)
    with pytest.raises(ImportError, match=f"there is no .*{name} in JAX|{name} of JAX .* takes") as error:
        internals.replace(owner, name, parameters, instead)
    assert TRIED in str(error.value)
    assert name not in vars(owner)


@needs_derivatives
@each_hook
def test_method_that_is_only_inherited(hook, monkeypatch, unchecked, myself):
    owner, name, parameters, instead = hook
    call = getattr(owner, name)
    if not inspect.isclass(owner) or any(vars(x).get(name) is call.jaxmpi_own for x in owner.__mro__[1:]):
        pytest.skip("not a method of its own")
    monkeypatch.setattr(owner, name, call)  # which is put back, whatever comes
    delattr(owner, name)
    try:
        internals.replace(owner, name, parameters, instead)
    except ImportError:
        return
    if name == "process_call":  # what communicates is not passed on to JAX's own
        assert broken() is None
        return
    assert broken() is not None
    for derivative in DERIVATIVES.values():
        with pytest.raises(NotImplementedError):  # of ours, or of JAX, which says that it must be overridden
            derivative(sending(myself), 2.0)


@each_hook
@pytest.mark.parametrize("kind", ["more", "fewer", "renamed"])
def test_function_that_takes_something_else(hook, kind, monkeypatch):
    owner, name, parameters, instead = hook
    names = list(inspect.signature(getattr(owner, name)).parameters)
    changed = {"more": [*names, "novel"], "fewer": names[:-1], "renamed": [*names[:-1], "novel"]}[kind]
    if " ".join(changed) in parameters.split(" or "):
        pytest.skip("as in another version of JAX")
    scope = {}
    exec(f"def other({', '.join(changed)}): raise AssertionError", scope)
    monkeypatch.setattr(owner, name, scope["other"])
    with pytest.raises(ImportError, match=f"{name} of JAX .* takes") as error:
        internals.replace(owner, name, parameters, instead)
    assert TRIED in str(error.value)
    assert getattr(owner, name) is scope["other"]


@each_function
def test_package_that_is_imported_once_more(hook, monkeypatch):
    """The function of JAX is replaced anew, not what stands in its place."""
    owner, name, parameters, instead = hook
    before = getattr(owner, name)
    if not hasattr(before, "jaxmpi_own"):
        pytest.skip("not replaced with this JAX")
    monkeypatch.setattr(owner, name, before)
    internals.replace(owner, name, parameters, instead)
    assert getattr(owner, name) is not before
    assert getattr(owner, name).jaxmpi_own is before.jaxmpi_own


def test_numbers_of_versions():
    ordered = ["0.6.0", "0.10.2", "0.12.0", "0.12.0.1", "0.12.1.dev20260101+g12345", "0.13.0", "1.0"]
    assert sorted(reversed(ordered), key=internals.numbers) == ordered
    assert internals.numbers("0.12.1.dev20260101+g12345") == (0, 12, 1)


@pytest.mark.launches
@pytest.mark.parametrize(("version", "count"), [(internals.NEWEST_TRIED, 0), ("99.0.1", 1)])
def test_newer_version_is_one_warning(version, count):
    code = (
        "import warnings, jax\n"
        f"jax.__version__ = {version!r}\n"
        "with warnings.catch_warnings(record=True) as given:\n"
        "    warnings.simplefilter('always')\n"
        "    import jaxmpi\n"
        "    import jaxmpi.notoken\n"
        "for warning in given:\n"
        "    if 'jaxmpi was tried' in str(warning.message):\n"
        "        print(warning.category.__name__, warning.message)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True, timeout=60, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == count, done.stdout
    for line in lines:
        assert line.startswith(
            f"RuntimeWarning jaxmpi was tried on JAX up to {internals.NEWEST_TRIED}, this is {version}"
        )


# --- before the first derivative -------------------------------------------------------------------------------------


@needs_derivatives
def test_this_version_of_jax_keeps_to_all(unchecked):
    begin = time.process_time()
    assert broken() is None
    assert time.process_time() - begin < 6  # seconds of this process, usually 0.3


@needs_derivatives
@each_hook
def test_function_that_is_not_called(hook, monkeypatch, unchecked, myself):
    owner, name, *_ = hook
    monkeypatch.setattr(owner, name, getattr(owner, name).jaxmpi_own)
    assert broken() is not None
    assert_refused(myself)
    assert "expected" in unchecked.broken


@needs_derivatives
def test_abstract_evaluation_that_is_not_called(monkeypatch, unchecked, myself):
    monkeypatch.setattr(partial_eval, "_cached_abstract_eval", partial_eval._cached_abstract_eval.jaxmpi_own)
    assert "a primitive of another library" in broken()
    assert_refused(myself)


@needs_derivatives
@pytest.mark.parametrize("which", RULES)
def test_rule_that_is_not_called(which, monkeypatch, unchecked, myself):
    rules, primitive = RULES[which]
    monkeypatch.setitem(rules, primitive, rules[primitive].jaxmpi_own)
    if rules is partial_eval.dce_rules and internals.numbers(jax.__version__) >= (0, 12):
        assert broken() is None  # there JAX keeps such checkpoints by itself
        return
    assert broken() is not None
    assert_refused(myself)


@needs_derivatives
@pytest.mark.parametrize("which", REPORTS)
def test_primitive_that_does_not_say_that_it_communicates(which, monkeypatch, unchecked, myself):
    primitive = REPORTS[which]
    monkeypatch.setattr(primitive, "abstract_eval", primitive.abstract_eval.jaxmpi_own)
    assert broken() is not None
    assert_refused(myself)


@needs_derivatives
@pytest.mark.parametrize("assumption", _contract.ASSUMPTIONS, ids=lambda assumption: assumption.what)
@pytest.mark.parametrize("kind", ["missing", "error"])
def test_each_assumption_counts(assumption, kind, monkeypatch, unchecked, myself):
    def fails():
        raise TypeError("something of JAX has changed")

    computation = fails if kind == "error" else lambda: jax.make_jaxpr(lambda x: x)(1.0)
    changed = _contract.Assumption(assumption.what, computation, assumption.expected)
    assert assumption.expected
    monkeypatch.setattr(_contract, "ASSUMPTIONS", [changed])
    with pytest.raises(NotImplementedError) as error:
        jax.grad(sending(myself))(2.0)
    assert assumption.what in str(error.value)
    assert TRIED in str(error.value)


@needs_derivatives
def test_refusal_stays_and_functions_go_on(monkeypatch, unchecked, myself):
    """What is not differentiated works; a derivative is an error each time, also after an error of another kind."""
    owner, name, *_ = HOOKS[2]
    with monkeypatch.context() as context:
        context.setattr(owner, name, getattr(owner, name).jaxmpi_own)
        assert_refused(myself)
    assert_refused(myself)
    assert jax.jit(lambda x: notoken.bcast(x, 0, comm=myself))(2.0) == 2
    assert jax.grad(lambda x: x * x)(2.0) == 4


def counted(monkeypatch):
    calls = []
    first = _contract.ASSUMPTIONS[0]
    counting = _contract.Assumption(first.what, lambda: calls.append(1) or first.computation(), first.expected)
    monkeypatch.setattr(_contract, "ASSUMPTIONS", [counting, *_contract.ASSUMPTIONS[1:]])
    return calls


def of_square(x, comm):
    return notoken.bcast(x, 0, comm=comm) * x


def within(context, f, x):
    with context:
        return jax.grad(f)(x)


FIRST = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (1.0,))[1],
    "grad": lambda f, x: jax.grad(f)(x),
    "disable_jit": lambda f, x: within(jax.disable_jit(), f, x),
    "jit": lambda f, x: jax.jit(jax.grad(f))(x),
    "vmap": lambda f, x: jax.vmap(jax.grad(f))(jnp.stack([x, x]))[1],
    "vmap-jit": lambda f, x: jax.jit(jax.vmap(jax.grad(f)))(jnp.stack([x, x]))[1],
    "another-jvp": lambda f, x: jax.jvp(lambda y: y * jax.grad(f)(x), (1.0,), (1.0,))[1],
    "scan": lambda f, x: jax.lax.scan(lambda c, _: (jax.grad(f)(x), None), x, None, length=2)[0],
    "compile-time": lambda f, x: within(jax.ensure_compile_time_eval(), f, x),
    "strict": lambda f, x: within(jax.numpy_dtype_promotion("strict"), f, x),
    "leaks-checked": lambda f, x: within(jax.checking_leaks(), f, x),
}


@needs_derivatives
@pytest.mark.parametrize("first", FIRST)
def test_checked_once_and_in_whatever(first, monkeypatch, unchecked, myself):
    calls = counted(monkeypatch)
    for times in range(2):
        assert FIRST[first](lambda x: of_square(x, myself), jnp.array(3.0)) == 6, times
        assert unchecked == _contract.State(_contract.Progress.TESTED)
        assert len(calls) == 1


def test_what_does_not_communicate_is_still_left_out():
    """A checkpoint that nothing uses, by itself, in another and in a loop."""

    def f(x):
        jax.checkpoint(jnp.sin)(x)
        return x * x

    closed = jax.make_jaxpr(f)(1.0)
    kept = partial_eval.dce_jaxpr(getattr(closed, "jaxpr", closed), [True])[0]
    assert [equation.primitive.name for equation in kept.eqns] == ["mul"]
    step = lambda c, _: (f(c), jax.checkpoint(f)(c))  # noqa: E731
    loop = lambda x: jax.lax.scan(step, x, None, length=2)[0]  # noqa: E731
    for function, derivative in ((f, 4.0), (jax.checkpoint(f), 4.0), (loop, 32.0), (jax.checkpoint(loop), 32.0)):
        assert jax.grad(function)(2.0) == derivative
        assert jax.jit(jax.grad(function))(2.0) == derivative


@needs_derivatives
def test_function_without_communication_is_not_held_up(monkeypatch, unchecked):
    calls = counted(monkeypatch)
    assert jax.jit(jax.grad(lambda x: x**3))(2.0) == 12
    assert not calls
    assert unchecked.progress is _contract.Progress.UNTESTED


# --- JAX 0.6 ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(internals.KEEPS_EFFECTS, reason="this JAX has derivatives")
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_derivatives_are_refused(derivative, myself):
    with pytest.raises(NotImplementedError, match=r"need JAX 0\.7 or newer"):
        DERIVATIVES[derivative](sending(myself), 2.0)

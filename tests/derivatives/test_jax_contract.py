"""What derivatives assume about the inside of JAX, each assumption broken on purpose: an error is due, never a number.

JAX is changed in this process, as a newer version might be, and put back. Nothing is sent but to this rank itself.
"""

import contextlib
import inspect
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax._src import ad_checkpoint
from jax._src.interpreters import ad as private_ad
from jax._src.interpreters import partial_eval
from jax.extend.core import primitives
from mpi4py import MPI

import jaxmpi
from jaxmpi import _contract
from jaxmpi._derivatives import higher_order, hooks
from jaxmpi._jax import internals
from support.launch import launch
from support.rows import row_by_row

pytestmark = pytest.mark.alone
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


of_hooks = row_by_row("hook", HOOKS, name_of)
of_functions = row_by_row("hook", FUNCTIONS, name_of)


def broken():
    """What the check finds, without a derivative."""
    tested, _contract._state.tested = _contract._state.tested, True
    try:
        with internals.no_trace(), jax.disable_jit(False):
            return _contract.broken()
    finally:
        _contract._state.tested = tested


@pytest.fixture
def changed(monkeypatch):
    """JAX may be changed within, in a process that has not taken a derivative yet."""

    @contextlib.contextmanager
    def change():
        with monkeypatch.context() as patch:
            patch.setattr(_contract, "_state", _contract.State())
            yield patch

    return change


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
        jaxmpi.send(3 * x, 0, tag=1, comm=comm)
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


def assert_refused(comm, names=("grad-of-jit",)):
    """Derivatives are errors that say of which JAX, and which would do; nothing is sent."""
    for name in names:
        with pytest.raises(NotImplementedError) as error:
            DERIVATIVES[name](sending(comm), 2.0)
        assert f"JAX {jax.__version__} breaks an assumption" in str(error.value), name
        assert TRIED in str(error.value), name
        assert not comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG), name


# --- at import -------------------------------------------------------------------------------------------------------


@of_functions
def test_function_that_is_missing(hook, changed):
    """In the class and in those it inherits from: then it has, if anything, a method that every object has."""
    owner, name, parameters, instead = hook
    with changed() as patch:
        for x in [x for x in getattr(owner, "__mro__", [owner]) if x is not object and name in vars(x)]:
            patch.delattr(x, name)
        with pytest.raises(ImportError, match=f"there is no .*{name} in JAX|{name} of JAX .* takes") as error:
            internals.replace(owner, name, parameters, instead)
        assert TRIED in str(error.value)
        assert name not in vars(owner)


@needs_derivatives
@of_hooks
def test_method_that_is_only_inherited(hook, changed, myself):
    owner, name, parameters, instead = hook
    call = getattr(owner, name)
    if not inspect.isclass(owner) or any(vars(x).get(name) is call.jaxmpi_own for x in owner.__mro__[1:]):
        return  # not a method of its own
    with changed() as patch:
        patch.setattr(owner, name, call)  # which is put back, whatever comes
        delattr(owner, name)
        try:
            internals.replace(owner, name, parameters, instead)
        except ImportError:
            return
        if name == "process_call":  # what communicates is not passed on to JAX's own
            assert broken() is None
            return
        for how in ("jvp", "grad-of-jit"):
            with pytest.raises(NotImplementedError):  # of ours, or of JAX, which says that it must be overridden
                DERIVATIVES[how](sending(myself), 2.0)


@row_by_row("row", itertools.product(HOOKS, ("more", "fewer", "renamed")), lambda row: f"{name_of(row[0])} {row[1]}")
def test_function_that_takes_something_else(row, changed):
    (owner, name, parameters, instead), kind = row
    names = list(inspect.signature(getattr(owner, name)).parameters)
    others = {"more": [*names, "novel"], "fewer": names[:-1], "renamed": [*names[:-1], "novel"]}[kind]
    if " ".join(others) in parameters.split(" or "):
        return  # as in another version of JAX
    scope = {}
    exec(f"def other({', '.join(others)}): raise AssertionError", scope)
    with changed() as patch:
        patch.setattr(owner, name, scope["other"])
        with pytest.raises(ImportError, match=f"{name} of JAX .* takes") as error:
            internals.replace(owner, name, parameters, instead)
        assert TRIED in str(error.value)
        assert getattr(owner, name) is scope["other"]


@of_functions
def test_package_that_is_imported_once_more(hook, changed):
    """The function of JAX is replaced anew, not what stands in its place."""
    owner, name, parameters, instead = hook
    before = getattr(owner, name)
    if not hasattr(before, "jaxmpi_own"):
        return  # not replaced with this JAX
    with changed() as patch:
        patch.setattr(owner, name, before)
        internals.replace(owner, name, parameters, instead)
        assert getattr(owner, name) is not before
        assert getattr(owner, name).jaxmpi_own is before.jaxmpi_own


def test_numbers_of_versions():
    ordered = ["0.6.0", "0.10.2", "0.12.0", "0.12.0.1", "0.12.1.dev20260101+g12345", "0.13.0", "1.0"]
    assert sorted(reversed(ordered), key=internals.numbers) == ordered
    assert internals.numbers("0.12.1.dev20260101+g12345") == (0, 12, 1)


@pytest.mark.nightly
@pytest.mark.parametrize(("version", "count"), [("99.0.1", 1), (internals.NEWEST_TRIED, 0)])
def test_newer_version_is_one_warning(version, count):
    code = f"""if True:
        import warnings, jax
        jax.__version__ = {version!r}
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            import jaxmpi
        for warning in given: print(warning.category.__name__, warning.message)
    """
    told = launch(0, "-c", code).stdout
    assert told.count("jaxmpi was tried") == count
    expected = f"RuntimeWarning jaxmpi was tried on JAX up to {internals.NEWEST_TRIED}, this is {version}"
    assert (expected in told) == bool(count)


# --- before the first derivative -------------------------------------------------------------------------------------


@needs_derivatives
def test_this_version_of_jax_keeps_to_all(changed):
    with changed():
        assert broken() is None


@needs_derivatives
@of_hooks
def test_function_that_is_not_called(hook, changed, myself):
    owner, name, *_ = hook
    with changed() as patch:
        patch.setattr(owner, name, getattr(owner, name).jaxmpi_own)
        assert_refused(myself)
        assert "expected" in _contract._state.broken


@needs_derivatives
def test_abstract_evaluation_that_is_not_called(changed, myself):
    with changed() as patch:
        patch.setattr(partial_eval, "_cached_abstract_eval", partial_eval._cached_abstract_eval.jaxmpi_own)
        assert "a primitive of another library" in broken()
        assert_refused(myself, DERIVATIVES)


@needs_derivatives
@row_by_row("name", RULES)
def test_rule_that_is_not_called(name, changed, myself):
    table, primitive = RULES[name]
    with changed() as patch:
        patch.setitem(table, primitive, table[primitive].jaxmpi_own)
        if table is partial_eval.dce_rules and internals.numbers(jax.__version__) >= (0, 12):
            assert broken() is None  # there JAX keeps such checkpoints by itself
        else:
            assert_refused(myself)


@needs_derivatives
@row_by_row("name", REPORTS)
def test_primitive_that_does_not_say_that_it_communicates(name, changed, myself):
    primitive = REPORTS[name]
    with changed() as patch:
        patch.setattr(primitive, "abstract_eval", primitive.abstract_eval.jaxmpi_own)
        assert_refused(myself)


@needs_derivatives
@row_by_row("assumption", _contract.ASSUMPTIONS, lambda assumption: assumption.what)
def test_each_assumption_counts(assumption, changed, myself):
    def fails():
        raise TypeError("something of JAX has changed")

    assert assumption.expected
    for computation in (fails, lambda: jax.make_jaxpr(lambda x: x)(1.0)):
        other = _contract.Assumption(assumption.what, computation, assumption.expected)
        with changed() as patch:
            patch.setattr(_contract, "ASSUMPTIONS", [other])
            with pytest.raises(NotImplementedError) as error:
                jax.grad(sending(myself))(2.0)
            assert assumption.what in str(error.value)
            assert TRIED in str(error.value)


@needs_derivatives
def test_refusal_stays_and_functions_go_on(changed, myself):
    """What is not differentiated works; a derivative is an error each time, also after an error of another kind."""
    owner, name, *_ = HOOKS[2]
    with changed() as patch:
        with patch.context() as context:
            context.setattr(owner, name, getattr(owner, name).jaxmpi_own)
            assert_refused(myself, DERIVATIVES)
        assert_refused(myself, DERIVATIVES)
        assert jax.jit(lambda x: jaxmpi.bcast(x, 0, comm=myself))(2.0) == 2
        assert jax.grad(lambda x: x * x)(2.0) == 4


def counted(patch):
    calls = []
    first = _contract.ASSUMPTIONS[0]
    counting = _contract.Assumption(first.what, lambda: calls.append(1) or first.computation(), first.expected)
    patch.setattr(_contract, "ASSUMPTIONS", [counting, *_contract.ASSUMPTIONS[1:]])
    return calls


def of_square(x, comm):
    return jaxmpi.bcast(x, 0, comm=comm) * x


def within(context, f, x):
    with context:
        return jax.grad(f)(x)


FIRST = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (1.0,))[1],
    "disable_jit": lambda f, x: within(jax.disable_jit(), f, x),
    "jit": lambda f, x: jax.jit(jax.grad(f))(x),
    "vmap-jit": lambda f, x: jax.jit(jax.vmap(jax.grad(f)))(jnp.stack([x, x]))[1],
    "another-jvp": lambda f, x: jax.jvp(lambda y: y * jax.grad(f)(x), (1.0,), (1.0,))[1],
    "scan": lambda f, x: jax.lax.scan(lambda c, _: (jax.grad(f)(x), None), x, None, length=2)[0],
    "compile-time": lambda f, x: within(jax.ensure_compile_time_eval(), f, x),
    "strict": lambda f, x: within(jax.numpy_dtype_promotion("strict"), f, x),
    "leaks-checked": lambda f, x: within(jax.checking_leaks(), f, x),
}


@needs_derivatives
@row_by_row("name", FIRST)
def test_checked_once_and_in_whatever(name, changed, myself):
    with changed() as patch:
        calls = counted(patch)
        for times in range(2):
            assert FIRST[name](lambda x: of_square(x, myself), jnp.array(3.0)) == 6, times
            assert _contract._state == _contract.State(tested=True)
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
def test_function_without_communication_is_not_held_up(changed):
    with changed() as patch:
        calls = counted(patch)
        assert jax.jit(jax.grad(lambda x: x**3))(2.0) == 12
        assert not calls
        assert not _contract._state.tested


# --- JAX 0.6 ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(internals.KEEPS_EFFECTS, reason="this JAX has derivatives")
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_derivatives_are_refused(derivative, myself):
    with pytest.raises(NotImplementedError, match=r"need JAX 0\.7 or newer"):
        DERIVATIVES[derivative](sending(myself), 2.0)

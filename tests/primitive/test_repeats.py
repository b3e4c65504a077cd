"""What JAX executes a second time, on one rank alone, communicates once: with jax_debug_nans and jax_debug_infs JAX
repeats a function whose result is NaN. With `checkify` it evaluates the condition of a loop twice, on all ranks."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify
from mpi4py import MPI

import jaxmpi

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size

KINDS = {
    "jax.jit": jax.jit,
    "jaxmpi.jit": jaxmpi.jit,
    "nested": lambda f: jax.jit(lambda *xs: jax.jit(f)(*xs)),
    "around scan": lambda f: jax.jit(lambda *xs: jax.lax.scan(lambda c, _: (f(*xs), None), f(*xs), None, length=2)[0]),
    "eager": lambda f: f,
}


@contextlib.contextmanager
def checked(option):
    jax.config.update(option, True)
    try:
        yield
    finally:
        jax.config.update(option, False)


def _in_step(comm=None):
    """The ranks still meet in the same operations: a collective, and a message around the ring."""
    total = jaxmpi.allreduce(jnp.float32(2.0**RANK), MPI.SUM, comm=comm)
    assert float(total) == 2**SIZE - 1
    left = jaxmpi.sendrecv(jnp.int32(RANK), jnp.int32(0), (RANK - 1) % SIZE, (RANK + 1) % SIZE, comm=comm)
    assert int(left) == (RANK - 1) % SIZE


def _outcome(f, *args):
    try:
        jax.block_until_ready(f(*args))
    except FloatingPointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", ["jax_debug_nans", "jax_debug_infs"])
def test_nan_behind_an_operation(kind, option):
    """The NaN of one rank is an error there; nothing is sent again, and the other ranks do not notice."""
    f = KINDS[kind](lambda x, bad: jnp.log(jaxmpi.allreduce(x, MPI.SUM) - bad))
    bad = SIZE + 1.0 if option == "jax_debug_nans" else SIZE
    last = RANK == SIZE - 1
    with checked(option):
        said = _outcome(f, jnp.float32(1), jnp.float32(bad if last else 0))
        assert bool(said) == last
        if last and kind != "eager":
            assert "communication is not repeated" in said
        _in_step()


@pytest.mark.parametrize("kind", KINDS)
def test_nan_before_an_operation(kind):
    """The NaN reaches all ranks, which all raise; the rank that made it is told where."""
    f = KINDS[kind](lambda x, bad: jaxmpi.allreduce(jnp.log(x - bad), MPI.SUM))
    with checked("jax_debug_nans"):
        if kind == "eager":  # raised before the operation, which the other ranks would wait in
            assert not _outcome(f, jnp.float32(1), jnp.float32(0))
        else:
            said = _outcome(f, jnp.float32(1), jnp.float32(5 if RANK == SIZE - 1 else 0))
            assert said
            assert RANK != SIZE - 1 or kind != "jax.jit" or "log" in said
        _in_step()


@pytest.mark.skipif(not hasattr(jax.lax, "axis_size") and jax.__version__.startswith("0.6"), reason="no derivatives")
@pytest.mark.parametrize("jit", ["jax.jit", "jaxmpi.jit"])
def test_nan_in_a_backward_pass(jit):
    """The gradient of sqrt at 0 is infinite on one rank, times 0 NaN."""
    inner = KINDS[jit](lambda x: jnp.sum(jnp.sqrt(jaxmpi.sendrecv(x, x, (RANK - 1) % SIZE, (RANK + 1) % SIZE)) * 0))
    x = jnp.float32([0.0 if RANK == 0 else 1.0, 4.0])
    with checked("jax_debug_nans"):
        for f in (jax.grad(inner), KINDS[jit](jax.grad(inner))):
            _outcome(f, x)
            _in_step()


def test_checkify_evaluates_a_condition_twice():
    """On all ranks alike, so the result is right."""

    def counting(x):
        return jax.lax.while_loop(lambda c: jaxmpi.allreduce(c, MPI.SUM) < 5.0 * SIZE, lambda c: c + 1, x)

    def dividing(x):
        return jax.lax.while_loop(lambda c: c < 5, lambda c: c + jaxmpi.allreduce(c / c, MPI.SUM), x)

    error, y = jax.jit(checkify.checkify(counting, errors=checkify.float_checks))(jnp.float32(1))
    error.throw()
    assert float(y) == 5
    error, y = jax.jit(checkify.checkify(dividing, errors=checkify.float_checks))(jnp.float32(1))
    error.throw()
    expected = 1.0
    while expected < 5:
        expected += SIZE
    assert float(y) == expected
    _in_step()

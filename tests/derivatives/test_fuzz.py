"""A few random programs against a witness, in this process; `make fuzz` runs as many as one likes.

A failure says seed and check: `python tests/programs/fuzz.py --documented --checks 1 --seed S --programs 1 --show`
prints the program, `--shrink S` in the place of `--seed S` makes it smaller.
"""

import random

import jax
import jax.numpy as jnp
import pytest
from mpi4py import MPI

import jaxmpi
from fuzzing import checks, programs
from fuzzing.vectors import as_rows, combine_rows, constant
from fuzzing.witness import Witness
from support.rows import one_each_time
from support.table import NEW_JAX, _accumulate

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size > 3, reason="compiles for too long on more ranks than cores")
# In JAX 0.6 a compiled function loses the effect of a function with custom_vmap inside.
KINDS = programs.KINDS if NEW_JAX else tuple(kind for kind in programs.KINDS if kind != "custom_vmap")
OPTIONS = programs.Options(KINDS, used=not NEW_JAX, documented=True)


@pytest.fixture(scope="module")
def judge():
    judge = checks.Judge()
    yield judge
    judge.comm.Free()


def judge_program(judge, seed, size, order, options):
    program = programs.generate(seed, size, options)
    (check,) = checks.choose(program, order, 1, random.Random(f"{seed} checks"))
    verdict, why = judge(program, check)
    assert verdict != "wrong", f"seed {seed} on {size} ranks, {check}: {why}"


@pytest.mark.parametrize("seed", one_each_time(range(20), 0))
def test_first_order(seed, judge, size):
    judge_program(judge, seed, size, 1, OPTIONS)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(104, 99, -1))
def test_second_order(seed, judge, size):
    judge_program(judge, seed, size, 2, OPTIONS)


@pytest.mark.parametrize("order", one_each_time([1, 2], 1))
@pytest.mark.parametrize("seed", one_each_time(range(4), 0))
def test_documented_operations_without_structure(seed, order, judge, size):
    """Without any structure, ranks that differ often."""
    judge_program(judge, seed, size, order, programs.Options((), 0.5, OPTIONS.used, documented=True))


def test_same_programs_on_all_ranks(comm, size):
    made = [programs.generate(seed, size, OPTIONS) for seed in range(20)]
    assert all(other == made for other in comm.allgather(made))
    assert made == [programs.generate(seed, size, OPTIONS) for seed in range(20)]


def test_everything_is_waited_for(size):
    """Of what programs start, as `--shrink` needs to know."""
    assert all(programs.sound(programs.generate(seed, size).body) for seed in range(200))
    body = programs.Body((programs.Comm("bcast", 0, starts=True), programs.Wait((programs.INPUTS,))), 3)
    assert programs.sound(body)
    assert not programs.sound(programs.Body(body.statements[:1], 0))
    assert not programs.sound(programs.Body((*body.statements, body.statements[1]), 0))


def test_witness(size):
    """Its operations against what is true of them."""
    xs = [constant(rank, 0) for rank in range(size)]
    witness = Witness(size)
    sums = witness.communicate(programs.Comm("scan", 0), xs)
    for rank in range(size):
        assert abs(sums[rank] - _accumulate(xs, rank)).max() < 1e-15


def all_rows(size):
    """Each rank owns two rows, and has copies of those of all others."""
    owned = tuple((2 * rank + 1, 2 * rank) for rank in range(size))
    return programs.Map(owned, tuple(tuple(range(2 * size)) for _ in range(size)))


def test_witness_of_maps(size):
    xs = [constant(rank, 0) for rank in range(size)]
    rows = [as_rows(x, size, 2 * size) for x in xs]
    exchanged, accumulated = (
        Witness(size).communicate(programs.Comm(name, 0, map=all_rows(size)), xs) for name in programs.OF_MAPS
    )
    for rank in range(size):
        own, others = rows[rank][:2], [other for other in range(size) if other != rank]
        copies = [rows[other][1 - i] for other in others for i in range(2)]
        assert jnp.allclose(exchanged[rank], combine_rows(jnp.array([*own, *copies]), size), rtol=0, atol=1e-15)
        for other in others:  # where its copies of the rows of this rank lie, in ascending order
            at = 2 + 2 * (rank if rank < other else rank - 1)
            own += rows[other][at : at + 2][::-1]
        assert jnp.allclose(accumulated[rank], combine_rows(own, size), rtol=0, atol=1e-15)


def _as_if_kept(y, x):
    """The right value, with the derivative of what is not exchanged."""
    return x + STOPPED(y - x)


STOPPED = jax.lax.stop_gradient
FAULTS = {
    "copies that are kept": ("index_exchange", "value", lambda y, x, n: x),
    "copies in another order": ("index_exchange", "value", lambda y, x, n: y.at[n:].set(y[n:][::-1])),
    "a derivative of the own rows": ("index_exchange", "vjp", lambda y, x, n: _as_if_kept(y, x)),
    "copies that are not cleared": ("index_accumulate", "value", lambda y, x, n: y.at[n:].set(x[n:])),
    "copies that are not added": ("index_accumulate", "value", lambda y, x, n: x.at[n:].set(0)),
    "a tangent of the copies": ("index_accumulate", "jvp", lambda y, x, n: _as_if_kept(y, x)),
    "rows in another order": ("migrate", "value", lambda y, x, n: jnp.roll(y[::-1], n)),
    "no derivative of rows": ("migrate", "vjp", lambda y, x, n: STOPPED(y)),
    "a block that is turned": ("redistribute", "value", lambda y, x, n: y[::-1]),
    "half a tangent": ("redistribute", "jvp", lambda y, x, n: y / 2 + STOPPED(y / 2)),
}
"""The operation, the mode that finds the fault, and what becomes of the right result `y` of `x`, whose own rows are the
first `n`."""


@pytest.mark.parametrize("fault", one_each_time(FAULTS, "copies that are kept", "rows in another order"))
def test_faults_are_noticed(fault, judge, size, monkeypatch):
    name, mode, wrong = FAULTS[fault]
    if mode != "value" and not NEW_JAX:
        pytest.skip("this JAX has no derivatives of communication")
    if size == 1 and name in programs.OF_MAPS:
        pytest.skip("there are no copies")
    some = tuple(2 if rank < size - 1 else 3 for rank in range(size))
    more = {"map": all_rows(size), "division": programs.Division((some,), (some[::-1],))}
    comm = programs.Comm(name, 0, root=3 if size == 1 else 2, peer=1, **more)  # two rows for some rank
    program = programs.Program(0, size, programs.Body((comm,), programs.INPUTS), True, True)
    assert judge(program, checks.Check(mode)) == ("right", "")
    owner, attribute = (jaxmpi.IndexMap, name[6:]) if name in programs.OF_MAPS else (jaxmpi, name)
    right = getattr(owner, attribute)

    def changed(*args, **more):
        y = right(*args, **more)
        if name == "migrate":
            return wrong(y[0], args[0], y[1]), *y[1:]
        return wrong(y, args[1], args[0].sizes[0]) if name in programs.OF_MAPS else wrong(y, args[0], None)

    monkeypatch.setattr(owner, attribute, changed)
    verdict, why = judge(program, checks.Check(mode))
    assert verdict == "wrong"
    assert "got [" in why

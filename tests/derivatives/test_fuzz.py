"""A few random programs against a witness, in this process; `make fuzz` runs as many as one likes.

A failure says seed and check: `python tests/programs/fuzz.py --documented --checks 1 --seed S --programs 1 --show`
prints the program, `--shrink S` in the place of `--seed S` makes it smaller.
"""

import random

import pytest
from mpi4py import MPI

from fuzzing import checks, programs
from fuzzing.vectors import constant
from fuzzing.witness import Witness
from support.table import NEW_JAX, _accumulate

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MPI.COMM_WORLD.size > 3, reason="compiles for too long on more ranks than cores"),
]
OPTIONS = programs.Options(used=not NEW_JAX, documented=True)


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


@pytest.mark.parametrize("seed", range(20))
def test_first_order(seed, judge, size):
    judge_program(judge, seed, size, 1, OPTIONS)


@pytest.mark.parametrize("seed", range(100, 105))
def test_second_order(seed, judge, size):
    judge_program(judge, seed, size, 2, OPTIONS)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("seed", range(4))
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

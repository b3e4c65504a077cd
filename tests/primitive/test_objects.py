"""Operations as objects: their parameters are keys of programs, and adjoint ones know each other."""

import dataclasses
import pickle
import traceback

import jax
import jax.numpy as jnp
import pytest
from mpi4py import MPI

import jaxmpi
from jaxmpi._jax.internals import Unsupported
from jaxmpi._mpi.communicators import resolve
from jaxmpi._operations.table import OPERATIONS
from jaxmpi._primitive import params
from jaxmpi._primitive.arguments import reduction
from jaxmpi._primitive.pytrees import ALONE, Leaf

pytestmark = pytest.mark.alone
VALUES = {
    "op": (reduction(MPI.SUM, "test"), reduction(MPI.MAX, "test")),
    "derivative": (None, "tangent"),
    "batch": ((), (2,)),
    "leaf": (ALONE, Leaf(1, 2, 3)),
    "line": (None, "a line"),
    "text": ("a text", "another"),
    "status": (None, "a status"),
    "pattern": ("a pattern", "another"),
    "per_array": ((), (1,)),
    "started": ((), (1,)),
}
FAMILIES = [x for x in vars(params).values() if isinstance(x, type) and issubclass(x, params.Common)]


def possible(name):
    """Two values of a parameter."""
    if name == "comm":
        return resolve(MPI.COMM_SELF, "test"), resolve(MPI.COMM_WORLD, "test")
    return VALUES.get(name, (1, 0))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_parameters_are_keys(family):
    names = [its.name for its in dataclasses.fields(family) if its.init]
    values = {name: possible(name)[0] for name in names}
    first, second = family(**values), family(**values)
    assert first == second
    assert len({first, second}) == 1
    assert params.kept(family)(**values) == first
    others = [family(**{**values, name: possible(name)[1]}) for name in names]
    assert len({first, *others}) == len(names) + 1
    for name, other in zip(names, others, strict=True):
        changed = dataclasses.replace(first, **{name: possible(name)[1]})
        assert (changed, hash(changed)) == (other, hash(other))
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(first, name, None)
    for kind in set(FAMILIES) - {family}:
        if names == [its.name for its in dataclasses.fields(kind) if its.init]:
            assert kind(**values) != first


def test_kept_parameters_are_one_object():
    make = params.kept(params.Rooted)
    comm = resolve(MPI.COMM_SELF, "test")
    assert make(comm, 0) is make(comm, 0)
    assert make(comm, 0) is not make(comm, 1)


def test_adjoints():
    pairs = [operation for operation in OPERATIONS if hasattr(operation, "adjoint")]
    assert len(pairs) == 20
    for operation in pairs:
        assert operation.adjoint is not operation
        assert operation.adjoint.adjoint is operation


def test_bind_returns_a_list():
    """Eagerly and while tracing, of results or of none."""
    by_name = {operation.name.removeprefix("jaxmpi."): operation for operation in OPERATIONS}
    comm = params.Common(resolve(MPI.COMM_SELF, "test"))

    def results(x):
        return (
            by_name["barrier"].apply(comm),
            by_name["allgather"].apply(comm, x),
            by_name["alltoall"].apply(comm, x, x),
        )

    for call in (results, jax.jit(results)):
        assert [(type(made), len(made)) for made in call(jnp.ones(1))] == [(list, 0), (list, 1), (list, 2)]


def test_refusals():
    """Users see a NotImplementedError, and receive one from another process."""
    with pytest.raises(NotImplementedError, match="has no derivative") as caught:
        jax.grad(lambda x: jaxmpi.allreduce(x, MPI.Op.Create(lambda a, b, _: None)))(1.0)
    assert isinstance(caught.value, Unsupported)
    assert traceback.format_exception_only(caught.value)[0].startswith("NotImplementedError: allreduce cannot be ")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), again.args) == (NotImplementedError, caught.value.args)


def test_parameters_in_words():
    """What JAX prints of a program is the same in each run: it says nothing of where objects are."""

    def program(x):
        y = jaxmpi.wait(jaxmpi.isend(x, 0)), jaxmpi.recv(x, 0)
        own = MPI.Op.Create(lambda a, b, _: None)
        rows = jaxmpi.allgatherv(x, [1])
        return y, jaxmpi.allreduce(x, own), jaxmpi.bcast(x, 0), rows, jaxmpi.Grid(1, 1).exchange(x, 0)

    text = str(jax.make_jaxpr(program)(jnp.ones(1)))
    assert "call=Rooted(Communicator(rank 0 of 1), root=0)" in text
    assert "call=Divided(Communicator(rank 0 of 1), rows=1)" in text
    assert "0x" not in text.replace("user-defined (0x", "")

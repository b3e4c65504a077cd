"""What type checkers report: every line that ends in `# error`, and no other one. Never run."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI
from typing_extensions import assert_type

import jaxmpi
from jaxmpi import io, tokens
from jaxmpi.testing import check_grads
from jaxmpi.tokens import Token

x = jnp.ones(3)

# Operations, of each kind one: test_signatures compares those with tokens with those without.

assert_type(tokens.allreduce(x, op=MPI.SUM, comm=MPI.COMM_SELF, token=None), tuple[Any, Token])
assert_type(tokens.barrier(), Token)
assert_type(tokens.reduce_scatter({"a": x}, MPI.SUM, counts=[3]), tuple[Any, Token])
assert_type(tokens.send(x, 1, tag=2), Token)
assert_type(tokens.sendrecv(x, x, 0, 1, sendtag=1, recvtag=2, status=MPI.Status()), tuple[Any, Token])
assert_type(tokens.wait(tokens.isend(x, 1)[0], after=x), tuple[Any, Token])
assert_type(jaxmpi.Grid((2, 0), (8, (3, 5)), periodic=True, comm=MPI.COMM_SELF).local_shape, tuple[int, ...])
jaxmpi.Grid(4, 8).exchange({"u": x}, [(1, 2)], boundary={"u": "edge"})
assert_type(jaxmpi.IndexMap([0, 2], x, comm=MPI.COMM_SELF).sizes, tuple[int, int])
assert_type(jaxmpi.IndexMap.from_csr([0, 1], [0]), tuple[jaxmpi.IndexMap, np.ndarray])
assert_type(jaxmpi.migrate({"a": x}, jnp.zeros(3, int), rows=5, count=2), tuple[Any, jax.Array, jax.Array])
assert_type(io.checkpoint("states", {"a": x, "step": 1}, grid=jaxmpi.Grid(4, 8), width=[(1, 2)], keep=None), Path)
assert_type(io.latest(Path("states")), Path | None)
io.save("state", x, chunks=(2, 3), dims="x", coords={"x": x}, attrs={"": {"title": ""}}, overwrite=True)
io.load("state", like={"a": x}, axes=[0], comm=MPI.COMM_SELF)["a"]
assert_type(jaxmpi.invariant(x), Any)
assert_type(jaxmpi.has_cuda_support(), bool)
jaxmpi.compat.install_as_mpi4jax(api="token")
jaxmpi.compat.install_as_jpi()
jaxmpi.IndexMap([0])  # error
io.save(x, "state")  # error
io.checkpoint("states", x, 3)  # error
jaxmpi.migrate(x)  # error
jaxmpi.migrate(x, x, 5)  # error
tokens.allreduce()  # error
tokens.allreduce(x, "sum")  # error
tokens.allreduce(x, MPI.SUM, MPI.COMM_SELF)  # error
tokens.sendrecv(x, x, 0, 1, tag=1)  # error
tokens.wait()  # error
jaxmpi.compat.install_as_jpi(api="token")  # error
jaxmpi.allreduced(x)  # error
assert_type(jaxmpi.allgatherv(x, [3]), Any)
assert_type(jaxmpi.allgatherv(x, x.size, rows=3, comm=MPI.COMM_SELF), Any)
assert_type(jaxmpi.alltoallv(x, jnp.array([3]), rows=3), Any)
assert_type(jaxmpi.recv(x, 1, tag=2, status=None), Any)
assert_type(jaxmpi.scatterv(x, None, root=0, rows=3), Any)
assert_type(jaxmpi.neighbor_alltoall(x, comm=MPI.COMM_SELF), Any)
assert_type(jaxmpi.wait(jaxmpi.isend(x, 1), after={"a": x}), Any)
assert_type(jaxmpi.waitall({"a": jaxmpi.ibarrier()}), Any)
assert_type(jaxmpi.has_sycl_support(), bool)
jaxmpi.barrier(comm=MPI.COMM_SELF)
jaxmpi.barrier().wait()  # error
jaxmpi.send(x, 1).wait()  # error
jaxmpi.alltoall(x, MPI.COMM_SELF)  # error
jaxmpi.bcast(x)  # error
jaxmpi.gather(x, 0, 1)  # error
jaxmpi.reduce(x, 0, MPI.SUM)  # error
jaxmpi.scatter(x, "0")  # error
jaxmpi.scatterv(x, [3], 0, rows="3")  # error
jaxmpi.allreduce(x, MPI.SUM, token=None)  # error
jaxmpi.allreduced(x)  # error

# Tests of gradients.

check_grads(lambda w, x: w * x, (x, x), invariant=("w", -1), invariant_out=(True, False), comm=MPI.COMM_SELF)
check_grads(jnp.sin, [x], invariant=0, gradient=jax.grad(jnp.sin), modes=("rev",), atol=0.1, rtol=1e-3, eps=0.1)
check_grads(jnp.sin)  # error
check_grads(jnp.sin, (x,), 1)  # error
check_grads(jnp.sin, (x,), invariant=0.5)  # error
check_grads(jnp.sin, (x,), order=1)  # error

# Compiled functions: the parameters and the result of the function, with options and without.


class State(NamedTuple):
    height: jax.Array
    steps: int


@jaxmpi.jit
def step(state: State, dt: float = 1.0) -> State:
    return State(jaxmpi.allreduce(state.height * dt, MPI.SUM), state.steps + 1)


@jaxmpi.jit(static_argnames="n", donate_argnums=(0,))
def power(x: jax.Array, n: int) -> jax.Array:
    return x**n


@partial(jaxmpi.jit, static_argnums=1)
def partial_power(x: jax.Array, n: int) -> jax.Array:
    return x**n


@jaxmpi.jit
def plain(x, scale=1):
    return jaxmpi.allgather(x * scale)


def same(values: Callable[[jax.Array, int], jax.Array]) -> None: ...


state = State(x, 0)
both = jaxmpi.jit(lambda x, y: x + y, keep_unused=True)
assert_type(step(state), State)
assert_type(step(state, dt=2.0), State)
assert_type(power(x, 2), jax.Array)
assert_type(jaxmpi.jit(step)(state), State)
assert_type(step.__name__, str)
partial_power(x, 2)
plain(x)
plain(x, scale=2)
both(1, 2)
same(power)
jax.grad(plain)(x)
jax.vmap(jaxmpi.jit(jax.vmap(power)))(x, 2)
jaxmpi.jit(jnp.sin)(x)
step()  # error
step(state, 1.0, 2.0)  # error
step(state, dt="1")  # error
step(x)  # error
step(state).height.depth()  # error
power(x)  # error
power(x, 2, 3)  # error
plain()  # error
plain(x, 1, 2)  # error
both(1, 2, 3)  # error
jaxmpi.jit(plain)(1, 2, 3)  # error
jaxmpi.jit(static_argnums=0)(plain)(1, 2, 3)  # error
jaxmpi.jit(3)  # error
same(step)  # error

# Methods.


class Model:
    @jaxmpi.jit
    def method(self, x: jax.Array) -> int:
        return 1

    @staticmethod
    @jaxmpi.jit
    def static(x: jax.Array) -> int:
        return 1

    @classmethod
    @jaxmpi.jit(static_argnums=0)
    def of_class(cls, x: jax.Array) -> int:
        return 1

    @property
    @jaxmpi.jit
    def size(self) -> int:
        return 1

    def __init__(self, function: Callable[[jax.Array], int]):
        self.attribute = jaxmpi.jit(function)


model = Model(lambda x: x.ndim)
assert_type(model.method(x), int)
assert_type(Model.method(model, x), int)
assert_type(Model.static(x), int)
assert_type(model.static(x), int)
assert_type(model.of_class(x), int)
assert_type(Model.of_class(x), int)
assert_type(model.size, int)
assert_type(model.attribute(x), int)
model.method()  # error
model.method(x, x)  # error
model.static(x, x)  # error
model.attribute()  # error
Model.method(model)  # error

"""The public names of JPI. A token is an array, and each function returns it unchanged.

Two derivatives follow JPI's conventions instead of the adjoints of this package. Neither communicates: the gradient of
`allgather` is this rank's part of the local cotangent, the gradient of `bcast` on root is the local cotangent.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from mpi4py import MPI

import jaxmpi
from jaxmpi._jax.dependence import dependent_zeros
from jaxmpi._mpi import communicators
from jaxmpi._primitive import arguments

Token = Array


def gen_token() -> Token:
    """Make a token: a scalar array. Order does not depend on it."""
    return jnp.zeros((), jnp.float32)


def allreduce(x: Any, token: Token, op: MPI.Op, comm: MPI.Comm | None = None) -> tuple[Array, Token]:
    """Return the reduction over all ranks, of the shape of `x`, and the token. The derivative: as in jaxmpi."""
    return jaxmpi.allreduce(x, op, comm=comm), token


def allgather(x: Any, token: Token, comm: MPI.Comm | None = None) -> tuple[Array, Token]:
    """Return the arrays of all ranks, `(size, *x.shape)`, and the token. The gradient: the cotangent at this rank."""
    rank = communicators.resolve(comm, "allgather").rank

    @jax.custom_jvp
    def gathered(x: Any) -> Any:
        return jaxmpi.allgather(x, comm=comm)

    def own_slice(primals: Any, tangents: Any) -> Any:
        y = gathered(*primals)
        return y, jnp.zeros(y.shape, tangents[0].dtype).at[rank].set(tangents[0])

    gathered.defjvp(own_slice)
    return gathered(arguments.array(x, "allgather", "x")), token


def bcast(x: Any, token: Token, root: int, comm: MPI.Comm | None = None) -> tuple[Array, Token]:
    """Return root's array on all ranks, and the token. The gradient is root's own cotangent on root, zero elsewhere."""
    on_root = communicators.resolve(comm, "bcast").rank == arguments.integer(root, "bcast", "root")

    @jax.custom_jvp
    def sent(x: Any) -> Any:
        return jaxmpi.bcast(x, root, comm=comm)

    def of_root(primals: Any, tangents: Any) -> Any:
        return sent(*primals), tangents[0] if on_root else jnp.zeros_like(tangents[0])

    sent.defjvp(of_root)
    return sent(arguments.array(x, "bcast", "x")), token


def scatter(x: Any, token: Token, root: int, comm: MPI.Comm | None = None) -> tuple[Array, Token]:
    """Return this rank's part of the first axis of root's array, and the token.

    `x` has the whole shape `(size * n, ...)` on all ranks. The result has shape `(n, ...)`, or `(...)` where n is 1.
    """
    x = arguments.array(x, "scatter", "x")
    resolved = communicators.resolve(comm, "scatter")
    if x.ndim == 0 or x.shape[0] % resolved.size:
        raise ValueError(
            f"scatter: the first axis of x must be divisible by the number of ranks, {resolved.size}; got shape "
            f"{x.shape}."
        )
    parts = x.reshape(resolved.size, x.shape[0] // resolved.size, *x.shape[1:])
    root = arguments.rank(root, resolved, "scatter", "root")
    part = jaxmpi.scatter(parts if resolved.rank == root else parts[0], root, comm=comm)
    return part[0] if part.shape[0] == 1 else part, token


def gather(x: Any, token: Token, root: int, comm: MPI.Comm | None = None) -> tuple[Array, Token]:
    """Return the arrays of all ranks, `(size, *x.shape)`, on root and zeros of that shape elsewhere, and the token."""
    x = arguments.array(x, "gather", "x")
    resolved = communicators.resolve(comm, "gather")
    y = jaxmpi.gather(x, root, comm=comm)
    if resolved.rank != root:  # zeros that depend on y, because JAX 0.6 drops an operation whose result is not used
        y = dependent_zeros([y], jax.ShapeDtypeStruct((resolved.size, *x.shape), x.dtype))
    return y, token


def barrier(token: Token, comm: MPI.Comm | None = None) -> Token:
    """Wait for all ranks, and return the token."""
    jaxmpi.barrier(comm=comm)
    return token


def send(x: Any, token: Token, dest: int, tag: int = 0, comm: MPI.Comm | None = None) -> tuple[Array, Token]:
    """Send a message, and return `x` and the token."""
    x = arguments.array(x, "send", "x")
    jaxmpi.send(x, dest, tag=tag, comm=comm)
    return x, token


def recv(x: Any, token: Token, source: int, tag: int = 0, comm: MPI.Comm | None = None) -> tuple[Array, Token]:
    """Receive a message of the shape and dtype of `x`, whose values are not read. Return it and the token."""
    return jaxmpi.recv(x, source, tag=tag, comm=comm), token


_FUNCTIONS = (allgather, allreduce, barrier, bcast, gather, recv, scatter, send)


def modules() -> dict[str, dict[str, Any]]:
    jax.config.update("jax_enable_x64", True)  # as an import of JPI does
    functions = {function.__name__: function for function in _FUNCTIONS}
    return {
        "jpi": {**functions, "gen_token": gen_token},
        **{f"jpi.{name}": {name: function} for name, function in functions.items()},
        "jpi.comm": {"Comm": MPI.Comm, "get_default_comm": communicators.default_mpi},
        "jpi.op": {"Op": MPI.Op},
        "jpi.token": {"Token": Token, "gen_token": gen_token},
    }

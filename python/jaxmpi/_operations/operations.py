"""The public functions. They check their arguments and bind an operation of the table for each array."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from mpi4py import MPI

from jaxmpi._jax import internals
from jaxmpi._mpi import communicators, devices
from jaxmpi._mpi import static as static_arguments
from jaxmpi._operations import neighbors
from jaxmpi._operations.neighbors import Neighbors
from jaxmpi._operations.table import CHECK, LINE, check_same
from jaxmpi._primitive import arguments, envelope, pytrees
from jaxmpi._primitive import counts as by_counts
from jaxmpi._primitive.primitive import Params, bind, bind_all, bind_by_plan, bind_each

CommOrOp = TypeVar("CommOrOp", bound=MPI.Comm | MPI.Op)

Leaf = Callable[..., jax.Array]
"""Checks one leaf and converts it to an array: (leaf, *more, operation, argument) -> array."""


def _each(operation: str, params: Params, x: Any, check: Leaf, *more: Any) -> Any:
    """Checks all leaves of `x`, then binds the operation for all of them."""
    if type(x) is internals.ConcreteArray:  # as below, but faster
        return bind(operation, params, check(x, *more, operation, "x"))
    leaves, structure = _checked(operation, x, check, *more)
    return jax.tree.unflatten(structure, bind_all(operation, params, leaves))


def _checked(operation: str, x: Any, check: Leaf, *more: Any) -> tuple[list[jax.Array], Any]:
    """All leaves of `x`, and its structure."""
    leaves, structure = arguments.pytree(x, operation, "x")
    try:
        return [check(leaf, *more, operation, "x") for leaf in leaves], structure
    except (TypeError, ValueError):
        arguments.leaves(x, operation, "x", lambda leaf, *names: check(leaf, *more, *names))  # again, to name the one
        raise


def _message(operation: str, params: Params, ends: Any, x: Any, check: Leaf) -> Any:
    """The same for messages of the leaves, with the ranks and tags that are known at run time."""
    if not ends and type(x) is internals.ConcreteArray:  # as below, but faster
        return _each(operation, params, x, check)
    leaves, structure = _checked(operation, x, check)
    sends = operation == "send"
    places = pytrees.places([], leaves) if sends else pytrees.places(leaves, [])
    operands = [(leaf, *ends) if sends else (*ends, leaf) for leaf in leaves]
    return jax.tree.unflatten(structure, bind_each(operation, params, places, operands))


def _reducing(operation: str, comm: Any, x: Any, op: MPI.Op, **more: Any) -> Any:
    reduction = arguments.reduction(op, operation)
    params = {"comm": comm, "op": reduction, **more}
    if CHECK and operation == "allreduce":
        params[LINE] = arguments.with_calling_line(
            "the cotangent of an allreduce differs from that of rank 0, though what is computed from its result must "
            "be the same on all ranks: gradients would be wrong. Pass what the ranks use differently, such as the "
            "parameters of a model, through jaxmpi.replicate first. The allreduce is at"
        )
    return _each(operation, params, x, arguments.reducible, reduction)


def allgather(x: Any, *, comm: MPI.Comm | None = None) -> Any:
    """Stacks the arrays of all ranks, on all ranks (MPI_Allgather).

    Args:
      x: array of any shape, or a pytree of such; the same shape and dtype on all ranks.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      The result has shape `(size, *x.shape)`, entry `i` is rank i's array.

    Raises:
      TypeError, ValueError: while tracing, before anything is sent; other ranks then wait.
    """
    return _each("allgather", {"comm": communicators.resolve(comm, "allgather")}, x, arguments.array)


def _tell(counts: Any, rows: int, comm: Any, operation: str) -> jax.Array:
    """The counts of all ranks, each of which knows its own at run time."""
    own = by_counts.possible(by_counts.numbers(counts, (), operation, "counts"), rows)
    return bind("allgather", {"comm": comm}, own)


def _by_counts(operation: str, params: Params, leaves: Any, structure: Any, *counts: Any) -> Any:
    """Binds the operation for all leaves, with the same counts. At run time there may be too little room for them."""
    places = [{}] * len(leaves) if isinstance(counts[0], np.ndarray) else pytrees.places(leaves, leaves)
    operands = [(leaf, *counts) for leaf in leaves]
    return jax.tree.unflatten(structure, bind_each(operation, params, places, operands))


def _join_rows(operation: str, params: Params, x: Any, counts: Any, rows: int | None) -> Any:
    """The rows of all ranks one behind the other; with a count at run time the counts of all ranks, too."""
    comm = params["comm"]
    leaves, names, structure = arguments.leaves(x, operation, "x")
    own = by_counts.rows_of(leaves, names, operation)
    known = by_counts.of_all(counts, comm.size, operation, "counts")
    if known is not None:
        by_counts.no_room(rows, operation)
        by_counts.match(own, known[comm.rank], "counts say that this rank has", operation, names)
        params = {**params, "rows": sum(known)}
        return _by_counts(operation, params, leaves, structure, by_counts.operand(known))
    told = _tell(counts, by_counts.most(leaves, own), comm, operation)
    params = {**params, "rows": by_counts.room(rows, comm.size * own, operation)}
    return _by_counts(operation, params, leaves, structure, told), told


def allgatherv(x: Any, counts: Any, *, rows: int | None = None, comm: MPI.Comm | None = None) -> Any:
    """Puts the arrays of all ranks one behind the other, on all ranks (MPI_Allgatherv).

    They are joined along their first axis, whose length may differ from rank to rank; the others are the same.

    Args:
      x: array of shape `(n, ...)`, or a pytree of such, all of the same `n`.
      counts: how many rows of `x` count. Known while tracing: those of all ranks, a sequence of integers, the same on
        all ranks; this rank's is the `n` of `x`. Known at run time: that of this rank, a scalar, at most `n`.
      rows: of counts at run time, for how many rows the result has room; the number of ranks times `n` if it is None.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      The rows of rank 0, then those of rank 1 and so on, of shape `(sum(counts), ...)`. With a count
      at run time a pair `(rows, counts)`: the rows have shape `(rows, ...)` and end with zeros, and `counts` are
      those of all ranks, of shape `(size,)` and dtype int32.

    Raises:
      ValueError, TypeError: counts that do not fit `x`, or an argument of the wrong type; while tracing, before
      anything is sent; other ranks then wait.
      jax.errors.JaxRuntimeError: at run time: a rank's count is negative or more than its `n`, on all ranks; there are
      more rows than there is room for, on each rank where that is so.
    """
    resolved = communicators.resolve(comm, "allgatherv")
    return _join_rows("allgatherv", {"comm": resolved}, x, counts, rows)


def allreduce(x: Any, op: MPI.Op, *, comm: MPI.Comm | None = None) -> Any:
    """Reduces the arrays of all ranks element by element; all ranks get the result (MPI_Allreduce).

    Args:
      x: array of any shape, or a pytree of such; the same shape and dtype on all ranks.
      op: a predefined operation that is defined for the dtype, or a user-made `MPI.Op`, which must live as long as
        functions that were compiled with it are called.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      The result has the shape and dtype of `x`. For `MPI.SUM`, `PROD`, `MAX` and `MIN` it can be
      differentiated: the result counts as one replicated value, so with SUM each rank gets its cotangent unchanged.

    Raises:
      TypeError: `op` is not defined for the dtype, or an argument is of the wrong type. ValueError: a freed `comm` or
      `op`. Both while tracing, before anything is sent; other ranks then wait.
    """
    return _reducing("allreduce", communicators.resolve(comm, "allreduce"), x, op)


def alltoall(x: Any, *, comm: MPI.Comm | None = None) -> Any:
    """Sends entry `i` of the first axis to rank i (MPI_Alltoall).

    Args:
      x: array of shape `(size, ...)`, or a pytree of such; the same shape and dtype on all ranks.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      Same shape; entry `i` of the result comes from rank i.

    Raises:
      ValueError: the first axis is not the number of ranks. TypeError: an argument is of the wrong type. Both while
      tracing, before anything is sent; other ranks then wait.
    """
    resolved = communicators.resolve(comm, "alltoall")
    return _each("alltoall", {"comm": resolved}, x, arguments.stacked, resolved.size)


def alltoallv(
    x: Any,
    sendcounts: Any,
    recvcounts: Any = None,
    *,
    rows: int | None = None,
    comm: MPI.Comm | None = None,
) -> Any:
    """Sends to each rank its own number of rows, and puts those received one behind the other (MPI_Alltoallv).

    Args:
      x: array of shape `(n, ...)`: first the rows for rank 0, then those for rank 1 and so on. Or a pytree of such, all
        of the same `n`.
      sendcounts: how many rows each rank gets. Known while tracing: a sequence of integers, whose sum is `n`. Known at
        run time: an array of integers of shape `(size,)`, whose sum is at most `n`.
      recvcounts: how many rows each rank sends to this one: a sequence of integers. None: the ranks tell each other at
        run time, and `rows` is needed.
      rows: of counts at run time, for how many rows the result has room.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      The rows from rank 0, then those from rank 1 and so on, of shape `(sum(recvcounts), ...)`. With
      counts at run time a pair `(rows, recvcounts)`: the rows have shape `(rows, ...)` and end with zeros, and
      `recvcounts` has shape `(size,)` and dtype int32.

    Raises:
      ValueError, TypeError: counts that do not fit `x`, or an argument of the wrong type; while tracing, before
      anything is sent; other ranks then wait. Whether `recvcounts` is what the others send is only compared with
      `JAXMPI_CHECK=1`.
      jax.errors.JaxRuntimeError: at run time: a rank's counts are negative or more than its `n`, on all ranks; there
      are more rows than there is room for, on each rank where that is so.
    """
    resolved = communicators.resolve(comm, "alltoallv")
    leaves, names, structure = arguments.leaves(x, "alltoallv", "x")
    own = by_counts.rows_of(leaves, names, "alltoallv")
    sent = by_counts.of_all(sendcounts, resolved.size, "alltoallv", "sendcounts")
    if recvcounts is not None:
        by_counts.no_room(rows, "alltoallv")
        received = by_counts.of_all(recvcounts, resolved.size, "alltoallv", "recvcounts")
        if sent is None or received is None:
            raise TypeError(
                "alltoallv: sendcounts and recvcounts must both be sequences of integers, one for each rank; where "
                "counts are known at run time, leave recvcounts out: the ranks tell each other, and rows= makes room."
            )
        by_counts.match(own, sum(sent), "the sum of sendcounts is", "alltoallv", names)
        params: Params = {"comm": resolved, "rows": sum(received)}
        return _by_counts("alltoallv", params, leaves, structure, by_counts.operand(sent), by_counts.operand(received))
    params = {"comm": resolved, "rows": by_counts.room(rows, None, "alltoallv")}
    counts = by_counts.numbers(
        sendcounts if sent is None else jax.numpy.asarray(sent), (resolved.size,), "alltoallv", "sendcounts"
    )
    mine = by_counts.possible(counts, by_counts.most(leaves, own))
    theirs = bind("alltoall", {"comm": resolved}, mine)
    return (_by_counts("alltoallv", params, leaves, structure, mine, theirs), theirs)


def barrier(*, comm: MPI.Comm | None = None) -> None:
    """Waits until all ranks have reached the barrier (MPI_Barrier).

    It orders communication, not Python: inside and outside `jit` the call may return before the barrier has completed.
    `jax.effects_barrier()` waits for that.

    Args:
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.
    """
    bind("barrier", {"comm": communicators.resolve(comm, "barrier")})


def bcast(x: Any, root: int, *, comm: MPI.Comm | None = None) -> Any:
    """Sends root's array to all ranks (MPI_Bcast).

    Args:
      x: on root the data; on other ranks a template of the same shape and dtype, whose values are not read. Or pytrees
        of such. A template may be a `jax.ShapeDtypeStruct`.
      root: rank that sends, static.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      Root's array on all ranks.

    Raises:
      ValueError: `root` is not a rank. TypeError: a static argument is traced, or an argument is of the wrong type.
      Both while tracing, before anything is sent; other ranks then wait.
    """
    resolved = communicators.resolve(comm, "bcast")
    root = arguments.rank(root, resolved, "bcast", "root")
    check = arguments.array if resolved.rank == root else arguments.template
    return _each("bcast", {"comm": resolved, "root": root}, x, check)


def exscan(x: Any, op: MPI.Op, *, comm: MPI.Comm | None = None) -> Any:
    """Exclusive prefix reduction: rank i gets the reduction over ranks 0 to i - 1 (MPI_Exscan).

    Args:
      x: array of any shape, or a pytree of such; the same shape and dtype on all ranks.
      op: a predefined operation that is defined for the dtype, or a user-made `MPI.Op`.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      Same shape and dtype as `x`. Rank 0, whose result the standard leaves undefined, gets what
      changes nothing: 0 of SUM, 1 of PROD, the least value of MAX and so on; zeros of a user-made `op`.

    Raises:
      TypeError: `op` is not defined for the dtype, or an argument is of the wrong type; while tracing, before anything
      is sent; other ranks then wait.
    """
    resolved = communicators.resolve(comm, "exscan")
    result = _reducing("exscan", resolved, x, op)
    if resolved.rank == 0:  # where the core makes zeros
        reduction = arguments.reduction(op, "exscan")
        result = jax.tree.map(lambda zeros: zeros + arguments.identity(reduction, zeros.dtype), result)
    return result


def gather(x: Any, root: int, *, comm: MPI.Comm | None = None) -> Any:
    """Stacks the arrays of all ranks, on root (MPI_Gather).

    Args:
      x: array of any shape, or a pytree of such; the same shape and dtype on all ranks.
      root: rank that receives, static.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      On root of shape `(size, *x.shape)`, entry `i` from rank i; on other ranks `x` itself.

    Raises:
      ValueError: `root` is not a rank. TypeError: a static argument is traced, or an argument is of the wrong type.
      Both while tracing, before anything is sent; other ranks then wait.
    """
    resolved = communicators.resolve(comm, "gather")
    root = arguments.rank(root, resolved, "gather", "root")
    return _each("gather", {"comm": resolved, "root": root}, x, arguments.array)


def gatherv(x: Any, counts: Any, root: int, *, rows: int | None = None, comm: MPI.Comm | None = None) -> Any:
    """Puts the arrays of all ranks one behind the other, on root (MPI_Gatherv).

    They are joined along their first axis, whose length may differ from rank to rank; the others are the same.

    Args:
      x: array of shape `(n, ...)`, or a pytree of such, all of the same `n`.
      counts: how many rows of `x` count. Known while tracing: those of all ranks, a sequence of integers, the same on
        all ranks; this rank's is the `n` of `x`. Known at run time: that of this rank, a scalar, at most `n`.
      root: rank that receives, static.
      rows: of counts at run time, for how many rows root's result has room; the number of ranks times `n` if it is
        None. Other ranks do not use it.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      On root the rows of rank 0, then those of rank 1 and so on, of shape `(sum(counts), ...)`; on
      other ranks `x` itself. With a count at run time a pair `(rows, counts)`: root's rows have shape
      `(rows, ...)` and end with zeros; `counts`, on all ranks, are those of all ranks, of shape `(size,)` and dtype
      int32.

    Raises:
      ValueError, TypeError: counts that do not fit `x`, or an argument of the wrong type; while tracing, before
      anything is sent; other ranks then wait.
      jax.errors.JaxRuntimeError: at run time: a rank's count is negative or more than its `n`, on all ranks; there are
      more rows than there is room for, on root.
    """
    resolved = communicators.resolve(comm, "gatherv")
    root = arguments.rank(root, resolved, "gatherv", "root")
    return _join_rows("gatherv", {"comm": resolved, "root": root}, x, counts, rows)


def invariant(x: Any, *, comm: MPI.Comm | None = None) -> Any:
    """`x` itself; its cotangents are divided by the number of ranks. For values that are the same on all ranks.

    The partner of `replicate`. If `allgather` or `bcast` has sent the same values to all ranks, and all ranks compute
    the same loss from them, the gradient is that of the sum of all ranks' losses, N times too large. It is the gradient
    of one loss if the values pass through `invariant` first. Identity forwards, division backwards: JAX's cast from
    varying to invariant, as `replicate` is the one from invariant to varying (docs/autodiff.md). The result of
    `allreduce` of a sum is invariant already. Communicates nothing, but in a differentiated function all ranks must
    call it, as they call other operations.

    Args:
      x: array of any shape, or a pytree of such; the same on all ranks, and used in the same way on all of them from
        here on. The values are compared only with `JAXMPI_CHECK=1`, at the cost of a `bcast` for each array and of its
        derivative. Integers and truth values have no cotangents.
      comm: an intra-communicator, whose size is the divisor; a clone of COMM_WORLD where it is None.

    Returns:
      `x`, as arrays of the same shapes and dtypes.

    Raises:
      TypeError, ValueError: an argument is of the wrong type, or a communicator has been freed; while tracing.
      jax.errors.JaxRuntimeError: at run time, with `JAXMPI_CHECK=1`, on each rank whose values differ from those of
      rank 0 by more than rounding; it names the line. Other ranks continue until they wait for a rank that raised.
    """
    params: Params = {"comm": communicators.resolve(comm, "invariant")}
    if CHECK:
        text = arguments.with_calling_line(
            "a value given to invariant differs from that of rank 0, though it must be the same on all ranks: "
            "gradients would be wrong. The invariant is at"
        )
        check_same(arguments.leaves(x, "invariant", "x")[0], params, text)
    return _each("invariant", params, x, arguments.array)


def _with_neighbors(operation: str, x: Any, comm: MPI.Comm | None, own_blocks: bool) -> Any:
    resolved = communicators.resolve(comm, operation)
    sources, destinations = neighbors.of(comm, operation)
    leaves, names, structure = arguments.leaves(x, operation, "x")
    for leaf, name in zip(leaves, names, strict=True) if own_blocks else ():
        if leaf.ndim == 0 or leaf.shape[0] != len(destinations):
            raise ValueError(
                f"{operation}: {name} has shape {leaf.shape}, and its first axis must have a block for each of the "
                f"{len(destinations)} destinations of this rank."
            )
    params: Params = {
        "comm": resolved,
        "pattern": Neighbors(sources, destinations, own_blocks),
        "places": ((),) * len(leaves),
        "adjoint": False,
    }
    return jax.tree.unflatten(structure, bind_by_plan(operation, params, leaves))


def neighbor_allgather(x: Any, *, comm: MPI.Comm) -> Any:
    """Sends an array to all neighbours, and stacks theirs (MPI_Neighbor_allgather).

    The neighbours are those of the communicator's topology, in the order of the MPI standard: of a Cartesian
    communicator the ranks before and behind this one along each axis; of a graph its sources, and its destinations, as
    they were given. All arrays of a pytree travel in one message to each neighbour.

    Args:
      x: array of any shape, or a pytree of such; the same shapes and dtypes on all ranks.
      comm: a communicator made by `Create_cart`, `Create_dist_graph_adjacent`, `Create_dist_graph` or `Create_graph`.

    Returns:
      Of shape `(number of sources, *x.shape)`; zero where there is no neighbour (MPI.PROC_NULL),
      beyond the end of an axis that is not periodic.

    Raises:
      ValueError, TypeError: `comm` has no neighbours, or an argument is of the wrong type; while tracing, before
      anything is sent.
      jax.errors.JaxRuntimeError: at run time, on a rank that receives something that is not of the same call.
    """
    return _with_neighbors("neighbor_allgather", x, comm, own_blocks=False)


def neighbor_alltoall(x: Any, *, comm: MPI.Comm) -> Any:
    """Sends a block to each neighbour, and stacks those received (MPI_Neighbor_alltoall).

    The neighbours are those of `neighbor_allgather`. Where a rank is a neighbour twice, as in a periodic axis of two,
    what it has sent backwards arrives in the place of the neighbour behind, and the other way round.

    Args:
      x: array of shape `(number of destinations, ...)`, or a pytree of such; blocks have the same shapes and dtypes on
        all ranks.
      comm: a communicator made by `Create_cart`, `Create_dist_graph_adjacent`, `Create_dist_graph` or `Create_graph`.

    Returns:
      Of shape `(number of sources, ...)`; zero where there is no neighbour (MPI.PROC_NULL).

    Raises:
      ValueError, TypeError: `comm` has no neighbours, `x` has not a block for each destination, or an argument is of
      the wrong type; while tracing, before anything is sent.
      jax.errors.JaxRuntimeError: at run time, on a rank that receives something that is not of the same call.
    """
    return _with_neighbors("neighbor_alltoall", x, comm, own_blocks=True)


def recv(
    x: Any,
    source: int = MPI.ANY_SOURCE,
    *,
    tag: int = MPI.ANY_TAG,
    comm: MPI.Comm | None = None,
    status: MPI.Status | None = None,
) -> Any:
    """Receives a message (MPI_Recv).

    Args:
      x: a template: its shape and dtype are those of the message, its values are not read. A pytree receives one
        message per leaf, in order. May be (or hold) `jax.ShapeDtypeStruct`. Under `vmap` a batch of messages is
        received if the template is batched (`x` itself is; `jnp.zeros_like(x)` is not).
      source: rank that sends; or `MPI.ANY_SOURCE`; or `MPI.PROC_NULL`: nothing is received and the result is zero. A
        pytree of several leaves needs a definite source. An integer, which may be traced.
      tag: tag of the message, or `MPI.ANY_TAG`. An integer, which may be traced.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.
      status: filled as the message arrives; of a pytree's messages it is that of the last. Inside `jit` it must not be
        read before the result is ready.

    Returns:
      The message, with the shape and dtype of the template.

    Raises:
      ValueError, TypeError: while tracing, before anything is received.
      jax.errors.JaxRuntimeError: at run time, if the message is longer than the template, or shorter and no `status`
      was passed (with one, the rest of the result is zero); if a traced rank or tag is none, before anything is sent.
    """
    resolved = communicators.resolve(comm, "recv")
    given = arguments.one_message(arguments.source(source, resolved, "recv"), x, "recv")
    params, ends = envelope.split({"source": given, "tag": arguments.tag(tag, "recv", "tag", (MPI.ANY_TAG,))})
    params = {"comm": resolved, **params, "status": arguments.status(status, "recv")}
    result = _message("recv", params, ends, x, arguments.template)
    return _with_status(result, params["status"], status)


def reduce(x: Any, op: MPI.Op, root: int, *, comm: MPI.Comm | None = None) -> Any:
    """Reduces the arrays of all ranks element by element; root gets the result (MPI_Reduce).

    Args:
      x: array of any shape, or a pytree of such; the same shape and dtype on all ranks.
      op: a predefined operation that is defined for the dtype, or a user-made `MPI.Op`.
      root: rank that receives, static.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      The reduction on root; on other ranks `x` itself.

    Raises:
      ValueError: `root` is not a rank. TypeError: `op` is not defined for the dtype, a static argument is traced, or an
      argument is of the wrong type. Both while tracing, before anything is sent; other ranks then wait.
    """
    resolved = communicators.resolve(comm, "reduce")
    root = arguments.rank(root, resolved, "reduce", "root")
    return _reducing("reduce", resolved, x, op, root=root)


def reduce_scatter(
    x: Any,
    op: MPI.Op,
    counts: Any = None,
    *,
    rows: int | None = None,
    comm: MPI.Comm | None = None,
) -> Any:
    """Reduces the arrays of all ranks element by element; each rank gets a part (MPI_Reduce_scatter_block).

    Args:
      x: array of shape `(size, ...)`, or a pytree of such; the same shape and dtype on all ranks. With `counts` of
        shape `(n, ...)`, all of the same `n`.
      op: a predefined operation that is defined for the dtype, or a user-made `MPI.Op`.
      counts: None: rank i gets entry `i`. Otherwise how many rows of the reduction each rank gets, those of rank 0
        first (MPI_Reduce_scatter). Known while tracing: a sequence of integers, the same on all ranks, whose sum is
        `n`. Known at run time: that of this rank, a scalar; the sum over all ranks is at most `n`.
      rows: of counts at run time, for how many rows the result has room; `n` if it is None.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      This rank's part, of shape `(...)`; with `counts` of shape `(counts[rank], ...)`. With a count
      at run time a pair `(rows, counts)`: the rows have shape `(rows, ...)` and end with zeros, and `counts` are
      those of all ranks, of shape `(size,)` and dtype int32.

    Raises:
      ValueError: the first axis is not what is divided. TypeError: `op` is not defined for the dtype, or an argument is
      of the wrong type. Both while tracing, before anything is sent; other ranks then wait.
      jax.errors.JaxRuntimeError: at run time: a rank's count is negative, or all of them are more than `n`, on all
      ranks; there are more rows than there is room for, on each rank where that is so.
    """
    resolved = communicators.resolve(comm, "reduce_scatter")
    reduction = arguments.reduction(op, "reduce_scatter")
    params: Params = {"comm": resolved, "op": reduction}
    if counts is None:
        by_counts.no_room(rows, "reduce_scatter")
        return _each("reduce_scatter", params, x, arguments.stacked_reducible, resolved.size, reduction)
    leaves, names, structure = arguments.leaves(
        x, "reduce_scatter", "x", lambda leaf, *names: arguments.reducible(leaf, reduction, *names)
    )
    whole = by_counts.rows_of(leaves, names, "reduce_scatter")
    known = by_counts.of_all(counts, resolved.size, "reduce_scatter", "counts")
    if known is not None:
        by_counts.no_room(rows, "reduce_scatter")
        by_counts.match(whole, sum(known), "the sum of counts is", "reduce_scatter", names)
        params["rows"] = known[resolved.rank]
        return _by_counts("reduce_scatterv", params, leaves, structure, by_counts.operand(known))
    most = by_counts.most(leaves, whole)
    told = by_counts.possible(_tell(counts, most, resolved, "reduce_scatter"), most)
    params["rows"] = by_counts.room(rows, whole, "reduce_scatter")
    return (_by_counts("reduce_scatterv", params, leaves, structure, told), told)


def replicate(x: Any, *, comm: MPI.Comm | None = None) -> Any:
    """`x` itself; its cotangents are summed over all ranks. For values that are the same on all ranks.

    The partner of `allreduce`. If a replicated parameter is used differently on each rank (with the rank's own data),
    and the loss is made by `allreduce` of a sum, each rank's gradient is that of the whole loss only if the parameter
    passes through `replicate` first. Identity forwards, allreduce of a sum backwards. All ranks must call it, in the
    same order as other operations.

    Args:
      x: array of any shape, or a pytree of such; the same on all ranks, which is not checked.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      `x`, as arrays.

    Raises:
      TypeError, ValueError: an argument is of the wrong type, or a communicator has been freed; while tracing.
    """
    return _each("replicate", {"comm": communicators.resolve(comm, "replicate")}, x, arguments.array)


def scan(x: Any, op: MPI.Op, *, comm: MPI.Comm | None = None) -> Any:
    """Inclusive prefix reduction: rank i gets the reduction over ranks 0 to i (MPI_Scan).

    Args:
      x: array of any shape, or a pytree of such; the same shape and dtype on all ranks.
      op: a predefined operation that is defined for the dtype, or a user-made `MPI.Op`.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      Same shape and dtype as `x`.

    Raises:
      TypeError: `op` is not defined for the dtype, or an argument is of the wrong type; while tracing, before anything
      is sent; other ranks then wait.
    """
    return _reducing("scan", communicators.resolve(comm, "scan"), x, op)


def scatter(x: Any, root: int, *, comm: MPI.Comm | None = None) -> Any:
    """Sends entry `i` of root's first axis to rank i (MPI_Scatter).

    Args:
      x: on root an array of shape `(size, ...)`; on other ranks a template of shape `(...)`, whose values are not read.
        Or pytrees of such. A template may be a `jax.ShapeDtypeStruct`.
      root: rank that sends, static.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      This rank's entry, of shape `(...)`.

    Raises:
      ValueError: `root` is not a rank, or the first axis on root is not the number of ranks. TypeError: a static
      argument is traced, or an argument is of the wrong type. Both while tracing, before anything is sent; other ranks
      then wait.
    """
    resolved = communicators.resolve(comm, "scatter")
    root = arguments.rank(root, resolved, "scatter", "root")
    params = {"comm": resolved, "root": root}
    if resolved.rank == root:
        return _each("scatter", params, x, arguments.stacked, resolved.size)
    return _each("scatter", params, x, arguments.template)


def scatterv(x: Any, counts: Any, root: int, *, rows: int | None = None, comm: MPI.Comm | None = None) -> Any:
    """Sends to each rank its own number of rows of root's array (MPI_Scatterv).

    Args:
      x: on root an array of shape `(n, ...)`: first the rows for rank 0, then those for rank 1 and so on. On other
        ranks a template of shape `(m, ...)`, whose values are not read, and may be a `jax.ShapeDtypeStruct`. Or pytrees
        of such, all of the same `n` or `m`.
      counts: how many rows each rank gets. Known while tracing: a sequence of integers, the same on all ranks, whose
        sum is `n`; on other ranks this rank's is `m`. Known at run time: on root an array of integers of shape
        `(size,)`, whose sum is at most `n`; on other ranks such an array, which is not read, or None.
      root: rank that sends, static.
      rows: of counts at run time, for how many rows the result has room; `n` on root and `m` on other ranks if it is
        None.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      This rank's rows, of shape `(counts[rank], ...)`. With counts at run time
      a pair `(rows, counts)`: the rows have shape `(rows, ...)` and end with zeros, and `counts` are root's, of
      shape `(size,)` and dtype int32.

    Raises:
      ValueError, TypeError: counts that do not fit `x`, or an argument of the wrong type; while tracing, before
      anything is sent; other ranks then wait.
      jax.errors.JaxRuntimeError: at run time: root's counts are negative or more than its `n`, on all ranks; there are
      more rows than there is room for, on each rank where that is so.
    """
    resolved = communicators.resolve(comm, "scatterv")
    root = arguments.rank(root, resolved, "scatterv", "root")
    mine = resolved.rank == root
    leaves, names, structure = arguments.leaves(x, "scatterv", "x", arguments.array if mine else arguments.template)
    own = by_counts.rows_of(leaves, names, "scatterv")
    known = by_counts.of_all(counts, resolved.size, "scatterv", "counts")
    if known is not None:
        by_counts.no_room(rows, "scatterv")
        what = "the sum of counts is" if mine else "counts say that this rank gets"
        by_counts.match(own, sum(known) if mine else known[resolved.rank], what, "scatterv", names)
        params: Params = {"comm": resolved, "root": root, "rows": known[resolved.rank]}
        return _by_counts("scatterv", params, leaves, structure, by_counts.operand(known))
    params = {"comm": resolved, "root": root, "rows": by_counts.room(rows, own, "scatterv")}
    given = jax.numpy.zeros(resolved.size, jax.numpy.int32)
    if mine:
        given = by_counts.numbers(counts, given.shape, "scatterv", "counts")
        given = by_counts.possible(given, by_counts.most(leaves, own))
    told = bind("bcast", {"comm": resolved, "root": root}, given)
    return (_by_counts("scatterv", params, leaves, structure, told), told)


def send(x: Any, dest: int, *, tag: int = 0, comm: MPI.Comm | None = None) -> None:
    """Sends a message (MPI_Send).

    Args:
      x: array of any shape, or a pytree of such, which is one message per leaf, in order.
      dest: rank that receives; or `MPI.PROC_NULL`: nothing is sent. An integer, which may be traced.
      tag: tag of the message. An integer, which may be traced.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Raises:
      ValueError, TypeError: while tracing, before anything is sent; the receiver then waits.
      jax.errors.JaxRuntimeError: at run time, if a traced `dest` is no rank, or a traced `tag` no tag; nothing is sent.
    """
    resolved = communicators.resolve(comm, "send")
    params, ends = envelope.split(
        {"dest": arguments.dest(dest, resolved, "send"), "tag": arguments.tag(tag, "send", "tag")}
    )
    _message("send", {"comm": resolved, **params}, ends, x, arguments.array)


def sendrecv(
    sendbuf: Any,
    recvbuf: Any,
    source: int,
    dest: int,
    *,
    sendtag: int = 0,
    recvtag: int = MPI.ANY_TAG,
    comm: MPI.Comm | None = None,
    status: MPI.Status | None = None,
) -> Any:
    """Sends one message and receives another, without deadlock (MPI_Sendrecv).

    Args:
      sendbuf: array of any shape, or a pytree of such, which is one message per leaf, in order.
      recvbuf: a template: its shape and dtype are those of the message received, its values are not read. Or a pytree
        with as many leaves as `sendbuf` has. May be (or hold) `jax.ShapeDtypeStruct`.
      source: rank that sends to this one; or `MPI.ANY_SOURCE`; or `MPI.PROC_NULL`: nothing is received and the result
        is zero. A pytree of several leaves needs a definite source. This and the following are integers, which may be
        traced.
      dest: rank that receives from this one; or `MPI.PROC_NULL`: nothing is sent.
      sendtag: tag of the message that is sent.
      recvtag: tag of the message that is received, or `MPI.ANY_TAG`.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.
      status: filled as the message arrives; of a pytree's messages it is that of the last. Inside `jit` it must not be
        read before the result is ready.

    Returns:
      The message received, with the structure, shape and dtype of `recvbuf`. It can be
      differentiated with respect to `sendbuf`: cotangents travel back, with source and dest, and the tags, exchanged.

    Raises:
      ValueError, TypeError: while tracing, before anything is sent; the peers then wait.
      jax.errors.JaxRuntimeError: at run time, if the message is longer than the template, or shorter and no `status`
      was passed (with one, the rest of the result is zero); if a traced rank or tag is none, before anything is sent.
    """
    resolved = communicators.resolve(comm, "sendrecv")
    values = {
        "source": arguments.source(source, resolved, "sendrecv"),
        "dest": arguments.dest(dest, resolved, "sendrecv"),
        "sendtag": arguments.tag(sendtag, "sendrecv", "sendtag"),
        "recvtag": arguments.tag(recvtag, "sendrecv", "recvtag", (MPI.ANY_TAG,)),
    }
    # Most messages are one array: no tree to flatten.
    alone = type(sendbuf) is type(recvbuf) is internals.ConcreteArray
    templates, structure = ([recvbuf], None) if alone else arguments.pytree(recvbuf, "sendrecv", "recvbuf")
    sent = [sendbuf] if alone else arguments.pytree(sendbuf, "sendrecv", "sendbuf")[0]
    sent = [arguments.array(leaf, "sendrecv", "sendbuf") for leaf in sent]
    templates = [arguments.template(leaf, "sendrecv", "recvbuf") for leaf in templates]
    if len(sent) != len(templates):
        raise ValueError(
            f"sendrecv: sendbuf has {len(sent)} arrays and recvbuf {len(templates)}: pass as many of one as of the "
            "other, in the order in which they travel."
        )
    values["source"] = arguments.one_message(values["source"], templates, "sendrecv")
    params, ends = envelope.split(values)
    params = {"comm": resolved, **params, "status": arguments.status(status, "sendrecv")}
    places = pytrees.places(templates, sent)
    operands = [(x, *ends, y) for x, y in zip(sent, templates, strict=True)]
    results = bind_each("sendrecv", params, places, operands)
    result = results[0] if alone else jax.tree.unflatten(structure, results)
    return _with_status(result, params["status"], status)


def static(x: CommOrOp) -> CommOrOp:
    """A communicator or a reduction that may be an argument of compiled functions; mpi4py's own have no hash.

    The result is one of mpi4py's objects as well, with the same handle, and is taken wherever those are. Besides, it
    may be a static argument of `jax.jit` (`static_argnums`, `static_argnames`), static data of a pytree, or part of any
    other argument, where it is a pytree without leaves. Two of them are equal as long as they are of the same
    communicator, so that a function is compiled once for each; one that has been freed equals none that comes later,
    even if MPI gives that the same handle.

    Args:
      x: an intra-communicator or an operation of mpi4py, such as `MPI.COMM_WORLD` or `MPI.SUM`. It is not duplicated:
        `Free()` of either frees both.

    Returns:
      The static one. Nothing is communicated; other ranks need not call it.

    Raises:
      TypeError: `x` is neither. ValueError: it has been freed, or is an inter-communicator.
    """
    if isinstance(x, MPI.Op):
        lifetime: Any = arguments.reduction(x, "static")
    elif isinstance(x, MPI.Comm):
        lifetime = communicators.resolve(x, "static")
    else:
        raise TypeError(
            f"static: a communicator or an operation of mpi4py is needed, such as MPI.COMM_WORLD or MPI.SUM, got {x!r} "
            f"of type {type(x).__name__}."
        )
    return x if isinstance(x, static_arguments.Static) else static_arguments.of(x, lifetime)


def _with_status(result: Any, written: arguments.Status | None, users: MPI.Status | None) -> Any:
    """The result. Outside of a trace, if the user passes a status, waits for it and fills the status."""
    if written is not None and users is not None and written.mpi is not users:
        jax.block_until_ready(result)
        written.copy_to(users)
    return result


def has_cuda_support() -> bool:
    """Whether arrays in CUDA memory can be communicated: a driver is installed and shows a device to this process."""
    return devices.count("CUDA") > 0


def has_rocm_support() -> bool:
    """Whether arrays in ROCm memory can be communicated: HIP is installed and shows a device to this process."""
    return devices.count("ROCM") > 0


def has_sycl_support() -> bool:
    """Whether arrays in SYCL memory (Intel GPUs) can be communicated: not yet, see docs/gpu.md."""
    return devices.count("SYCL") > 0

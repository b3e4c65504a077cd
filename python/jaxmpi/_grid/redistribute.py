"""`jaxmpi.redistribute`: from the blocks of one grid to those of another one."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxmpi._grid import arguments as given
from jaxmpi._grid.divisions import Division, Redistribution
from jaxmpi._grid.grid import Grid, Width
from jaxmpi._operations.exchanges import redistribute_p, redistribute_start_p, start_exchange
from jaxmpi._operations.requests import Request
from jaxmpi._primitive import arguments
from jaxmpi._primitive.params import Planned


def redistribute(
    fields: Any,
    source: Grid,
    target: Grid,
    *,
    axes: Sequence[int] | None = None,
    source_width: Width = 0,
    target_width: Width = 0,
) -> Any:
    """Makes blocks of another grid from blocks of a grid: one operation, and one message to each rank that needs some.

    Both grids divide the same global arrays among the same ranks, in any two ways: by other numbers of processes, by
    blocks of other sizes, also of none. Each cell goes from the rank in whose block it is to the one in whose block it
    is to be, only between ranks whose blocks meet. With the division in pencils that `Grid.pencil` gives, this is the
    transpose of distributed Fourier transforms; `jaxmpi.fft` does them.

    All ranks of the grids call it. The map is linear and its transpose is the redistribution back, by one operation as
    well. Under `jax.vmap` a batch travels in the same messages. `iredistribute` starts it and does not wait.

    Args:
      fields: this rank's block by `source` of a global array of any dtype that can be communicated, or a pytree of
        such, of any dtypes and shapes. It may be longer by one along an axis where it is staggered, as in
        `Grid.exchange`: of the points that two blocks have in common the second one's is sent, and both get it.
      source: the grid whose blocks are given.
      target: the grid whose blocks are returned, of the same global shape, on a communicator of the same ranks in the
        same order.
      axes: which axes of the arrays are those of the grids, in their order; the last ones where it is None. Others, in
        front, between or behind, are kept.
      source_width: width of the halo that the given blocks have, static, as in `Grid.exchange`; it is not read.
      target_width: width of the halo of zeros around the blocks that are returned, static; `target.exchange` fills it.

    Returns:
      The blocks by `target`, of the same structure and dtypes.

    Raises:
      ValueError: the grids have other global shapes, numbers of axes, or ranks; a field does not fit the grid.
        TypeError: an argument is of the wrong type, or traced. Both while tracing, before anything is sent.
      jax.errors.JaxRuntimeError: at run time, on each rank that receives something that is not of the same call: the
        ranks passed other fields or grids, or called in another order. With `JAXMPI_CHECK=1` on all ranks, before
        anything is sent.
    """
    arrays, structure, params = _checked("redistribute", fields, source, target, axes, source_width, target_width)
    return jax.tree.unflatten(structure, redistribute_p.apply_to_all(params, arrays))


def iredistribute(
    fields: Any,
    source: Grid,
    target: Grid,
    *,
    axes: Sequence[int] | None = None,
    source_width: Width = 0,
    target_width: Width = 0,
) -> Request:
    """Starts a redistribution: what other ranks need is on its way while something else is computed.

    Args: those of `redistribute`. 100 arrays at most.

    Returns:
      A `Request`; `jaxmpi.notoken.wait(request)` gives what `redistribute` would. It holds the fields too, so it is a
      pytree with their arrays.

    Raises: what `redistribute` raises while tracing; its errors at run time are raised by `wait`.
    """
    arrays, structure, params = _checked("iredistribute", fields, source, target, axes, source_width, target_width)
    return start_exchange("iredistribute", params, arrays, structure, redistribute_start_p)


def _checked(
    operation: str,
    fields: Any,
    source: Grid,
    target: Grid,
    axes: Sequence[int] | None,
    source_width: Width,
    target_width: Width,
) -> tuple[list[Any], Any, Planned]:
    """The arrays of a redistribution, their structure, and its parameters."""
    check_grids(operation, source, target)
    arrays, names, structure = arguments.leaves(fields, operation, "fields")
    dimensions = len(source.processes)
    widths = [given.widths(width, dimensions, operation) for width in (source_width, target_width)]
    divisions = [Division(grid._layout, its) for grid, its in zip((source, target), widths, strict=True)]
    expected = [size + sum(pair) for size, pair in zip(source.local_shape, widths[0], strict=True)]
    advice = " Pass its block by the source grid; source_width= says what halo it has, axes= which axes are the grid's."
    cuts = [
        source._cut(x.shape, axes, expected, operation, name, advice) for x, name in zip(arrays, names, strict=True)
    ]
    per_array = tuple((cut.axes, tuple(map(bool, cut.staggered)), name) for cut, name in zip(cuts, names, strict=True))
    pattern = Redistribution(source._comm.rank, *divisions)
    return arrays, structure, Planned(source._comm, pattern, per_array, False)


def check_grids(operation: str, source: Grid, target: Grid) -> None:
    """Raises TypeError or ValueError unless two grids divide the same arrays among the same ranks."""
    for name, grid in (("source", source), ("target", target)):
        if not isinstance(grid, Grid):
            raise TypeError(f"{operation}: {name} must be a jaxmpi.Grid, got {grid!r:.80} of {type(grid).__name__}.")
        grid._need_shape(operation)
        grid._check_alive(operation)
    if source.global_shape != target.global_shape:
        raise ValueError(
            f"{operation}: the source grid has global shape {source.global_shape}, the target grid "
            f"{target.global_shape}: both must divide the same arrays."
        )
    if not source._same_ranks(target):
        raise ValueError(
            f"{operation}: the grids have communicators of other ranks, or of the same in another order: make both "
            "with one comm=."
        )

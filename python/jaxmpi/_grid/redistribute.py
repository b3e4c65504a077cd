"""`jaxmpi.redistribute`: from the blocks of one grid to the blocks of another one."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxmpi._grid import arguments as checks
from jaxmpi._grid.divisions import Division, Place, Redistribution
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
    target_axes: Sequence[int] | None = None,
    source_width: Width = 0,
    target_width: Width = 0,
) -> Any:
    """Make blocks of another grid from blocks of a grid: one operation, one message to each rank that needs cells.

    Both grids divide the same global arrays among the same ranks, in any two ways: by other numbers of processes, or by
    blocks of other sizes, also empty ones. Each cell goes from the rank whose block contains it to the rank whose new
    block contains it. Only ranks whose blocks overlap exchange messages. With the pencils of `Grid.pencil`, this is the
    transpose of distributed Fourier transforms; `jaxmpi.fft` does them.

    All ranks of the grids call it. The map is linear. The transpose is the redistribution back, which is one operation
    as well. Under `jax.vmap` a batch travels in the same messages. `iredistribute` starts it and does not wait.

    Args:
      fields: this rank's block by `source` of a global array of any dtype that can be communicated, or a pytree of
        arrays with any dtypes and shapes. A staggered field is longer by one along an axis, as in `Grid.exchange`. If
        two blocks share a point, the second one sends its value, and both receive it.
      source: the grid of the blocks that are passed.
      target: the grid of the blocks that are returned, of the same global shape, on a communicator of the same ranks in
        the same order.
      axes: which axes of the arrays belong to the grids, in their order. None: the last ones. Other axes, in front,
        between or behind, are kept.
      target_axes: as `axes`, for the blocks that are returned: `target_axes[i]` is the place of axis i of the grids,
        as in `numpy.moveaxis`. The axes of `axes`, in any order; other axes keep their places. None: as `axes`. The
        operation writes this order at no further cost. With `(-1, -3, -2)` the first axis of a grid of three lies last,
        contiguous in memory. Pass these places as `axes=` when you give the blocks to another call.
      source_width: width of the halo of the blocks that are passed, static, as in `Grid.exchange`. It is not read.
      target_width: width of the halo of zeros around the blocks that are returned, static. `target.exchange` fills it.

    Returns:
      The blocks by `target`, of the same structure and dtypes.

    Raises:
      ValueError: the grids have other global shapes, numbers of axes, or ranks. Or a field does not fit the grid. While
        tracing, before anything is sent.
      TypeError: an argument is of the wrong type, or traced. At the same time.
      jax.errors.JaxRuntimeError: at run time, on each rank that receives a message of another call: the ranks passed
        other fields or grids, or called in another order. With `JAXMPI_CHECK=1` on all ranks, before anything is sent.
    """
    arrays, structure, params = _checked(
        "redistribute", fields, source, target, axes, target_axes, source_width, target_width
    )
    return jax.tree.unflatten(structure, redistribute_p.apply_to_all(params, arrays))


def iredistribute(
    fields: Any,
    source: Grid,
    target: Grid,
    *,
    axes: Sequence[int] | None = None,
    target_axes: Sequence[int] | None = None,
    source_width: Width = 0,
    target_width: Width = 0,
) -> Request:
    """Start a redistribution: cells travel to other ranks while the program computes.

    The arguments are as for `redistribute`, with 100 arrays at most.

    Returns:
      A `Request`. `jaxmpi.wait(request)` returns the result of the `redistribute`. It holds the fields too, so
      it is a pytree with their arrays.

    It raises the errors of `redistribute` that come while tracing. `wait` raises the errors at run time.
    """
    arrays, structure, params = _checked(
        "iredistribute", fields, source, target, axes, target_axes, source_width, target_width
    )
    return start_exchange("iredistribute", params, arrays, structure, redistribute_start_p)


def _checked(
    operation: str,
    fields: Any,
    source: Grid,
    target: Grid,
    axes: Sequence[int] | None,
    target_axes: Sequence[int] | None,
    source_width: Width,
    target_width: Width,
) -> tuple[list[Any], Any, Planned]:
    """Return the arrays of a redistribution, their structure, and the parameters."""
    check_grids(operation, source, target)
    arrays, names, structure = arguments.leaves(fields, operation, "fields")
    dimensions = len(source.processes)
    named = {"source_width": source_width, "target_width": target_width}
    widths = [checks.widths(width, dimensions, operation, name) for name, width in named.items()]
    divisions = [Division(grid._layout, width) for grid, width in zip((source, target), widths, strict=True)]
    expected = [size + sum(pair) for size, pair in zip(source.local_shape, widths[0], strict=True)]
    advice = " Pass the block by the source grid; source_width= gives the halo, axes= the axes that are the grid's."
    per_array = []
    for x, name in zip(arrays, names, strict=True):
        cut = source._cut(x.shape, axes, expected, operation, name, advice)
        arriving = cut.axes
        if target_axes is not None:
            arriving = source._axes_of(x.shape, operation, name, target_axes, "target_axes")
            if {*arriving} != {*cut.axes}:
                raise ValueError(
                    f"{operation}: target_axes is {target_axes}, which are not the axes of {name} that belong to the "
                    f"grids: {tuple(axis % x.ndim for axis in cut.axes)}. Pass these in another order."
                )
        per_array.append(Place(cut.axes, arriving, tuple(map(bool, cut.staggered)), name))
    pattern = Redistribution(source._comm.rank, *divisions)
    return arrays, structure, Planned(source._comm, pattern, tuple(per_array), False)


def check_grids(operation: str, source: Grid, target: Grid) -> None:
    """Raise TypeError or ValueError unless two grids divide the same arrays among the same ranks."""
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

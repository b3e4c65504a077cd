"""Grids of processes: blocks of global arrays, and the exchange of their halos."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import slice_in_dim
from mpi4py import MPI

from jaxmpi._grid import arguments as checks
from jaxmpi._grid import halos
from jaxmpi._grid.divisions import best_division
from jaxmpi._grid.halos import Halo, Layout, Rules
from jaxmpi._jax import internals
from jaxmpi._mpi import communicators
from jaxmpi._operations import collectives
from jaxmpi._operations.exchanges import exchange_p, grid_accumulate_p, is_of_grid, start_exchange
from jaxmpi._operations.requests import Request, wait
from jaxmpi._primitive import arguments, keys
from jaxmpi._primitive.params import Planned

Width = int | Sequence[int | Sequence[int]]


class Grid(communicators.Local):
    """Processes in a Cartesian grid, each with a block of global arrays.

    Args:
      processes: how many along each axis, for example `(2, 3)`. Six axes at most. For 0 a number is chosen, as by
        MPI_Dims_create. The product is the number of ranks of the communicator. Rank 0 is at (0, 0), rank 1 at (0, 1):
        the last axis varies fastest, as in MPI_Cart_create. None: as in `comm`, a Cartesian communicator. Other numbers
        than in `comm` give another division among the same ranks.
      shape: cells of the global arrays along each axis. A process has a contiguous block of them. If an axis cannot be
        divided evenly, the first processes have one cell more. For blocks of other sizes an axis may be a sequence with
        a size for each process along it. None: blocks and exchanges are not possible, neighbours are.
      periodic: whether the last process along an axis is next to the first: one truth value, or one for each axis. With
        a Cartesian communicator of as many axes None means its own periods.
      comm: an intra-communicator. None: a clone of COMM_WORLD. All ranks of it make the same grid. This is not checked
        here, but by each exchange.

    Raises:
      ValueError, TypeError: the processes do not fit the communicator, or an argument has the wrong type or length. On
        this rank; nothing is sent.
    """

    def __init__(
        self,
        processes: int | Sequence[int] | None = None,
        shape: int | Sequence[int | Sequence[int]] | None = None,
        *,
        periodic: bool | Sequence[bool] | None = None,
        comm: MPI.Comm | None = None,
    ):
        self._comm = communicators.resolve(comm, "Grid")
        self._mpi = communicators.default_mpi() if comm is None else comm
        if comm is not None and comm.Get_topology() == MPI.CART:
            cart_dims, cart_periods = comm.Get_topo()[:2]  # type: ignore[attr-defined]
            processes = cart_dims if processes is None else processes
            if periodic is None and len(checks.integers(processes, "Grid", "processes")) == len(cart_dims):
                periodic = [bool(period) for period in cart_periods]
        if processes is None:
            raise ValueError(
                "Grid: pass the numbers of processes, such as (2, 2), or a Cartesian communicator as comm."
            )
        dims = checks.fill_in(checks.integers(processes, "Grid", "processes"), self._comm.size)
        periods = checks.truths(False if periodic is None else periodic, len(dims))
        self._layout = Layout(checks.blocks(shape, dims), periods)
        self._has_shape = shape is not None

    def __repr__(self) -> str:
        cells = f", shape {self.global_shape}" if self._has_shape else ""
        return f"Grid({self.processes}{cells}, periodic {self.periodic}, coordinates {self.coordinates})"

    def __eq__(self, other: object) -> bool:
        """Return whether another grid divides the same arrays in the same way, on the same communicator. `jax.jit`
        takes it as the same static argument."""
        if not isinstance(other, Grid):
            return NotImplemented
        return (self._comm, self._layout, self._has_shape) == (other._comm, other._layout, other._has_shape)

    def __hash__(self) -> int:
        return hash((self._layout, self._has_shape))

    # --- sizes and neighbours --------------------------------------------------------------------------------------

    @property
    def comm(self) -> MPI.Comm:
        """The communicator."""
        return self._mpi

    @property
    def processes(self) -> tuple[int, ...]:
        """The number of processes along each axis."""
        return self._layout.dims

    @property
    def periodic(self) -> tuple[bool, ...]:
        """Whether the last process along each axis is next to the first."""
        return self._layout.periodic

    @property
    def coordinates(self) -> tuple[int, ...]:
        """The position of this process along each axis, from 0 on."""
        return self._layout.coordinates(self._comm.rank)

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The cells of global arrays."""
        self._need_shape("Grid.global_shape")
        return tuple(map(sum, self._layout.blocks))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The cells of this process's block, without halo."""
        self._need_shape("Grid.local_shape")
        return self._layout.block(self._comm.rank)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The place of this process's block in global arrays. `np.ogrid[grid.slices]` has the global indices of the
        cells: an array for each axis, which broadcasts against the block."""
        return self._slices_of(self._comm.rank, "Grid.slices")

    def slices_of(self, rank: int) -> tuple[slice, ...]:
        """Return the place of a rank's block in global arrays."""
        return self._slices_of(arguments.rank(rank, self._comm, "Grid.slices_of", "rank"), "Grid.slices_of")

    def _slices_of(self, rank: int, function: str) -> tuple[slice, ...]:
        self._need_shape(function)
        return tuple(slice(start, start + size) for start, size in self._extents(rank, (0,) * len(self.processes)))

    def neighbor(self, axis: int, distance: int = 1) -> int:
        """Return the rank `distance` processes further along an axis, or `MPI.PROC_NULL` beyond a wall."""
        axis = self._axis(axis, "Grid.neighbor")
        return self._neighbor(axis, arguments.integer(distance, "Grid.neighbor", "distance"))

    def _neighbor(self, axis: int, distance: int) -> int:
        there = list(self.coordinates)
        there[axis] += distance
        if self.periodic[axis]:
            there[axis] %= self.processes[axis]
        return self._layout.rank(there) if 0 <= there[axis] < self.processes[axis] else MPI.PROC_NULL

    def is_wall(self, axis: int, side: int) -> bool:
        """Return whether this process is at a wall: at the beginning of an axis (`side` -1), or at its end (1)."""
        axis = self._axis(axis, "Grid.is_wall")
        if arguments.integer(side, "Grid.is_wall", "side") not in (-1, 1):
            raise ValueError(
                f"Grid.is_wall: side is {side!r}: pass -1 for the beginning of the axis, or 1 for its end."
            )
        return self._neighbor(axis, side) == MPI.PROC_NULL

    def _need_shape(self, function: str) -> None:
        if not self._has_shape:
            raise ValueError(
                f"{function}: it needs the shape of global arrays: jaxmpi.Grid({self.processes}, shape=(...), ...)."
            )

    def _check_alive(self, operation: str) -> None:
        communicators.check_alive(self._mpi, operation, "grid")

    def _extents(self, rank: int, staggered: Sequence[int]) -> list[tuple[int, int]]:
        """Return start and size of a block along each axis."""
        extents = []
        for axis, (at, extra) in enumerate(zip(self._layout.coordinates(rank), staggered, strict=True)):
            start, end = self._layout.intervals(axis)[at]
            extents.append((start, end - start + extra))
        return extents

    def _same_ranks(self, other: "Grid") -> bool:
        """Return whether the communicator of another grid has the same ranks in the same order, without messages."""
        if self._comm is other._comm:
            return True
        return MPI.Comm.Compare(self._mpi, other._mpi) in (MPI.IDENT, MPI.CONGRUENT)

    def pencil(self, axis: int) -> "Grid":
        """Return the grid over the same ranks in which an axis is whole: each process has all cells along it.

        The processes along this axis move to the other axes. Of all ways to do this, the grid has the way whose largest
        block is smallest. If there are several, the first of these criteria that differs decides: the fewest messages
        between the two grids, the most axes that stay as they are, the most even division, and the more processes along
        the first axes. `jaxmpi.redistribute` moves data between the two grids.

        Args:
          axis: an axis of the grid.

        Returns:
          A `Grid` of the same global shape, periodicity and communicator. Axes with the same number of processes keep
          their blocks, others are divided as evenly as possible. If the axis is whole already: this grid.

        Raises:
          ValueError: there is no such axis, or the grid has one axis alone and several processes.
        """
        self._need_shape("Grid.pencil")
        axis = self._axis(axis, "Grid.pencil")
        if self.processes[axis] == 1:
            return self
        if len(self.processes) == 1:
            raise ValueError(
                f"Grid.pencil: a grid of one axis with {self.processes[0]} processes has no other axis to divide "
                "when this one is whole. Use a grid of two axes or more."
            )
        dims = best_division(self.global_shape, self.processes, axis)
        shape = [
            blocks if len(blocks) == number else size
            for blocks, number, size in zip(self._layout.blocks, dims, self.global_shape, strict=True)
        ]
        return self._like(dims, shape)

    def _like(self, processes: Sequence[int], shape: Sequence[int | Sequence[int]]) -> "Grid":
        """Make a grid over the same ranks with other processes or another shape."""
        grid = object.__new__(Grid)
        grid._comm, grid._mpi, grid._has_shape = self._comm, self._mpi, True
        grid._layout = Layout(checks.blocks(shape, tuple(processes)), self.periodic)
        return grid

    def _axis(self, axis: int, function: str) -> int:
        return checks.axis(axis, len(self.processes), function)

    # --- the exchange ----------------------------------------------------------------------------------------------

    def exchange(
        self,
        fields: Any,
        width: Width = 1,
        *,
        axes: Sequence[int] | None = None,
        corners: bool = True,
        boundary: Any = None,
    ) -> Any:
        """Fill the halos of fields with the cells of the neighbours: one operation, and one message to each neighbour.

        A field is this process's block of a global array with the halo around it: of shape `local_shape`, plus the
        widths along each axis. A staggered field is longer by one along an axis, like the points between cells and at
        both ends. Then the last point is the first of the next process. Both processes compute it, and the halo begins
        behind it.

        All ranks of the grid call it. The map is linear, except for a boundary that is a number. The transpose adds
        each cell of the halo to the cell that it was copied from, and clears it. This is one operation as well. Under
        `jax.vmap` a batch travels in the same messages.

        Args:
          fields: an array of any dtype that can be communicated, or a pytree of arrays with any dtypes and shapes.
          width: of the halo, in cells, static: one number; or for each axis of the grid a number, or a pair (before the
            block, behind it). 0: no halo there. Unlike in `numpy.pad`, (1, 2) is 1 along the first axis and 2 along the
            second. [(1, 2), (1, 2)] is 1 before and 2 behind along both.
          axes: which axes of the arrays belong to the grid, in the grid's order. None: the last ones. Other axes, for
            example components or levels, belong to each cell.
          corners: whether the halo has corners (and edges in 3-D), which come from diagonal neighbours. Otherwise they
            stay as they are.
          boundary: the rule for the halo at a wall. None: it stays as it is, and is exchanged along the other axes. A
            number, "edge", "reflect" or "symmetric": the rules of `numpy.pad`. Or for each axis of the grid one of
            these, or a pair of them (before, behind). Or a dict (or NamedTuple) like the fields with a boundary for
            each, for example `{"h": "edge", "v": 0}`. A list or a tuple always has one entry for each axis of the grid.

        Returns:
          The fields with filled halos, of the same structure, shapes and dtypes. Blocks do not change.

        Raises:
          ValueError: a field does not fit the grid, or a block is smaller than a halo that is copied from it, which all
            ranks notice. While tracing, before anything is sent.
          TypeError: an argument is of the wrong type, or traced. At the same time.
          jax.errors.JaxRuntimeError: at run time, on each rank that receives a message of another call: the ranks
            passed other fields or arguments, or called in another order. With `JAXMPI_CHECK=1` on all ranks, before
            anything is sent.
        """
        arrays, structure, params = self._exchange("Grid.exchange", fields, width, axes, corners, boundary)
        return jax.tree.unflatten(structure, exchange_p.apply_to_all(params, arrays))

    def accumulate(
        self,
        fields: Any,
        width: Width = 1,
        *,
        axes: Sequence[int] | None = None,
        corners: bool = True,
        boundary: Any = None,
    ) -> Any:
        """Add the halos of fields to the cells that they copy, and clear them: the transpose of `exchange`.

        It is for deposits: a rank adds the contributions of its particles or elements to its block and to the halo.
        This function brings the halo's part to the ranks that own these cells. It is one operation, with one message to
        each neighbour. Contributions of several ranks are added in the order of the ranks.

        All ranks of the grid call it. It is linear, and its transpose is `exchange` (with 0 in the place of a boundary
        that is a number). Under `jax.vmap` a batch travels in the same messages. Reports of waiting and errors at run
        time name it Grid.exchange.

        Args:
          fields: an array of any dtype that can be added, or a pytree of arrays, of the shapes that `exchange` takes.
            If two processes of a staggered field share a point, each keeps its own value.
          width, axes: as in `exchange`.
          corners: whether corners (and edges in 3-D) of the halo are added to the cells of diagonal neighbours.
            Otherwise they stay as they are.
          boundary: the rule for the halo at a wall, in the forms that `exchange` takes. None: it stays as it is, and
            the adjacent halos of others are added to it. "edge", "reflect" or "symmetric": each cell of it is added to
            the cell that it copies under the rule, and cleared. A number: it is cleared, and the number itself does not
            matter.

        Returns:
          The fields, of the same structure, shapes and dtypes, with zeros in the halo that has been added.

        It raises the errors of `exchange`, and a TypeError for a dtype that cannot be added.
        """
        arrays, structure, params = self._exchange("Grid.accumulate", fields, width, axes, corners, boundary, True)
        return jax.tree.unflatten(structure, grid_accumulate_p.apply_to_all(params, arrays))

    def _exchange(
        self,
        operation: str,
        fields: Any,
        width: Width,
        axes: Sequence[int] | None,
        corners: bool,
        boundary: Any,
        adjoint: bool = False,
    ) -> tuple[list[Any], Any, Planned]:
        """Return the arrays of an exchange or of the adjoint, their structure, and the parameters."""
        self._need_shape(operation)
        self._check_alive(operation)
        arrays, names, structure = arguments.leaves(fields, operation, "fields", _added if adjoint else arguments.array)
        corners = checks.truth(corners, operation, "corners")
        halo = Halo(self._layout, checks.widths(width, len(self.processes), operation), corners)
        rules = self._rules_of(fields, len(arrays), halo, boundary, operation)
        expected = [size + sum(pair) for size, pair in zip(self.local_shape, halo.widths, strict=True)]
        places = []
        for x, name, own_rules in zip(arrays, names, rules, strict=True):
            cut = self._cut(x.shape, axes, expected, operation, name, _ADVICE)
            if not adjoint:
                checks.check_numbers(x, operation, name, own_rules)
            places.append((cut.axes, own_rules, name))
        specs = halo.linear(places) if adjoint else tuple(places)
        return arrays, structure, Planned(self._comm, halo, specs, adjoint)

    def start(
        self,
        fields: Any,
        width: Width = 1,
        *,
        axes: Sequence[int] | None = None,
        corners: bool = True,
        boundary: Any = None,
    ) -> Request:
        """Start an exchange: cells travel to the neighbours while the program computes other cells.

        The arguments are as for `exchange`, with 100 arrays at most.

        Returns:
          A `Request`, for `finish`. It holds the fields too, so it is a pytree with their arrays.

        It raises the errors of `exchange` that come while tracing. `finish` raises the errors at run time.
        """
        arrays, structure, params = self._exchange("Grid.start", fields, width, axes, corners, boundary)
        return start_exchange("Grid.start", params, arrays, structure)

    def finish(self, request: Request, *, after: Any = None) -> Any:
        """Wait for an exchange that `start` has started.

        Args:
          request: the result of `start`. Wait for it once.
          after: an array, or a pytree of arrays, which is computed before the wait begins (`jaxmpi.wait`).

        Returns:
          The fields with filled halos, as `exchange` returns them. With `after`: `(fields, after)`.

        Raises:
          TypeError: not a request of a grid.
          jax.errors.JaxRuntimeError: at run time, as `exchange`; or the program has waited for it already.
        """
        if not is_of_grid(request):
            raise TypeError(f"Grid.finish: pass the result of Grid.start, got {request!r:.80}.")
        return wait(request, after=after)

    def pad(self, blocks: Any, width: Width = 1, *, axes: Sequence[int] | None = None) -> Any:
        """Return blocks with halos of zeros around them, which `exchange` fills. Takes a pytree of arrays, too."""
        arrays, names, structure = arguments.leaves(blocks, "Grid.pad", "blocks")
        widths = checks.widths(width, len(self.processes), "Grid.pad")
        cuts = [
            Cut(tuple(x.shape), self._axes_of(x.shape, "Grid.pad", name, axes), (0,) * len(widths))
            for x, name in zip(arrays, names, strict=True)
        ]
        return jax.tree.unflatten(
            structure, [keys.pad(x, cut.pads(widths)) for x, cut in zip(arrays, cuts, strict=True)]
        )

    # --- whole arrays ----------------------------------------------------------------------------------------------

    def scatter(
        self,
        x: Any,
        root: int | None = 0,
        *,
        width: Width = 0,
        axes: Sequence[int] | None = None,
        boundary: Any = None,
    ) -> Any:
        """Return this process's blocks of global arrays, with halos if `width` is not 0.

        Args:
          x: on root an array of shape `global_shape` along the axes of the grid, or longer by one where it is
            staggered. On other ranks a template of the same shape, whose values are not read, for example a
            `jax.ShapeDtypeStruct`. Or pytrees of these. With root None all ranks have the array.
          root: rank that sends, static. None: each rank takes the block from its own array, and nothing is sent unless
            `width` is not 0.
          width, axes, boundary: as in `exchange`, which fills the halos. Without a rule they are zero at walls.

        Returns:
          The blocks, of the same structure and dtypes.

        Raises:
          ValueError, TypeError: as in `exchange`, and if an array does not have the global shape. While tracing.
        """
        self._need_shape("Grid.scatter")
        root = None if root is None else arguments.rank(root, self._comm, "Grid.scatter", "root")
        owned = root is None or root == self._comm.rank
        arrays, names, structure = arguments.leaves(
            x, "Grid.scatter", "x", arguments.array if owned else arguments.template
        )
        cuts = [
            self._cut(array.shape, axes, self.global_shape, "Grid.scatter", name)
            for array, name in zip(arrays, names, strict=True)
        ]
        halo = Halo(self._layout, checks.widths(width, len(self.processes), "Grid.scatter"), True)
        rules = self._rules_of(x, len(arrays), halo, boundary, "Grid.scatter")
        has_halo = any(map(any, halo.widths))
        if has_halo or root is not None:
            self._check_alive("Grid.scatter")
        if has_halo:
            for array, name, own_rules in zip(arrays, names, rules, strict=True):
                checks.check_numbers(array, "Grid.scatter", name, own_rules)
        if root is None:
            blocks = [cut.block(self, array, self._comm.rank) for cut, array in zip(cuts, arrays, strict=True)]
        else:
            if owned:
                stacks: Any = [cut.divided(self, array) for cut, array in zip(cuts, arrays, strict=True)]
            else:
                # A block of the template, so that it is mapped where the template is.
                stacks = [cut.padded(self, cut.block(self, array, 0)) for cut, array in zip(cuts, arrays, strict=True)]
            parts = collectives.scatter(stacks, root, comm=self._mpi)
            blocks = [cut.cropped(self, part, self._comm.rank) for cut, part in zip(cuts, parts, strict=True)]
        if has_halo:
            padded = [keys.pad(block, cut.pads(halo.widths)) for cut, block in zip(cuts, blocks, strict=True)]
            return self.exchange(jax.tree.unflatten(structure, padded), width, axes=axes, boundary=boundary)
        return jax.tree.unflatten(structure, blocks)

    def gather(
        self,
        blocks: Any,
        root: int | None = 0,
        *,
        width: Width = 0,
        axes: Sequence[int] | None = None,
        index: Mapping[int, int] | None = None,
    ) -> Any:
        """Return global arrays from the blocks of all processes, the inverse of `scatter`; or planes and lines of them.

        Args:
          blocks: this process's block, of shape `local_shape` plus the widths along the axes of the grid, or longer by
            one where it is staggered; or a pytree of arrays. If two processes share a point, the value of the second
            one is taken.
          root: rank that receives, static. None: all ranks.
          width, axes: as in `exchange`. Halos are left out.
          index: for some axes of the grid a global index, static, as in `{0: 10}`. Then only this plane travels. A
            negative index counts from the end.

        Returns:
          On root arrays of shape `global_shape` along the axes of the grid (plus one where they are staggered), without
          the axes of `index`. On other ranks `blocks` itself.

        Raises:
          ValueError, TypeError: as in `exchange`, and for an `index` beyond an array. While tracing.
        """
        self._need_shape("Grid.gather")
        self._check_alive("Grid.gather")
        root = None if root is None else arguments.rank(root, self._comm, "Grid.gather", "root")
        arrays, names, structure = arguments.leaves(blocks, "Grid.gather", "blocks")
        widths = checks.widths(width, len(self.processes), "Grid.gather")
        fixed = checks.indices(index, len(self.processes), "Grid.gather")
        expected = [size + sum(pair) for size, pair in zip(self.local_shape, widths, strict=True)]
        planes = []
        for array, name in zip(arrays, names, strict=True):
            cut = self._cut(array.shape, axes, expected, "Grid.gather", name)
            planes.append(self._plane(cut, cut.inner(array, widths), fixed, name))
        stacks = [cut.padded(grid, block) for grid, cut, block in planes]
        if root is None:
            stacked = collectives.allgather(stacks, comm=self._mpi)
        else:
            stacked = collectives.gather(stacks, root, comm=self._mpi)
            if root != self._comm.rank:
                return jax.tree.unflatten(structure, arrays)
        wholes = [cut.joined(grid, parts) for (grid, cut, _), parts in zip(planes, stacked, strict=True)]
        return jax.tree.unflatten(
            structure,
            [x.squeeze([cut.axes[axis] for axis in fixed]) for x, (_, cut, _) in zip(wholes, planes, strict=True)],
        )

    def _plane(self, cut: "Cut", block: Any, fixed: dict[int, int], name: str) -> "tuple[Grid, Cut, Any]":
        """Return the part of a block that lies in a plane, with a grid and a cut for the plane. Along each axis of
        `fixed` one process has one cell there, and the others have none."""
        if not fixed:
            return self, cut, block
        blocks: list[Any] = list(self._layout.blocks)
        staggered, here = list(cut.staggered), [slice(None)] * len(cut.shape)
        for axis, value in fixed.items():
            size = self.global_shape[axis] + staggered[axis]
            if not -size <= value < size:
                raise ValueError(
                    f"Grid.gather: index is {value} along axis {axis}, where {name} has {size} cells: pass 0 to "
                    f"{size - 1}, or {-size} to -1 from the end."
                )
            cell, ends = value % size, self._layout.intervals(axis)
            last = len(ends) - 1  # the last process has the point behind all cells
            owner = next((i for i, (start, end) in enumerate(ends) if start <= cell < end), last)
            blocks[axis] = [int(i == owner) for i in range(len(ends))]
            first = cell - ends[owner][0] if self.coordinates[axis] == owner else 0
            here[cut.axes[axis]] = slice(first, first + blocks[axis][self.coordinates[axis]])
            staggered[axis] = 0
        plane = self._like(self.processes, blocks)
        return plane, dataclasses.replace(cut, staggered=tuple(staggered)), block[tuple(here)]

    # --- JAX's sharded arrays --------------------------------------------------------------------------------------

    def sharding(self, names: Sequence[str], ndim: int | None = None, *, axes: Sequence[int] | None = None) -> Any:
        """Return the `jax.sharding.NamedSharding` by which JAX divides global arrays in the same way as this grid.

        For programs under `python -m jaxmpi.run --collectives`, where `jax.devices()` are the devices of all ranks.

        Args:
          names: the names of the mesh axes, one for each axis of the grid.
          ndim: the number of axes of the arrays. None: as many as the grid has.
          axes: which of them belong to the grid, as in `exchange`.

        Raises:
          ValueError: blocks of unequal sizes along an axis, which JAX does not have; a communicator that does not have
            all ranks in their order; the wrong number of names.
          RuntimeError: JAX does not know the devices of all ranks, or this rank has several.
        """
        count = len(self.processes) if ndim is None else arguments.integer(ndim, "Grid.sharding", "ndim")
        return self._sharding("Grid.sharding", names, count, axes)

    def _sharding(self, function: str, names: Sequence[str], ndim: int, axes: Sequence[int] | None) -> Any:
        self._need_shape(function)
        listed = list(names) if checks.is_listed(names) else []
        different = {name for name in listed if isinstance(name, str)}
        if not len(different) == len(listed) == len(self.processes):
            raise ValueError(
                f"{function}: names is {names!r}: pass different names, one for each of the grid's "
                f"{len(self.processes)} axes, such as {tuple('xyzuvw'[: len(self.processes)])}."
            )
        for axis, blocks in enumerate(self._layout.blocks):
            if len(set(blocks)) > 1:
                raise ValueError(
                    f"{function}: blocks of {blocks} cells along axis {axis}: JAX's shardings divide an axis into "
                    "equal parts. Use a shape that the processes divide, or jaxmpi.redistribute to equal blocks."
                )
        if MPI.Comm.Compare(self._mpi, MPI.COMM_WORLD) not in (MPI.IDENT, MPI.CONGRUENT):
            raise ValueError(f"{function}: the grid's communicator does not have all ranks of COMM_WORLD, in order.")
        devices = sorted(jax.devices(), key=lambda device: device.process_index)
        if [device.process_index for device in devices] != list(range(self._comm.size)):
            raise RuntimeError(
                f"{function}: JAX knows {len(devices)} devices of {jax.process_count()} processes, and the grid has "
                f"{self._comm.size} ranks, each of which has one. Start the program with "
                "'python -m jaxmpi.run --collectives mpi' (docs/sharded.md)."
            )
        mesh = jax.sharding.Mesh(np.array(devices).reshape(self.processes), tuple(listed))
        spec: list[str | None] = [None] * ndim
        for axis, name in zip(self._axes_of((0,) * ndim, function, "an array", axes), listed, strict=True):
            spec[axis] = name
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

    def to_sharded(self, blocks: Any, names: Sequence[str], *, axes: Sequence[int] | None = None) -> Any:
        """Make JAX's sharded arrays whose parts are the blocks of all ranks. Nothing is sent or copied.

        Args:
          blocks: this rank's block, of shape `local_shape` along the axes of the grid, not traced; or a pytree of
            arrays.
          names: the names of the mesh axes, one for each axis of the grid.
          axes: which axes of the arrays belong to the grid, as in `exchange`.

        Returns:
          Arrays of shape `global_shape` along the axes of the grid, divided by `sharding(names, ...)`.

        Raises:
          TypeError: traced arrays.
          ValueError, RuntimeError: as `sharding`, or a block does not fit the grid.
        """
        self._need_shape("Grid.to_sharded")
        arrays, paths, structure = arguments.leaves(blocks, "Grid.to_sharded", "blocks")
        sharded = []
        for x, name in zip(arrays, paths, strict=True):
            if internals.is_tracer(x):
                raise TypeError(
                    f"Grid.to_sharded: {name} is traced: call it outside of compiled functions, which take either "
                    "arrays of this process or sharded ones."
                )
            cut = self._cut(x.shape, axes, self.local_shape, "Grid.to_sharded", name)
            if any(cut.staggered):
                raise ValueError(
                    f"Grid.to_sharded: {name} has shape {x.shape}: staggered blocks share points, parts do not."
                )
            sharding = self._sharding("Grid.to_sharded", names, x.ndim, axes)
            shape = cut._with(self.global_shape)
            sharded.append(
                jax.make_array_from_single_device_arrays(shape, sharding, [jax.device_put(x, jax.local_devices()[0])])
            )
        return jax.tree.unflatten(structure, sharded)

    def from_sharded(self, arrays: Any, *, axes: Sequence[int] | None = None) -> Any:
        """Return this rank's blocks of JAX's sharded arrays. Nothing is sent or copied.

        Args:
          arrays: a sharded array whose parts are the blocks of this grid, for example one that `sharding(...)` divides;
            or a pytree of these.
          axes: which axes of the arrays belong to the grid, as in `exchange`.

        Returns:
          The blocks, on this rank's device.

        Raises:
          TypeError: not an array of JAX, or traced.
          ValueError: its part here is not this rank's block.
        """
        self._need_shape("Grid.from_sharded")
        leaves, structure = jax.tree.flatten(arrays)
        return jax.tree.unflatten(structure, [self._part_of(x, axes) for x in leaves])

    def _part_of(self, x: Any, axes: Sequence[int] | None) -> jax.Array:
        if internals.is_tracer(x) or not isinstance(x, jax.Array):
            raise TypeError(f"Grid.from_sharded: a sharded array of JAX is needed, not traced, got {type(x).__name__}.")
        places = self._axes_of(x.shape, "Grid.from_sharded", "the array", axes)
        expected = [slice(0, size) for size in x.shape]
        for place, own in zip(places, self.slices, strict=True):
            expected[place] = own
        (shard, *others) = x.addressable_shards
        index = shard.index[: x.ndim]  # for keys it has the axes of their words, too
        actual = [slice(*own.indices(size)[:2]) for own, size in zip(index, x.shape, strict=True)]
        sizes = tuple(x.shape[place] for place in places)
        if others or sizes != self.global_shape or actual != expected:
            show = lambda slices: ", ".join(f"{i.start}:{i.stop}" for i in slices)  # noqa: E731
            raise ValueError(
                f"Grid.from_sharded: the part of this process is [{show(actual)}] of shape {x.shape}, and its block by "
                f"the grid [{show(expected)}]. Divide the array as the grid: jax.device_put(x, grid.sharding(names, "
                "x.ndim))."
            )
        return shard.data

    def _cut(
        self, shape: Sequence[int], axes: Any, expected: Sequence[int], function: str, name: str, advice: str = ""
    ) -> "Cut":
        """Return the cut of an array. Raise ValueError, with the advice, if its sizes are not the expected ones."""
        places = self._axes_of(shape, function, name, axes)
        extra = [shape[place] - size for place, size in zip(places, expected, strict=True)]
        if any(more not in (0, 1) for more in extra):
            raise ValueError(
                f"{function}: {name} has {tuple(shape[place] for place in places)} cells along the axes of the grid, "
                f"where it needs {tuple(expected)}, or one more along an axis where it is staggered.{advice}"
            )
        return Cut(tuple(shape), places, tuple(extra))

    def _rules_of(self, fields: Any, count: int, halo: Halo, boundary: Any, function: str) -> list[Rules]:
        """Return the rules of each field. Check that no block is smaller than the part of it that its halo copies."""
        dimensions = len(self.processes)
        if checks.is_of_all(boundary):
            rules = [checks.rules(boundary, dimensions, function)] * count
        else:
            try:
                each = jax.tree.map(
                    lambda entry, part: [entry] * len(jax.tree.leaves(part)),
                    boundary,
                    arguments.only_arrays(fields),
                    is_leaf=checks.is_of_all,
                )
            except ValueError as error:
                raise ValueError(
                    f"{function}: boundary does not have the structure of the fields. Pass one for all fields, or a "
                    f"tree like the fields with one for each: {error}"
                ) from error
            listed = jax.tree.leaves(each, is_leaf=lambda x: type(x) is list)
            rules = [checks.rules(own_rules, dimensions, function) for part in listed for own_rules in part]
        for own_rules in {*rules} or {checks.rules(None, dimensions, function)}:
            self._check_blocks(halo, own_rules, function)
        return rules

    def _check_blocks(self, halo: Halo, rules: Rules, function: str) -> None:
        for axis, (blocks, (low, high), sides) in enumerate(zip(self._layout.blocks, halo.widths, rules, strict=True)):
            for at, size in enumerate(blocks):
                # Cells that the neighbours copy from a block, and cells that are copied within it at a wall.
                first, last = (self._layout.is_wall(axis, at, side) for side in (-1, 1))
                needed = max(0 if last else low, 0 if first else high)
                needed = max(
                    needed, checks.reach(sides[0], low) if first else 0, checks.reach(sides[1], high) if last else 0
                )
                if size < needed:
                    raise ValueError(
                        f"{function}: a block of {size} cells along axis {axis} (process {at} of {len(blocks)} there) "
                        f"is smaller than the halo that is copied from it, {needed}: use fewer processes along this "
                        "axis, larger arrays, or a narrower halo."
                    )

    def _axes_of(
        self, shape: Sequence[int], function: str, name: str, axes: Sequence[int] | None, argument: str = "axes"
    ) -> tuple[int, ...]:
        """Return the grid's axes in an array, from the end, so that an axis in front does not change them."""
        dimensions = len(self.processes)
        chosen = range(-dimensions, 0) if axes is None else checks.axes(axes, function, argument)
        if len(chosen) != dimensions:
            raise ValueError(
                f"{function}: {argument} is {axes}: the grid has {dimensions} axes, pass one for each of them."
            )
        for axis in chosen:
            if not -len(shape) <= axis < len(shape):
                raise ValueError(
                    f"{function}: {name} has shape {tuple(shape)}, and no axis {axis}: the grid has {dimensions} axes, "
                    f"and {argument}= says which axes of the array belong to it."
                )
        places = tuple(axis if axis < 0 else axis - len(shape) for axis in chosen)
        if len(set(places)) != dimensions:
            raise ValueError(f"{function}: {argument} is {axes}: an axis is named twice.")
        return places


_ADVICE = (
    " Pass the block with its halo, for example from grid.scatter(x, width=...) or grid.pad(block, width). In "
    "width=(a, b) a is for the first axis and b for the second; for (before, behind) along each axis it is "
    "[(a, b)] * 2."
)


def _added(x: Any, operation: str, name: str) -> jax.Array:
    return arguments.reducible(x, arguments.reduction(MPI.SUM, operation), operation, name)


@dataclass(frozen=True)
class Cut:
    """The cut of arrays of one shape into blocks. It has the axes that belong to the grid, from the end, and says along
    which of them the array is longer by one."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    staggered: tuple[int, ...]

    def _replace(self, values: Sequence[Any], along: Iterable[Any]) -> list[Any]:
        """Return values for all axes of an array, with others along the axes of the grid."""
        replaced = list(values)
        for axis, value in zip(self.axes, along, strict=True):
            replaced[axis] = value
        return replaced

    def _with(self, sizes: Iterable[int]) -> tuple[int, ...]:
        """Return the shape with other sizes along the axes of the grid."""
        return tuple(self._replace(self.shape, sizes))

    def part(self, x: Any, slices: Iterable[slice]) -> Any:
        """Return the part of an array with these cells along the axes of the grid."""
        return x[tuple(self._replace([slice(None)] * len(self.shape), slices))]

    def largest(self, grid: Grid) -> tuple[int, ...]:
        """Return the shape that contains every block."""
        blocks = zip(grid._layout.blocks, self.staggered, strict=True)
        return self._with(max(sizes) + extra for sizes, extra in blocks)

    def block(self, grid: Grid, x: Any, rank: int) -> Any:
        """Return the block of a rank."""
        return self.part(x, (slice(start, start + size) for start, size in grid._extents(rank, self.staggered)))

    def inner(self, x: Any, widths: halos.Widths) -> Any:
        """Return a block without its halo."""
        pairs = zip(self.axes, widths, strict=True)
        return self.part(x, (slice(low, x.shape[axis] - high) for axis, (low, high) in pairs))

    def padded(self, grid: Grid, block: Any) -> Any:
        """Return a block in the shape that contains every block."""
        return keys.pad(block, [(0, whole - size) for whole, size in zip(self.largest(grid), block.shape, strict=True)])

    def cropped(self, grid: Grid, x: Any, rank: int) -> Any:
        """Return the block of a rank from the shape that contains every block."""
        return self.part(x, (slice(size) for _, size in grid._extents(rank, self.staggered)))

    def pads(self, widths: halos.Widths) -> list[tuple[int, int]]:
        """Return the argument of `jnp.pad` that puts a halo around a block."""
        return self._replace([(0, 0)] * len(self.shape), widths)

    def divided(self, grid: Grid, x: Any) -> Any:
        """Return the blocks of all ranks, each in the shape that contains every block."""
        count, sizes = len(self.axes), self._sizes(grid)
        # Replace each axis of the grid by two: the blocks, and the cells of a block.
        for place in sorted(sizes, reverse=True):
            x = _divided(x, place, *sizes[place])
        places = self._positions_of_blocks()
        x = jnp.moveaxis(x, places, range(count))
        return x.reshape(math.prod(grid.processes), *x.shape[count:])

    def joined(self, grid: Grid, parts: Any) -> Any:
        """Return the global array from all blocks, in the shape that contains every block."""
        count, sizes = len(self.axes), self._sizes(grid)
        x = parts.reshape(*grid.processes, *parts.shape[1:])
        x = jnp.moveaxis(x, range(count), self._positions_of_blocks())
        for place in sorted(sizes):
            x = _joined(x, place, *sizes[place])
        return x

    def _sizes(self, grid: Grid) -> dict[int, tuple[tuple[int, ...], int]]:
        """Return the sizes of the blocks along each axis, by place, and whether it is staggered."""
        return dict(zip(self._positions(), zip(grid._layout.blocks, self.staggered, strict=True), strict=True))

    def _positions(self) -> list[int]:
        """Return the axes of the grid, from the front."""
        return [axis % len(self.shape) for axis in self.axes]

    def _positions_of_blocks(self) -> list[int]:
        """Return the places of the axes of blocks, if each stands before the axis of the cells."""
        places = self._positions()
        return [place + sum(other < place for other in places) for place in places]


def _runs(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return runs of adjacent blocks of one size: the first, how many, their size."""
    starts = [i for i, size in enumerate(sizes) if i == 0 or size != sizes[i - 1]]
    return [(i, end - i, sizes[i]) for i, end in zip(starts, [*starts[1:], len(sizes)], strict=True)]


def _divided(x: Any, axis: int, sizes: Sequence[int], staggered: int) -> Any:
    """Replace an axis by two: blocks of these sizes, each longer by one if `staggered`, and cells with zeros behind."""
    most, start, runs = max(sizes) + staggered, 0, []
    for _, count, size in _runs(sizes):
        end, shape = start + count * size, list(x.shape)
        shape[axis : axis + 1] = [count, size]
        run = slice_in_dim(x, start, end, axis=axis).reshape(shape)
        if staggered:  # the first cell behind each block
            shape[axis + 1] = 1
            behind = slice_in_dim(x, start + size, end + 1, max(size, 1), axis)
            run = jnp.concatenate([run, jnp.broadcast_to(jnp.expand_dims(behind, axis + 1), shape)], axis + 1)
        pads = [(0, 0)] * run.ndim
        pads[axis + 1] = (0, most - run.shape[axis + 1])
        runs.append(keys.pad(run, pads))
        start = end
    return jnp.concatenate(runs, axis)


def _joined(x: Any, axis: int, sizes: Sequence[int], staggered: int) -> Any:
    """Join two axes again. If two blocks share a point, the value of the second one is taken."""
    runs = []
    for first, count, size in _runs([*sizes[:-1], sizes[-1] + staggered]):
        run = slice_in_dim(slice_in_dim(x, first, first + count, axis=axis), 0, size, axis=axis + 1)
        runs.append(run.reshape(*x.shape[:axis], count * size, *x.shape[axis + 2 :]))
    return jnp.concatenate(runs, axis)

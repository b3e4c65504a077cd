"""`jaxmpi.survive.Replica`: a state in the memory of the ranks, each of which keeps copies of other ranks' blocks.

A save is a block of bytes for each rank, with all fields without their halos. Rank r sends its block to ranks r + 1 to
r + copies, modulo the number of ranks. The next call waits for these messages. It begins with a reduction: after that,
all ranks have the copies of the previous save, and older saves are dropped. Until then each rank keeps two saves.

After a death the living ranks exchange lists of the saves and blocks that they have. The newest save of which no block
is missing counts. Both sides of a message compute the content from the two divisions. A spare rank that has stepped in
has nothing. Another rank sends it the values that are the same on all ranks, and it receives blocks like any rank.
"""

import dataclasses
import math
import pickle
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxmpi._files import trees
from jaxmpi._grid import arguments as checks
from jaxmpi._grid.divisions import Division
from jaxmpi._grid.grid import Cut, Grid, Width
from jaxmpi._grid.halos import Layout, Widths
from jaxmpi._jax import internals
from jaxmpi._mpi import agreement, communicators, survival
from jaxmpi._mpi.communicators import Local
from jaxmpi._mpi.private_comms import clone_of
from jaxmpi._mpi.watch import waiting
from jaxmpi._primitive import arguments, keys

_COPIES, _BLOCKS = 3301, 3302
"""Tags on the clone of the communicator of the grid."""
_MOST = 1 << 30
"""The largest number of bytes in a message."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)


@dataclass(frozen=True)
class _Field:
    """A leaf that is divided among the ranks."""

    dtype: np.dtype[Any]
    is_numpy: bool
    cut: Cut
    """The axes of a block. The sizes along the axes of the grid are zeros."""
    widths: Widths

    def block(self, layout: Layout, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's block, without halo."""
        return self.cut._with(map(sum, zip(layout.block(rank), self.cut.staggered, strict=True)))

    def bytes(self, layout: Layout, rank: int) -> int:
        return math.prod(self.block(layout, rank)) * self.dtype.itemsize

    def with_halo(self, block: Any) -> Any:
        """Return the value of the leaf, with zeros in the halo."""
        whole = np.pad(block, self.cut.pads(self.widths))
        return whole if self.is_numpy else jnp.asarray(whole)


@dataclass(frozen=True)
class _Same:
    """A leaf that is the same on all ranks."""

    value: Any
    impl: Any
    """The implementation of random keys; None for other values."""
    is_jax: bool

    @staticmethod
    def from_leaf(x: Any) -> "_Same":
        if not isinstance(x, jax.Array | np.ndarray):
            return _Same(x, None, False)
        impl = keys.impl(x.dtype) if keys.is_key(x) else None
        return _Same(np.array(keys.words(x)), impl, isinstance(x, jax.Array))

    def get(self) -> Any:
        if self.impl is not None:
            return jax.random.wrap_key_data(jnp.asarray(self.value), impl=self.impl)
        if self.is_jax:
            return jnp.asarray(self.value)
        return self.value.copy() if isinstance(self.value, np.ndarray) else self.value


@dataclass
class _Saved:
    """The part of a save that this rank has."""

    number: int
    layout: Layout
    rank: int
    """The rank in the grid of the save."""
    same: list[_Same]
    blocks: dict[int, Any]
    """The block of this rank and the blocks that it keeps for others, by their ranks. In a report: None for each."""
    under_way: dict[int, tuple[Bytes, list[MPI.Request]]] = field(default_factory=dict)
    """Blocks of other ranks that have not arrived yet, by their ranks, and the requests for them."""
    sends: list[MPI.Request] = field(default_factory=list)
    complete: bool = False
    """Whether this rank knows that all copies have arrived."""


@dataclass(frozen=True)
class _Report:
    """The report of a rank before a restore."""

    last: int
    """The number of the last save that the rank knows."""
    saves: list[_Saved]
    stepped_in: bool

    def find(self, number: int) -> _Saved | None:
        return next((save for save in self.saves if save.number == number), None)


_abandoned: list[_Saved] = []
"""Saves of replicas that have been dropped: MPI may still write to the memory of the blocks, or read it."""


def _abandon(kept: list[_Saved]) -> None:
    """Keep the memory of the saves of a Replica that is dropped, without a call of MPI: another may be under way."""
    _abandoned.extend(saved for saved in kept if saved.sends or saved.under_way)


def _travels(saved: _Saved) -> bool:
    """Return whether some of the messages of a save are not complete."""
    requests = [*saved.sends, *(request for _, some in saved.under_way.values() for request in some)]
    return not all(done or error for done, error in [agreement.capture(request.Test) for request in requests])


class Replica(Local):
    """A state in the memory of the ranks that outlives the death of ranks: each rank keeps copies of others' blocks.

    The constructor saves `tree`, unless `save=False`. Each save sends this rank's blocks to the next ranks, one message
    to each. The program computes while they travel, and the next call waits for them. A save counts only when all
    blocks of it have been copied. Until then the previous save is kept, too. This takes (1 + copies) times the memory
    of the blocks, on the host, and twice that during a save.

    All ranks of the grid make it and call the methods in the same order, outside of compiled functions.

    Args:
      tree: a pytree. Arrays with at least as many axes as the grid are this rank's blocks of fields, as in
        `Grid.exchange`, and may be staggered. Other arrays, numbers and random keys are the same on all ranks. They
        are not compared: a rank gets back what it saved, and a rank that steps in gets the values of another one.
      grid: the `Grid`; or a tree of it and None that is a prefix of `tree`, for example `{"state": grid, "weights":
        None}`. None: the same on all ranks, however many axes the array has.
      width: the width of the halo of the fields, as in `Grid.exchange`; or a dict with the widths for some keys of the
        tree, as in `jaxmpi.io.save`. Halos are not saved.
      axes: which axes of the fields belong to the grid, as in `Grid.exchange`.
      copies: how many other ranks keep each rank's blocks. As many neighbouring ranks may die at the same time.
      save: False: `tree` only describes what will be saved. Nothing is communicated, and `restore` returns None before
        the first save. Use it in programs with spare ranks, because a rank that steps in has nothing to save. Fields
        may then be `jax.ShapeDtypeStruct`, as from `jax.eval_shape`, if making the arrays would communicate.

    Raises:
      ValueError, TypeError: a field does not fit the grid, or an argument has the wrong type. On this rank, before
        anything is sent.
      ProcessFailed: a rank has died.
    """

    def __init__(
        self,
        tree: Any,
        *,
        grid: Any,
        width: Width | dict[str, Any] = 0,
        axes: Sequence[int] | None = None,
        copies: int = 1,
        save: bool = True,
    ) -> None:
        internals.check_outside("Replica")
        unique = {id(leaf): leaf for leaf in jax.tree.leaves(grid, is_leaf=trees.is_division) if leaf is not None}
        grids = list(unique.values())
        if not grids or not all(isinstance(other, Grid) and other == grids[0] for other in grids):
            raise TypeError(
                "Replica: grid must be a jaxmpi.Grid, or a tree of one and None that is a prefix of the tree. For "
                "other states use jaxmpi.io.checkpoint."
            )
        self._copies = arguments.integer(copies, "Replica", "copies")
        if self._copies < 1:
            raise ValueError(f"Replica: copies is {copies}: pass how many other ranks keep each block, 1 or more.")
        self._grid: Grid = grids[0]
        self._divisions, self._width, self._axes = grid, width, axes
        if save and any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree)):
            raise TypeError("Replica: the tree has shapes and no arrays: pass arrays, or save=False.")
        self._fields, self._structure = self._described(tree, "Replica")
        self._kept: list[_Saved] = []
        weakref.finalize(self, _abandon, self._kept).atexit = False
        self._last = 0
        """The number of the last save that this rank knows. All ranks know the same after a restore."""
        self._began_empty = not save
        if save:
            self._save(tree, "Replica")

    def save(self, tree: Any) -> None:
        """Save a tree with the same structure as in the constructor. Return while the messages are still travelling.

        Args:
          tree: of the same structure, with blocks of the same shapes and dtypes. It may be changed afterwards.

        Raises:
          ValueError, TypeError: the structure differs, or a leaf has another shape or dtype, or is of NumPy instead of
            JAX. Or `recover` has given up the communicator, and nothing has been restored after that. On this rank,
            before anything is sent.
          ProcessFailed: a rank has died, now or while the previous save was copied. This save does not count.
        """
        internals.check_outside("Replica.save")
        self._grid._check_alive("Replica.save")
        fields, structure = self._described(tree, "Replica.save")
        if structure != self._structure or fields != self._fields:
            raise ValueError(
                "Replica.save: the tree differs from the one that made the Replica. Pass one of the same structure, "
                "whose arrays have the same shapes and dtypes and are again of JAX or NumPy, or make another Replica."
            )
        self._save(tree, "Replica.save")

    def restore(self, grid: Grid) -> Any:
        """Return the last saved tree of which no block is lost, divided by `grid`. Later saves use this grid, too.

        After a death call it with a grid on the communicator that `jaxmpi.survive.recover` has made. When it returns,
        the ranks of the new grid keep the copies. If one of them dies in between, call it again, with the next grid.
        Without a death it goes back to the last save.

        Args:
          grid: of the same global shape. A rank that was not in the grid of the save, for example a spare rank that has
            stepped in, must have made a Replica like the others.

        Returns:
          The tree. Blocks have halos of zeros, as wide as before; `grid.exchange` fills them. With `save=False` None,
          on all ranks, if no save has been completed.

        Raises:
          RuntimeError: a rank and all ranks with copies of its blocks have died. On all ranks. Or some ranks call
            `save` while others call this.
          ValueError, TypeError: `grid` has another global shape, or is no grid. On this rank; nothing is sent.
          ProcessFailed: another rank has died.
        """
        if not isinstance(grid, Grid):
            raise TypeError(f"Replica.restore: grid must be a jaxmpi.Grid, got {grid!r:.80}.")
        grid._check_alive("Replica.restore")
        if grid.global_shape != self._grid.global_shape:
            raise ValueError(
                f"Replica.restore: the grid has global shape {grid.global_shape}, and the saved state has "
                f"{self._grid.global_shape}. Pass a grid of the same shape."
            )
        for saved in self._kept:
            _collect(saved)
        self._grid = grid
        with survival.failing(grid.comm, "Replica.restore"), waiting(grid._comm, "Replica.restore"):
            self._together(restores=True)
            comm = clone_of(grid.comm)
            saves = [dataclasses.replace(s, same=[], blocks=dict.fromkeys(s.blocks)) for s in self._kept]
            reports = agreement.gather_objects(comm, _Report(self._last, saves, communicators.has_stepped_in()))
            self._last = max(report.last for report in reports)
            newest = _newest(reports)
            if newest is None:  # an error, unless there was no save as far as the ranks know
                all_are_new = all(report.stepped_in and not report.saves for report in reports)
                was_complete = any(save.complete for report in reports for save in report.saves)
                if all_are_new or not self._began_empty or was_complete:
                    raise RuntimeError(_lost(reports))
                return None
            number, holders = newest
            saved = self._known(comm, number, reports)
            restored = self._begin(self._redistributed(comm, saved, holders), saved.same)
            self._finish(restores=True)
        blocks = iter(self._unpacked(restored.blocks[restored.rank], restored.layout, restored.rank))
        same = iter(restored.same)
        leaves = [next(same).get() if spec is None else spec.with_halo(next(blocks)) for spec in self._fields]
        return jax.tree.unflatten(self._structure, leaves)

    # --- the tree --------------------------------------------------------------------------------------------------

    def _described(self, tree: Any, operation: str) -> tuple[list[_Field | None], Any]:
        """Return the structure and the fields, with None for each leaf that is the same on all ranks. Raise TypeError
        or ValueError if a field does not fit the grid."""
        grid = self._grid
        listed, structure = jax.tree_util.tree_flatten_with_path(tree)
        divisions = trees.spread(self._divisions, tree, operation)
        widths = trees.spread_width(self._width, tree, operation)
        fields: list[_Field | None] = []
        for (path, x), division, width in zip(listed, divisions, widths, strict=True):
            name, dimensions = f"tree{jax.tree_util.keystr(path)}", len(grid.processes)
            if division is None or not isinstance(x, _ARRAYS) or x.ndim < dimensions:
                fields.append(None)
                continue
            if keys.is_key(x):
                raise TypeError(
                    f"{operation}: {name} has random keys for each cell. Save jax.random.key_data of them, or say by "
                    "grid= that it is the same on all ranks."
                )
            pairs = checks.widths(width, dimensions, operation)
            expected = [size + sum(pair) for size, pair in zip(grid.local_shape, pairs, strict=True)]
            advice = " width= gives the halo, axes= the axes of the grid, grid= the leaves that are no fields."
            cut = grid._cut(x.shape, self._axes, expected, operation, name, advice)
            cut = dataclasses.replace(cut, shape=cut._with([0] * dimensions))
            fields.append(_Field(np.dtype(x.dtype), isinstance(x, np.ndarray), cut, pairs))
        return fields, structure

    def _room(self, layout: Layout, rank: int) -> Bytes:
        """Return memory for the blocks of all fields of a rank, one after the other."""
        return np.empty(sum(spec.bytes(layout, rank) for spec in self._fields if spec is not None), np.uint8)

    def _unpacked(self, packed: Bytes, layout: Layout, rank: int) -> list[Any]:
        """Return the blocks in the memory of `_room`, as views of it."""
        blocks, start = [], 0
        for spec in filter(None, self._fields):
            end = start + spec.bytes(layout, rank)
            blocks.append(packed[start:end].view(spec.dtype).reshape(spec.block(layout, rank)))
            start = end
        return blocks

    # --- saving ----------------------------------------------------------------------------------------------------

    def _save(self, tree: Any, operation: str) -> None:
        with survival.failing(self._grid.comm, operation):
            layout, rank, same = self._grid._layout, self._grid.comm.rank, []
            packed = self._room(layout, rank)
            places = iter(self._unpacked(packed, layout, rank))
            for spec, x in zip(self._fields, jax.tree.leaves(tree), strict=True):
                if spec is None:
                    same.append(_Same.from_leaf(x))
                else:
                    next(places)[...] = spec.cut.inner(np.asarray(x), spec.widths)
            with waiting(self._grid._comm, operation):
                self._finish(restores=False)
                self._begin(packed, same)

    def _begin(self, packed: Bytes, same: list[_Same]) -> _Saved:
        """Start to send this rank's blocks, and to receive the blocks of others."""
        comm, layout = clone_of(self._grid.comm), self._grid._layout
        rank, size = comm.rank, comm.size
        _abandoned[:] = filter(_travels, _abandoned)
        self._last += 1
        saved = _Saved(self._last, layout, rank, same, {rank: packed})
        self._kept.append(saved)
        for distance in range(1, min(self._copies, size - 1) + 1):
            other = (rank - distance) % size
            room = self._room(layout, other)
            saved.under_way[other] = room, [comm.Irecv(part, other, _COPIES) for part in _parts(room)]
            saved.sends += [comm.Isend(part, (rank + distance) % size, _COPIES) for part in _parts(packed)]
        return saved

    def _finish(self, restores: bool) -> None:
        """Wait until all ranks have the copies of the last save, and drop the saves before it."""
        for last in self._kept[-1:]:
            while last.under_way:
                other, (room, requests) = last.under_way.popitem()  # first: after an error nobody waits for it again
                _wait(requests)
                last.blocks[other] = room
            _wait(last.sends)
            last.sends = []
        self._together(restores)
        for last in self._kept[-1:]:
            last.complete = True
        del self._kept[:-1]

    def _together(self, restores: bool) -> None:
        """Wait for all ranks. Raise RuntimeError on all, if some of them restore and others save."""
        comm = clone_of(self._grid.comm)
        (restoring,) = agreement.sums(comm, "Replica", None, restores)
        if restoring not in (0, comm.size):
            raise RuntimeError(
                "Replica: some ranks save, others restore. Call restore on all ranks after jaxmpi.survive.recover. "
                "With spare ranks, make the Replica with save=False, because a rank that steps in begins with restore."
            )

    # --- restoring -------------------------------------------------------------------------------------------------

    def _known(self, comm: MPI.Intracomm, number: int, reports: list[_Report]) -> _Saved:
        """Return this rank's part of a save. A rank that has no part gets a description from another rank."""
        saved = next((save for save in self._kept if save.number == number), None)
        saves = [report.find(number) for report in reports]
        if None not in saves:
            assert saved is not None
            return saved
        described = [("the list of fields", repr(self._fields)), ("the structure of the tree", str(self._structure))]
        agreement.check_equal(comm, "Replica.restore", lambda: (None, described))
        first, save = next((rank, save) for rank, save in enumerate(saves) if save is not None)
        same = saved.same if saved is not None else None
        same = pickle.loads(agreement.on_root(comm, "Replica.restore", lambda: pickle.dumps(same), first))
        return saved or _Saved(number, save.layout, save.rank, same, {})

    def _redistributed(self, comm: MPI.Intracomm, saved: _Saved, holders: list[int]) -> Bytes:
        """Return this rank's blocks by the new grid. `holders`: the new rank that gives the blocks of each old one."""
        packed = self._room(self._grid._layout, comm.rank)
        requests, received = [], []
        for other in range(comm.size):
            for piece in self._pieces(saved, holders, packed, other, comm.rank, False):
                message = np.empty(piece.nbytes, np.uint8)
                received.append((piece, message))
                requests += [comm.Irecv(part, other, _BLOCKS) for part in _parts(message)]
        for other in range(comm.size):
            for piece in self._pieces(saved, holders, packed, comm.rank, other, True):
                message = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
                requests += [comm.Isend(part, other, _BLOCKS) for part in _parts(message)]
        _wait(requests)
        for piece, message in received:
            piece[...] = message.view(piece.dtype).reshape(piece.shape)
        return packed

    def _pieces(
        self, saved: _Saved, holders: list[int], packed: Bytes, source: int, target: int, sends: bool
    ) -> Iterator[Any]:
        """Yield the pieces that rank `source` has for rank `target` of the new grid. The sender gets views of the
        blocks that it has, the receiver views of its new block in `packed`."""
        new = self._grid._layout
        for old in [old for old, holder in enumerate(holders) if holder == source]:
            blocks = (
                self._unpacked(saved.blocks[old], saved.layout, old) if sends else self._unpacked(packed, new, target)
            )
            for spec, block in zip(filter(None, self._fields), blocks, strict=True):
                boxes = _overlap(spec, saved.layout, old, new, target)
                if boxes is not None:
                    yield spec.cut.part(block, (pair[0 if sends else 1] for pair in boxes))


def _wait(requests: Sequence[MPI.Request]) -> None:
    """Wait for all requests, and raise the first error. Wait one by one, because a wait for several reports the class
    of an error only in their statuses. A failed request becomes null: a second wait returns as if it had completed."""
    errors = [agreement.capture(request.Wait)[1] for request in requests]
    for error in errors:
        if error is not None:
            raise error


def _parts(message: Bytes) -> list[Bytes]:
    """Cut a message into parts whose bytes an int counts. An empty message has no parts."""
    return [message[start : start + _MOST] for start in range(0, len(message), _MOST)]


def _overlap(spec: _Field, old: Layout, source: int, new: Layout, target: int) -> list[tuple[slice, slice]] | None:
    """Return the cells of an old block that are in a new one, along each axis, as slices of both. None: no cells."""
    overlaps = []
    before, after = old.coordinates(source), new.coordinates(target)
    for axis, extra in enumerate(spec.cut.staggered):
        first, beyond = Division(old, ()).owned(axis, bool(extra))[before[axis]]
        start, end = Division(new, ()).contained(axis, bool(extra))[after[axis]]
        low, high = max(first, start), min(beyond, end)
        if low >= high:
            return None
        overlaps.append((slice(low - first, high - first), slice(low - start, high - start)))
    return overlaps


def _collect(saved: _Saved) -> None:
    """Take the blocks of a save that have arrived, after a death."""
    for other, (room, requests) in saved.under_way.items():
        done = [agreement.capture(request.Wait)[1] is None for request in requests]
        if all(done):
            saved.blocks[other] = room
    for request in saved.sends:
        agreement.capture(request.Wait)
    saved.under_way, saved.sends = {}, []


def _holders(reports: list[_Report], number: int) -> list[int | None]:
    """Return the rank that gives each block of a save: the nearest rank that has it. None: the block is lost."""
    saves = [(rank, save) for rank, report in enumerate(reports) if (save := report.find(number)) is not None]
    ranks = math.prod(saves[0][1].layout.dims)
    holders: list[int | None] = []
    for old in range(ranks):
        near = [((save.rank - old) % ranks, rank) for rank, save in saves if old in save.blocks]
        holders.append(min(near)[1] if near else None)
    return holders


def _newest(reports: list[_Report]) -> tuple[int, list[int]] | None:
    """Return the number of the newest whole save, and the rank that gives each of its blocks. None if no save is whole.
    All ranks get the same result, because all have the same reports."""
    for number in sorted({save.number for report in reports for save in report.saves}, reverse=True):
        holders = _holders(reports, number)
        if None not in holders:
            return number, [rank for rank in holders if rank is not None]
    return None


def _lost(reports: list[_Report]) -> str:
    oldest = min((save.number for report in reports for save in report.saves), default=None)
    holders = [] if oldest is None else _holders(reports, oldest)
    listed = [str(old) for old, rank in enumerate(holders) if rank is None]
    whose = f"rank{'s' * (len(listed) > 1)} {', '.join(listed)} of {len(holders)}" if listed else "any rank"
    return (
        f"Replica.restore: the saved state is lost. All ranks that had the blocks of {whose} have died. Keep more "
        "copies, by copies=, or save the state in files, by jaxmpi.io.checkpoint."
    )

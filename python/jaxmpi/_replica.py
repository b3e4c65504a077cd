"""`jaxmpi.Replica`: a state in the memory of the ranks, each of which keeps copies of other ranks' blocks.

A save is a block of bytes for each rank, of all fields without their halos. Rank r sends its own to ranks r + 1 to
r + copies, modulo the number of ranks, and the messages are waited for by the next call. That begins with a reduction,
after which all ranks have the copies of the save before, so what is older is dropped. Until then two saves are kept.

After a death the ranks that live tell each other which blocks of which saves they have, and the newest save counts of
which no block is missing. What a rank has for another one is known to both, from the two divisions. A spare rank that
has stepped in has nothing: it is told what is the same on all ranks, and gets blocks as any other.
"""

import math
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxmpi._files import trees
from jaxmpi._grid import arguments as given
from jaxmpi._grid.divisions import Division
from jaxmpi._grid.grid import Grid, Width
from jaxmpi._grid.halos import Layout, Widths
from jaxmpi._jax import internals
from jaxmpi._mpi import agreement, communicators, failures, survival
from jaxmpi._mpi.communicators import Local
from jaxmpi._mpi.private_comms import clone_of
from jaxmpi._mpi.watch import waiting
from jaxmpi._primitive import arguments, keys

_COPIES, _BLOCKS = 3301, 3302
"""Tags on the clone of the grid's communicator."""
_MOST = 1 << 30
"""Bytes of a message at most."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)


@dataclass(frozen=True)
class _Field:
    """A leaf that is divided among the ranks."""

    dtype: np.dtype[Any]
    is_numpy: bool
    shape: tuple[int, ...]
    """The shape of a block, whose sizes along `axes` do not count."""
    axes: tuple[int, ...]
    """The axes that are the grid's, from the end."""
    staggered: tuple[int, ...]
    widths: Widths

    def block(self, layout: Layout, rank: int) -> tuple[int, ...]:
        """The shape of a rank's block, without halo."""
        shape = list(self.shape)
        for axis, size, extra in zip(self.axes, layout.block(rank), self.staggered, strict=True):
            shape[axis] = size + extra
        return tuple(shape)

    def bytes(self, layout: Layout, rank: int) -> int:
        return math.prod(self.block(layout, rank)) * self.dtype.itemsize

    def inner(self, x: Any) -> Any:
        index = [slice(None)] * len(self.shape)
        for axis, (low, high) in zip(self.axes, self.widths, strict=True):
            index[axis] = slice(low, x.shape[axis] - high)
        return x[tuple(index)]

    def with_halo(self, block: Any) -> Any:
        """The value of the leaf, in whose halo there are zeros."""
        pads = [(0, 0)] * len(self.shape)
        for axis, pair in zip(self.axes, self.widths, strict=True):
            pads[axis] = pair
        whole = np.zeros([size + sum(pair) for size, pair in zip(block.shape, pads, strict=True)], self.dtype)
        self.inner(whole)[...] = block
        return whole if self.is_numpy else jnp.asarray(whole)


@dataclass(frozen=True)
class _Same:
    """A leaf that is the same on all ranks."""

    value: Any
    """The value, on the host."""
    impl: Any
    """The implementation of random keys; None for other values."""
    is_jax: bool

    @staticmethod
    def of(x: Any) -> "_Same":
        if isinstance(x, jax.Array) and keys.is_key(x):
            return _Same(np.array(jax.random.key_data(x)), jax.random.key_impl(x), True)
        if isinstance(x, jax.Array | np.ndarray):
            return _Same(np.array(x), None, isinstance(x, jax.Array))
        return _Same(x, None, False)

    def get(self) -> Any:
        if self.impl is not None:
            return jax.random.wrap_key_data(jnp.asarray(self.value), impl=self.impl)
        if self.is_jax:
            return jnp.asarray(self.value)
        return self.value.copy() if isinstance(self.value, np.ndarray) else self.value


@dataclass
class _Saved:
    """What this rank has of a save."""

    number: int
    layout: Layout
    rank: int
    same: list[_Same]
    blocks: dict[int, Bytes]
    """Blocks of this rank, and those that it keeps for others, by their ranks."""
    under_way: dict[int, tuple[Bytes, list[MPI.Request]]] = field(default_factory=dict)
    """Blocks of other ranks that have not come yet, by their ranks, and the requests for them."""
    sends: list[MPI.Request] = field(default_factory=list)
    complete: bool = False
    """Whether this rank knows that all copies are there."""


@dataclass(frozen=True)
class _Has:
    """What a rank tells of a save that it has."""

    number: int
    rank: int
    """The rank that it had in the grid of the save."""
    blocks: list[int]
    layout: Layout
    complete: bool


@dataclass(frozen=True)
class _Told:
    """What a rank tells before a restore."""

    last: int
    """The number of the last save that it knows of."""
    has: list[_Has]
    stepped_in: bool

    def of(self, number: int) -> _Has | None:
        return next((its for its in self.has if its.number == number), None)


class Replica(Local):
    """A state that is kept in memory, so that it outlives the death of ranks: each rank has copies of others' blocks.

    Making one saves `tree`, unless `save=False`. Each save sends this rank's blocks to the ranks behind it, one message
    to each; they are on their way while the program computes, and the next call waits for them. It does not count
    before all blocks of it have been copied, and until then the one before is kept, too. So this takes (1 + copies)
    times the memory of the blocks, on the host, and twice that during a save.

    All ranks of the grid make it and call its methods alike, outside of compiled functions.

    Args:
      tree: a pytree. Arrays with at least as many axes as the grid are this rank's blocks of fields, as in
        `Grid.exchange`, and may be staggered. Other arrays, numbers and random keys are the same on all ranks. They
        are not compared: a rank gets its own back, and one that steps in those of another.
      grid: the `Grid`; or a tree of it and None that is a prefix of `tree`, such as `{"state": grid, "weights": None}`.
        None: the same on all ranks, however many axes it has.
      width: of the halo that the fields have, as in `Grid.exchange`; or a dict with those of some keys of the tree, as
        in `jaxmpi.io.save`. Halos are not saved.
      axes: which axes of the fields are those of the grid, as in `Grid.exchange`.
      copies: how many other ranks keep each rank's blocks. As many neighbouring ranks may die at the same time.
      save: False: `tree` only says what will be saved, nothing is communicated, and `restore` returns None before the
        first save. A program with spare ranks makes its Replica so, for one that steps in has nothing to save. Fields
        may then be `jax.ShapeDtypeStruct`, as `jax.eval_shape` gives them, where to make arrays would communicate.

    Raises:
      ValueError, TypeError: a field does not fit the grid, or an argument is of the wrong type; on this rank, before
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
        found = {id(its): its for its in jax.tree.leaves(grid, is_leaf=trees.is_division) if its is not None}
        grids = list(found.values())
        if not grids or not all(isinstance(its, Grid) and its == grids[0] for its in grids):
            raise TypeError(
                "Replica: grid must be a jaxmpi.Grid, or a tree of one and None that is a prefix of the tree; other "
                "states are kept by jaxmpi.io.checkpoint."
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
        self._last = 0
        """The number of the last save that this rank knows of: all ranks know the same after a restore."""
        self._began_empty = not save
        if save:
            self._save(tree, "Replica")

    def save(self, tree: Any) -> None:
        """Saves a tree like the one that the Replica was made with. The messages are under way as this returns.

        Args:
          tree: of the same structure, with blocks of the same shapes and dtypes. It may be changed afterwards.

        Raises:
          ValueError, TypeError: it is of another structure, or a leaf of another shape or dtype, or of NumPy instead
            of JAX; or `recover` has given up the communicator, and nothing has been restored since. On this rank,
            before anything is sent.
          ProcessFailed: a rank has died, here or on the way of the save before. This save does not count.
        """
        internals.check_outside("Replica.save")
        self._grid._check_alive("Replica.save")
        fields, structure = self._described(tree, "Replica.save")
        if structure != self._structure or fields != self._fields:
            raise ValueError(
                "Replica.save: the tree is not like the one that the Replica was made with: pass one of the same "
                "structure, whose arrays have the same shapes and dtypes, of JAX or of NumPy as those were, or make "
                "another Replica."
            )
        self._save(tree, "Replica.save")

    def restore(self, grid: Grid) -> Any:
        """The tree that was saved last, of which no block is lost, divided by another grid; further saves are by that.

        After a death call it with a grid on the communicator that `jaxmpi.recover` has made. It is kept by the ranks of
        the new grid as this returns. If one of them dies meanwhile call it again, with the next grid. Without a death
        it goes back to what was saved last.

        Args:
          grid: of the same global shape. Ranks of it that have not been in the grid of the save, such as spare ones
            that have stepped in, have made a Replica like the others'.

        Returns:
          The tree. Blocks have halos of zeros, of the width that they had, which `grid.exchange` fills. With
          `save=False` None, on all ranks, if no save has been completed.

        Raises:
          RuntimeError: a rank and all that kept copies of its blocks have died, on all ranks. Or some ranks call `save`
            while others call this.
          ValueError, TypeError: the grid is of another global shape, or none. On this rank; nothing is sent.
          ProcessFailed: a rank has died since.
        """
        if not isinstance(grid, Grid):
            raise TypeError(f"Replica.restore: grid must be a jaxmpi.Grid, got {grid!r:.80}.")
        grid._check_alive("Replica.restore")
        if grid.global_shape != self._grid.global_shape:
            raise ValueError(
                f"Replica.restore: the grid has global shape {grid.global_shape}, and what was saved "
                f"{self._grid.global_shape}: pass a grid of the same shape."
            )
        for saved in self._kept:
            _collect(saved)
        self._grid = grid
        with survival.failing(grid.comm, "Replica.restore"), waiting(grid._comm, "Replica.restore"):
            self._together(restores=True)
            comm = clone_of(grid.comm)
            has = [_Has(s.number, s.rank, sorted(s.blocks), s.layout, s.complete) for s in self._kept]
            told = agreement.gather_objects(comm, _Told(self._last, has, communicators.has_stepped_in()))
            self._last = max(its.last for its in told)
            found = _newest(told)
            if found is None:
                self._check_none(told)
                return None
            number, holders = found
            saved = self._known(comm, number, told)
            blocks = self._redistributed(comm, saved, holders)
            restored = self._began(blocks, saved.same)
            self._finish(restores=True)
        return self._tree(restored)

    # --- what is saved ---------------------------------------------------------------------------------------------

    def _described(self, tree: Any, operation: str) -> tuple[list[_Field | None], Any]:
        """The fields, None in the place of what is the same on all ranks, and the structure. Raises TypeError or
        ValueError for what does not fit the grid."""
        grid = self._grid
        listed, structure = jax.tree_util.tree_flatten_with_path(tree)
        divisions = trees.spread(self._divisions, tree, operation)
        widths = trees.spread_width(self._width, tree, operation)
        found: list[_Field | None] = []
        for (path, x), division, width in zip(listed, divisions, widths, strict=True):
            name, dimensions = f"tree{jax.tree_util.keystr(path)}", len(grid.processes)
            if division is None or not isinstance(x, _ARRAYS) or x.ndim < dimensions:
                found.append(None)
                continue
            if keys.is_key(x):
                raise TypeError(
                    f"{operation}: {name} has random keys for each cell: save jax.random.key_data of them, or say by "
                    "grid= that it is the same on all ranks."
                )
            pairs = given.widths(width, dimensions, operation)
            expected = [size + sum(pair) for size, pair in zip(grid.local_shape, pairs, strict=True)]
            advice = " width= says what halo it has, axes= which axes are the grid's, grid= what is no field."
            cut = grid._cut(x.shape, self._axes, expected, operation, name, advice)
            shape = list(cut.shape)
            for axis in cut.axes:
                shape[axis] = 0
            is_numpy = isinstance(x, np.ndarray)
            found.append(_Field(np.dtype(x.dtype), is_numpy, tuple(shape), cut.axes, cut.staggered, pairs))
        return found, structure

    def _sizes(self, layout: Layout, rank: int) -> list[int]:
        """The bytes of each field of a rank."""
        return [its.bytes(layout, rank) for its in self._fields if its is not None]

    def _packed(self, blocks: Sequence[Any]) -> Bytes:
        """The blocks of all fields, one behind the other."""
        packed = np.empty(sum(self._sizes(self._grid._layout, self._grid.comm.rank)), np.uint8)
        for block, place in zip(blocks, self._unpacked(packed, self._grid._layout, self._grid.comm.rank), strict=True):
            place[...] = block
        return packed

    def _unpacked(self, packed: Bytes, layout: Layout, rank: int) -> list[Any]:
        """The blocks in bytes of `_packed`, which they share."""
        found, at = [], 0
        for its in filter(None, self._fields):
            end = at + its.bytes(layout, rank)
            found.append(packed[at:end].view(its.dtype).reshape(its.block(layout, rank)))
            at = end
        return found

    def _tree(self, saved: _Saved) -> Any:
        blocks = iter(self._unpacked(saved.blocks[saved.rank], saved.layout, saved.rank))
        same = iter(saved.same)
        leaves = [next(same).get() if its is None else its.with_halo(next(blocks)) for its in self._fields]
        return jax.tree.unflatten(self._structure, leaves)

    # --- saving ----------------------------------------------------------------------------------------------------

    def _save(self, tree: Any, operation: str) -> None:
        with survival.failing(self._grid.comm, operation):
            leaves = jax.tree.leaves(tree)
            blocks = [its.inner(np.asarray(x)) for its, x in zip(self._fields, leaves, strict=True) if its is not None]
            same = [_Same.of(x) for its, x in zip(self._fields, leaves, strict=True) if its is None]
            packed = self._packed(blocks)
            with waiting(self._grid._comm, operation):
                self._finish(restores=False)
                self._began(packed, same)

    def _began(self, packed: Bytes, same: list[_Same]) -> _Saved:
        """Begins to send this rank's blocks, and to receive those of others."""
        comm, layout = clone_of(self._grid.comm), self._grid._layout
        rank, size = comm.rank, comm.size
        self._last += 1
        saved = _Saved(self._last, layout, rank, same, {rank: packed})
        self._kept.append(saved)
        for distance in range(1, min(self._copies, size - 1) + 1):
            other = (rank - distance) % size
            room = np.empty(sum(self._sizes(layout, other)), np.uint8)
            saved.under_way[other] = room, [comm.Irecv(part, other, _COPIES) for part in _parts(room)]
        for distance in range(1, min(self._copies, size - 1) + 1):
            saved.sends += [comm.Isend(part, (rank + distance) % size, _COPIES) for part in _parts(packed)]
        return saved

    def _finish(self, restores: bool) -> None:
        """Waits until all ranks have the copies of the last save. Those before are not needed any more."""
        for last in self._kept[-1:]:
            for other in list(last.under_way):
                room, requests = last.under_way.pop(other)  # if it does not come nobody waits for it again
                _wait(requests)
                last.blocks[other] = room
            _wait(last.sends)
            last.sends = []
        self._together(restores)
        for last in self._kept[-1:]:
            last.complete = True
        del self._kept[:-1]

    def _together(self, restores: bool) -> None:
        """Waits for all ranks. Raises RuntimeError on all, if some of them restore and others save."""
        comm, told = clone_of(self._grid.comm), np.array([restores, not restores], np.int32)
        with failures.confirmed(comm):
            comm.Allreduce(MPI.IN_PLACE, told, MPI.MAX)
        if told.all():
            raise RuntimeError(
                "Replica: some ranks save, while others restore. Call restore on all ranks after jaxmpi.recover, and, "
                "with spare ranks, make the Replica with save=False: one that steps in begins where the others restore."
            )

    # --- restoring -------------------------------------------------------------------------------------------------

    def _check_none(self, told: list[_Told]) -> None:
        """Where no save is whole: raises RuntimeError, on all ranks, if there has been one as far as they know."""
        all_are_new = all(its.stepped_in and not its.has for its in told)
        if all_are_new or not self._began_empty or any(save.complete for its in told for save in its.has):
            raise RuntimeError(_lost(told))

    def _known(self, comm: MPI.Intracomm, number: int, told: list[_Told]) -> _Saved:
        """What this rank has of a save; on one that has nothing of it what it is told by another one."""
        saved = next((its for its in self._kept if its.number == number), None)
        having = [its.of(number) for its in told]
        if None not in having:
            assert saved is not None
            return saved
        described = [("the fields", repr(self._fields)), ("the structure", str(self._structure))]
        agreement.check_equal(comm, "Replica.restore", lambda: (None, described), _differs)
        first, its = next((rank, its) for rank, its in enumerate(having) if its is not None)
        same = saved.same if saved is not None else None
        same = pickle.loads(agreement.on_root(comm, "Replica.restore", lambda: pickle.dumps(same), first))
        return saved or _Saved(number, its.layout, its.rank, same, {})

    def _redistributed(self, comm: MPI.Intracomm, saved: _Saved, holders: list[int]) -> Bytes:
        """This rank's blocks by the new grid. `holders`: the new rank that gives the blocks of each old one."""
        packed = np.empty(sum(self._sizes(self._grid._layout, comm.rank)), np.uint8)
        requests, kept, received = [], [], []
        for other in range(comm.size):
            size = sum(part.nbytes for part in self._pieces(saved, holders, packed, other, comm.rank, False))
            received.append(np.empty(size, np.uint8))
            if other != comm.rank:
                requests += [comm.Irecv(part, other, _BLOCKS) for part in _parts(received[-1])]
        for other in range(comm.size):
            pieces = self._pieces(saved, holders, packed, comm.rank, other, True)
            message = np.concatenate([np.empty(0, np.uint8), *(_as_bytes(piece) for piece in pieces)])
            kept.append(message)
            if other == comm.rank:
                received[other] = message
            else:
                requests += [comm.Isend(part, other, _BLOCKS) for part in _parts(message)]
        _wait(requests)
        for other, message in enumerate(received):
            at = 0
            for piece in self._pieces(saved, holders, packed, other, comm.rank, False):
                piece[...] = message[at : at + piece.nbytes].view(piece.dtype).reshape(piece.shape)
                at += piece.nbytes
        return packed

    def _pieces(
        self, saved: _Saved, holders: list[int], packed: Bytes, source: int, target: int, sends: bool
    ) -> Iterator[Any]:
        """What rank `source` has for rank `target` of the new grid, piece by piece: of what it has, or of the blocks in
        `packed` that it becomes."""
        new = self._grid._layout
        for old in [old for old, holder in enumerate(holders) if holder == source]:
            blocks = (
                self._unpacked(saved.blocks[old], saved.layout, old) if sends else self._unpacked(packed, new, target)
            )
            for its, block in zip(filter(None, self._fields), blocks, strict=True):
                boxes = _meeting(its, saved.layout, old, new, target)
                if boxes is None:
                    continue
                index = [slice(None)] * len(its.shape)
                for axis, pair in zip(its.axes, boxes, strict=True):
                    index[axis] = pair[0 if sends else 1]
                yield block[tuple(index)]


def _wait(requests: Sequence[MPI.Request]) -> None:
    """Waits for all of them, and raises the first error. One by one: of several MPI tells the class of an error in
    their statuses alone. One that has failed is null: a further wait for it returns as if it had been done."""
    errors = [agreement.capture(request.Wait)[1] for request in requests]
    for error in errors:
        if error is not None:
            raise error


def _parts(message: Bytes) -> list[Bytes]:
    """A message in parts whose bytes an int counts; nothing of an empty one."""
    return [message[start : start + _MOST] for start in range(0, len(message), _MOST)]


def _as_bytes(piece: Any) -> Bytes:
    return np.ascontiguousarray(piece).reshape(-1).view(np.uint8)


def _meeting(its: _Field, old: Layout, source: int, new: Layout, target: int) -> list[tuple[slice, slice]] | None:
    """The cells of an old block that are in a new one, along each axis: their places in both. None: there are none."""
    found = []
    at, to = old.coordinates(source), new.coordinates(target)
    for axis, extra in enumerate(its.staggered):
        first, beyond = Division(old, ()).owned(axis, bool(extra))[at[axis]]
        start, end = Division(new, ()).contained(axis, bool(extra))[to[axis]]
        low, high = max(first, start), min(beyond, end)
        if low >= high:
            return None
        found.append((slice(low - first, high - first), slice(low - start, high - start)))
    return found


def _collect(saved: _Saved) -> None:
    """Takes what has come of a save, after a death."""
    for other, (room, requests) in saved.under_way.items():
        done = [agreement.capture(request.Wait)[1] is None for request in requests]
        if all(done):
            saved.blocks[other] = room
    for request in saved.sends:
        agreement.capture(request.Wait)
    saved.under_way, saved.sends = {}, []


def _differs(what: str, mine: str, of_root: str) -> str:
    return f"{what} of this Replica differ from those of rank 0, {of_root}: {mine}. Make it alike on all ranks."


def _holders(told: list[_Told], number: int) -> list[int | None]:
    """The rank that gives each block of a save: the nearest that has it; None: it is lost."""
    having = [(rank, save) for rank, its in enumerate(told) if (save := its.of(number)) is not None]
    ranks = math.prod(having[0][1].layout.dims)
    found: list[int | None] = []
    for old in range(ranks):
        near = [((save.rank - old) % ranks, rank) for rank, save in having if old in save.blocks]
        found.append(min(near)[1] if near else None)
    return found


def _newest(told: list[_Told]) -> tuple[int, list[int]] | None:
    """The number of the newest save that is whole, and for each of its blocks the rank that gives it. None: there is
    none, on all ranks, for all know the same."""
    for number in sorted({save.number for its in told for save in its.has}, reverse=True):
        holders = _holders(told, number)
        if None not in holders:
            return number, [rank for rank in holders if rank is not None]
    return None


def _lost(told: list[_Told]) -> str:
    oldest = min((save.number for its in told for save in its.has), default=None)
    holders = [] if oldest is None else _holders(told, oldest)
    listed = [str(old) for old, rank in enumerate(holders) if rank is None]
    whose = f"rank{'s' * (len(listed) > 1)} {', '.join(listed)} of {len(holders)}" if listed else "any rank"
    return (
        f"Replica.restore: what was saved is lost: all that had the blocks of {whose} have died. Keep more copies, by "
        "copies=, or a state in files, by jaxmpi.io.checkpoint."
    )

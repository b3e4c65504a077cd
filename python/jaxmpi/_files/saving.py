"""`jaxmpi.io.save`: a tree, written by all ranks."""

import math
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from jaxmpi._files import commit, layout, metadata, records, sharing, store, trees
from jaxmpi._files.chunks import Blocks
from jaxmpi._files.layout import Options, Part
from jaxmpi._grid.grid import Width
from jaxmpi._mpi import agreement


@dataclass
class Plan:
    """What is written, and where."""

    path: Path
    parts: list[Part]
    coordinates: list[Part]
    skeleton: Any
    attributes: dict[str, Any]
    compressors: tuple[Any, ...]
    more: dict[str, Any] = field(default_factory=dict)
    """What else is kept of it."""
    of_time: dict[str, Any] = field(default_factory=dict)
    """The attributes of the times of a series."""

    def arrays(self) -> list[Part]:
        return [part for part in (*self.parts, *self.coordinates) if part.source is not None]

    def text(self) -> dict[str, Any]:
        """What the root keeps for `load` and `Writer`."""
        return {"tree": self.skeleton, "leaves": [part.record.to_json() for part in self.parts], **self.more}


def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    grid: Any = None,
    width: Width | dict[str, Any] = 0,
    axes: Sequence[int] | None = None,
    comm: MPI.Comm | None = None,
    chunks: int | Sequence[int] | None = None,
    dims: str | Sequence[str] | None = None,
    coords: Any = None,
    attrs: Any = None,
    compressor: Any = None,
    overwrite: bool = False,
) -> None:
    """Saves a tree to a folder, which all ranks write: fields that are divided among them, and what is the same on all.

    Each array becomes one of the whole field in a Zarr v3 group, under the names on the way to it, joined by dots, such
    as `state.h`. zarr, xarray and other programs read it; `load` gives the tree back, on any number of ranks. Each rank
    writes chunks of its own, by default one for its block of a field. Halos are left out.

    The folder has its name once all ranks have written everything: what is there is complete.

    All ranks call it, outside of compiled functions, with trees of one structure.

    Args:
      path: the folder, in a file system that all ranks share. Folders on the way to it are made.
      tree: arrays of JAX or NumPy, random keys, Python numbers and strings, or a pytree of such.
      grid: how arrays are divided. A `Grid`: arrays with at least as many axes as it has are this rank's blocks of
        fields; numbers and arrays with fewer axes are the same on all ranks. An `IndexMap`: arrays are its rows.
        None: all is the same on all ranks. Or a tree of these that is a prefix of `tree`:
        `{"state": grid, "step": None}`.
      width: of the halo that the fields of a Grid have, as in `Grid.exchange`; or a dict with those of some keys of the
        tree, such as {"state": 1}; the others have none.
      axes: which axes of the fields are those of the Grid, as in `Grid.exchange`.
      comm: an intra-communicator, where there is no grid; a clone of COMM_WORLD where it is None.
      chunks: how many cells a chunk has along each axis of the grid. None: what each process has along it; chunks of
        more than 64 MiB are divided.
      dims: names of the grid's axes: `axis_0` and so on where it is None, of rows `index`. Along an axis where a field
        is staggered `_outer` is added.
      coords: coordinates, one dimension each, of all ranks: `{"x": array}` for the dimension `x`.
      attrs: attributes, `{"state.h": {"units": "m"}}`; those of "" are the group's.
      compressor: None, "zstd", or a codec of zarr that makes bytes of bytes. There always is a checksum for each chunk.
      overwrite: whether a state of this name is replaced, which remains until the new one is complete.

    Raises:
      ValueError, TypeError: a field does not fit the grid; what is not divided differs between the ranks; an argument
        is wrong. Before anything is written.
      OSError: a rank cannot write; FileExistsError: there is something of this name. ImportError: zarr is missing. An
        error of one rank is raised on all of them, and what has been written is removed.
    """
    operation = "save"
    options = Options(width, axes, chunks, dims, coords, attrs)
    with layout.together(grid, comm, operation) as clone:
        make = lambda: plan_of(operation, path, tree, grid, clone, options, compressor, overwrite)  # noqa: E731
        write(clone, agreed(clone, make, operation, overwrite=overwrite), operation, overwrite)


def plan_of(
    operation: str,
    path: Any,
    tree: Any,
    grid: Any,
    comm: MPI.Intracomm,
    options: Options,
    compressor: Any,
    overwrite: Any,
) -> Plan:
    """What this rank is to write. Raises TypeError, ValueError or ImportError; nothing is communicated."""
    place = Path(commit.place(path, operation))
    if not isinstance(overwrite, bool):
        raise TypeError(f"{operation}: overwrite must be True or False, got {overwrite!r}.")
    compressors = store.codecs(compressor, operation)
    parts = layout.parts(tree, grid, comm, options, operation)
    layout.check_names(parts, operation)
    coordinates = layout.coordinates(parts, options.coords, comm, operation)
    attributes = layout.attributes([*parts, *coordinates], options.attrs, operation)
    return Plan(place, parts, coordinates, trees.skeleton(tree), attributes, compressors)


def agreed(comm: MPI.Intracomm, make: Callable[[], Plan], operation: str, **more: Any) -> Plan:
    """The plan that this rank makes. Raises ValueError on all ranks if what must be the same on them is not."""

    def work() -> tuple[Plan, agreement.Facts]:
        plan = make()
        return plan, [*((name, repr(value)) for name, value in more.items()), *facts(plan)]

    return agreement.check_equal(comm, operation, work, _differs)


def facts(plan: Plan) -> list[tuple[str, str]]:
    """What all ranks must have in common: what it is, and a text."""
    found = [("the tree", repr(plan.skeleton)), ("path", str(plan.path))]
    found += [
        ("attrs", repr((plan.attributes, plan.of_time))),
        ("compressor", repr([codec.to_dict() for codec in plan.compressors])),
    ]
    for part in (*plan.parts, *plan.coordinates):
        name, chunks = part.record.name, part.source.region.chunks if part.source else ()
        halo = f", width {part.source.widths}" if isinstance(part.source, Blocks) else ""
        found.append((name, f"{part.record}{halo}, chunks {chunks}, dims {part.dims}, attrs {part.attributes}"))
        if not part.record.division and part.source is not None:
            found.append((f"the value of {name}", records.digest(part.bits())))
    return found


def _differs(what: str, mine: str, root: str) -> str:
    if what.startswith("the value of "):
        return (
            f"{what} is another one than on rank 0. What is not divided must be the same on all ranks, to the last "
            "bit: let rank 0 tell the others (jaxmpi.bcast), leave it out, or say with grid= that it is a field."
        )
    return f"{what} is another one than on rank 0: {mine[:200]} and {root[:200]}. All ranks call it alike."


def write(comm: MPI.Intracomm, plan: Plan, operation: str, overwrite: bool) -> None:
    """Writes all arrays, and gives the state its name."""
    arrays = plan.arrays()
    make = lambda folder: store.make(folder, [entry(part) for part in arrays], plan.compressors)  # noqa: E731
    _, lock = publish(comm, plan, arrays, make, operation, overwrite)
    lock.release()


def publish(
    comm: MPI.Intracomm,
    plan: Plan,
    arrays: Sequence[Part],
    make: Callable[[Path], dict[str, Any]],
    operation: str,
    overwrite: bool,
) -> tuple[dict[str, Any], commit.Lock]:
    """Makes what `make` does in a folder, writes arrays there, and gives it its name. All ranks call it.

    Returns the metadata of what has been made, and the lock of the folder. An error of a rank is an error of all, and
    nothing is left.
    """
    new, old = commit.Lock(), commit.Lock()

    def begin() -> tuple[dict[str, Any], sharing.Sign]:
        with commit.naming(f"{operation}: cannot make", plan.path):
            commit.begin(plan.path, overwrite, operation, new, old)
            return make(folder), sharing.leave(folder)

    def end(listed: Sequence[Sums]) -> None:
        with commit.naming(f"{operation}: cannot write", plan.path):
            plan.more["id"] = secrets.token_hex(8)  # no other state has it, not even one of the same numbers
            plan.more["sums"] = {
                part.record.name: _joined(store.Stored.of(folder, metas[part.record.name]), [its[at] for its in listed])
                for at, part in enumerate(arrays)
            }
            store.finish(folder, metas, plan.attributes, plan.text())
            commit.publish(plan.path, new, old, operation)

    folder = commit.partial(plan.path)
    try:
        metas, sign = agreement.on_root(comm, operation, begin)
        sharing.check(comm, operation, sign)
        sums, failure = _write_chunks(folder, arrays, metas, operation)
        agreement.on_root_with_all(comm, operation, sums, failure, end)
    except BaseException as error:
        try:
            commit.drop(plan.path, new)
        finally:
            new.release()
        if isinstance(error, Exception):
            comm.Barrier()  # no rank goes on, and perhaps writes again, before all is removed
        raise
    finally:
        old.release()
    return metas, new


Sums = list[dict[int, int]]
"""The checksums of chunks by the number of the chunk, a dict for each array."""


def _joined(stored: store.Stored, listed: Sequence[dict[int, int]]) -> str:
    """The checksums of all chunks of an array, from those that each rank has written."""
    found = {number: its for sums in listed for number, its in sums.items()}
    count = math.prod(stored.counts)
    if sorted(found) != [*range(count)] or sum(map(len, listed)) != count:
        raise RuntimeError(f"{stored.path}: ranks have written {len(found)} of {count} chunks: an error of jaxmpi.")
    return metadata.pack(np.array([found[number] for number in range(count)], np.uint32))


def entry(part: Part) -> store.Entry:
    """The array of a part."""
    assert part.source is not None
    region = part.source.region
    dtype = part.dtype
    return store.Entry(part.record.name, region.shape, region.chunks, dtype, part.dims, part.attributes)


def _write_chunks(
    folder: Path, arrays: Sequence[Part], metas: dict[str, Any], operation: str
) -> tuple[Sums, Exception | None]:
    """Writes this rank's chunks, and returns their checksums and its first error. It takes part in all communication
    nevertheless, since others wait for it."""
    failure, sums = None, []
    for part in arrays:
        assert part.source is not None
        values, error = agreement.capture(partial(part.source.take, part.value))
        failure = failure or error
        if failure is None:
            stored = store.Stored.of(folder / part.record.name, metas[part.record.name])
            found, failure = agreement.capture(partial(_write, stored, part, values, operation))
            sums.append(found or {})
    return sums, failure


def _write(stored: store.Stored, part: Part, values: Any, operation: str) -> dict[int, int]:
    assert part.source is not None
    with commit.naming(f"{operation}: cannot write", stored.path):
        return store.write(stored, part.source.region, values)

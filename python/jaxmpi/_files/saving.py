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
from jaxmpi._files.layout import Options, StoredArray
from jaxmpi._grid.grid import Width
from jaxmpi._mpi import agreement, failures


@dataclass
class Plan:
    """The content and the place of a state that will be written."""

    path: Path
    parts: list[StoredArray]
    coordinates: list[StoredArray]
    skeleton: Any
    attributes: dict[str, Any]
    compressors: tuple[Any, ...]
    more: dict[str, Any] = field(default_factory=dict)
    """Further content of the root."""
    of_time: dict[str, Any] = field(default_factory=dict)
    """The attributes of the times of a series."""

    def arrays(self) -> list[StoredArray]:
        return [part for part in (*self.parts, *self.coordinates) if part.source is not None]

    def text(self) -> dict[str, Any]:
        """Return the text of the root for `load` and `Writer`."""
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
    """Save a tree to a folder, which all ranks write: fields that are divided, and values that are the same on all.

    Each array becomes one array of the whole field in a Zarr v3 group. Its name is the path to it in the tree, joined
    by dots, for example `state.h`. zarr, xarray and other programs read it. `load` returns the tree, on any number of
    ranks. Each rank writes chunks of its own, by default one for its block of a field. Halos are left out.

    The folder gets its name only when all ranks have written everything. So a folder with this name is complete.

    All ranks call it, outside of compiled functions, with trees of one structure.

    Args:
      path: the folder, in a file system that all ranks share. Missing parent folders are made.
      tree: arrays of JAX or NumPy, random keys, Python numbers and strings, or a pytree of these.
      grid: the division of arrays. With a `Grid`, arrays with at least as many axes as the grid are this rank's blocks
        of fields; numbers and arrays with fewer axes are the same on all ranks. With an `IndexMap`, arrays are its
        rows. None: all is the same on all ranks. Or a tree of these that is a prefix of `tree`:
        `{"state": grid, "step": None}`.
      width: the width of the halo of fields of a Grid, as in `Grid.exchange`; or a dict with widths for some keys of
        the tree, for example {"state": 1}. The others have no halo.
      axes: which axes of the fields belong to the Grid, as in `Grid.exchange`.
      comm: an intra-communicator, if there is no grid. None: a clone of COMM_WORLD.
      chunks: how many cells a chunk has along each axis of the grid. None: as many as each process. Chunks of more than
        64 MiB are divided.
      dims: names of the grid's axes. None: `axis_0` and so on, and `index` for rows. Along an axis where a field is
        staggered, `_outer` is added.
      coords: coordinates, one dimension each, of all ranks: `{"x": array}` for the dimension `x`.
      attrs: attributes, `{"state.h": {"units": "m"}}`. Attributes of "" belong to the group.
      compressor: None, "zstd", or a codec of zarr from bytes to bytes. There always is a checksum for each chunk.
      overwrite: whether a state of this name is replaced. The old one remains until the new one is complete.

    Raises:
      ValueError, TypeError: a field does not fit the grid. Or a value that is not divided differs between the ranks. Or
        an argument is wrong. Before anything is written.
      OSError: a rank cannot write. FileExistsError: something of this name exists. ImportError: zarr is missing. An
        error of one rank is raised on all, and the files that have been written are removed.
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
    """Return the plan of this rank. Raise TypeError, ValueError or ImportError. Communicate nothing."""
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
    """Return the plan of this rank. Raise ValueError on all ranks if values that must be the same differ."""

    def work() -> tuple[Plan, agreement.Facts]:
        plan = make()
        return plan, [*((name, repr(value)) for name, value in more.items()), *facts(plan)]

    return agreement.check_equal(comm, operation, work, _differs)


def facts(plan: Plan) -> list[tuple[str, str]]:
    """Return the facts that all ranks must have in common: the name of each, and a text."""
    common = [("the tree", repr(plan.skeleton)), ("path", str(plan.path))]
    common += [
        ("attrs", repr((plan.attributes, plan.of_time))),
        ("compressor", repr([codec.to_dict() for codec in plan.compressors])),
    ]
    for part in (*plan.parts, *plan.coordinates):
        name, chunks = part.record.name, part.source.region.chunks if part.source else ()
        halo = f", width {part.source.widths}" if isinstance(part.source, Blocks) else ""
        common.append((name, f"{part.record}{halo}, chunks {chunks}, dims {part.dims}, attrs {part.attributes}"))
        if not part.record.division and part.source is not None:
            common.append((f"the value of {name}", records.digest(part.bits())))
    return common


def _differs(what: str, mine: str, root: str) -> str:
    if what.startswith("the value of "):
        return (
            f"{what} differs from rank 0. A value that is not divided must be the same on all ranks, to the last bit: "
            "send it from rank 0 (jaxmpi.bcast), leave it out, or say with grid= that it is a field."
        )
    return agreement.say_difference(what, mine, root)


def write(comm: MPI.Intracomm, plan: Plan, operation: str, overwrite: bool) -> None:
    """Write all arrays, and give the state its name."""
    arrays = plan.arrays()
    make = lambda folder: store.make(folder, [entry(part) for part in arrays], plan.compressors)  # noqa: E731
    _, lock = publish(comm, plan, arrays, make, operation, overwrite)
    lock.release()


def publish(
    comm: MPI.Intracomm,
    plan: Plan,
    arrays: Sequence[StoredArray],
    make: Callable[[Path], dict[str, Any]],
    operation: str,
    overwrite: bool,
) -> tuple[dict[str, Any], commit.Lock]:
    """Call `make` in a new folder, write arrays there, and give the folder its name. All ranks call it.

    Return the metadata from `make`, and the lock of the folder. An error of a rank is an error of all, and no files are
    left.
    """
    new, old = commit.Lock(), commit.Lock()

    def begin() -> tuple[dict[str, Any], sharing.Sign]:
        with commit.naming(f"{operation}: cannot make", plan.path):
            commit.begin(plan.path, overwrite, operation, new, old)
            return make(folder), sharing.leave(folder)

    def end(listed: Sequence[Sums | None]) -> bool:
        written = [sums for sums in listed if sums is not None]
        if len(written) < len(listed):
            return False
        with commit.naming(f"{operation}: cannot write", plan.path):
            plan.more["id"] = secrets.token_hex(8)  # no other state has it, not even one with the same numbers
            plan.more["sums"] = {
                part.record.name: _joined(
                    store.Stored.from_meta(folder, metas[part.record.name]), [sums[at] for sums in written]
                )
                for at, part in enumerate(arrays)
            }
            store.finish(folder, metas, plan.attributes, plan.text())
            commit.publish(plan.path, new, old, operation)
        return True

    folder = commit.partial(plan.path)
    try:
        metas, sign = agreement.on_root(comm, operation, begin)
        sharing.check(comm, operation, sign)
        sums, failure = _write_chunks(folder, arrays, metas, operation)
        with failures.confirmed(comm):
            listed = comm.gather(None if failure else sums)
        if not agreement.on_root(comm, operation, lambda: end(listed or [])):
            agreement.sums(comm, operation, failure)
    except BaseException as error:
        try:
            commit.drop(plan.path, new)
        finally:
            new.release()
        if isinstance(error, Exception):
            comm.Barrier()  # no rank continues, and perhaps writes again, before all is removed
        raise
    finally:
        old.release()
    return metas, new


Sums = list[dict[int, int]]
"""The checksums of chunks by the number of the chunk, a dict for each array."""


def _joined(stored: store.Stored, listed: Sequence[dict[int, int]]) -> str:
    """Join the checksums of all chunks of an array, from the checksums of each rank."""
    by_number = {number: checksum for sums in listed for number, checksum in sums.items()}
    count = math.prod(stored.counts)
    if sorted(by_number) != [*range(count)] or sum(map(len, listed)) != count:
        raise RuntimeError(f"{stored.path}: ranks have written {len(by_number)} of {count} chunks: an error of jaxmpi.")
    return metadata.pack(np.array([by_number[number] for number in range(count)], np.uint32))


def entry(part: StoredArray) -> store.Entry:
    """Return the array of a leaf."""
    assert part.source is not None
    region = part.source.region
    dtype = part.dtype
    return store.Entry(part.record.name, region.shape, region.chunks, dtype, part.dims, part.attributes)


def _write_chunks(
    folder: Path, arrays: Sequence[StoredArray], metas: dict[str, Any], operation: str
) -> tuple[Sums, Exception | None]:
    """Write this rank's chunks, and return their checksums and the first error. After an error still take part in all
    communication, because other ranks wait for it."""
    failure, sums = None, []
    for part in arrays:
        assert part.source is not None
        values, error = agreement.capture(partial(part.source.take, part.value))
        failure = failure or error
        if failure is None:
            stored = store.Stored.from_meta(folder / part.record.name, metas[part.record.name])
            written, failure = agreement.capture(partial(_write, stored, part, values, operation))
            sums.append(written or {})
    return sums, failure


def _write(stored: store.Stored, part: StoredArray, values: Any, operation: str) -> dict[int, int]:
    assert part.source is not None
    with commit.naming(f"{operation}: cannot write", stored.path):
        return store.write(stored, part.source.region, values)

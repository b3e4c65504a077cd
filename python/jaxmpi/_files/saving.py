"""`jaxmpi.io.save`, `checkpoint` and `latest`: trees that all ranks write, and numbered states in a folder."""

import contextlib
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from jaxmpi._files import chunks as tiles
from jaxmpi._files import commit, layout, metadata, records, store, trees
from jaxmpi._files.chunks import Blocks
from jaxmpi._files.layout import Options, StoredArray
from jaxmpi._grid import arguments as checks
from jaxmpi._grid.grid import Width
from jaxmpi._mpi import agreement, failures
from jaxmpi._primitive import arguments

_SECONDS = 5.0
"""How long a rank looks for the sign of rank 0, because file systems of several hosts may be late."""
Sums = list[dict[int, int]]
"""The checksums of chunks by the number of the chunk, a dict for each array."""


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
    options = Options(width, axes, chunks, dims, coords, attrs, compressor)
    with layout.together(grid, comm, operation) as clone:
        make = lambda: plan_of(operation, path, tree, grid, clone, options, overwrite)  # noqa: E731
        write(clone, agreed(clone, make, operation, overwrite=overwrite), operation, overwrite)


def checkpoint(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    keep: int | None = 3,
    step: int | None = None,
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
) -> Path:
    """Save a tree as the next state in a folder, and then remove old states.

    A state exists only when all ranks have written it. So `latest` finds the last complete one, also if a run has died
    while it wrote. The next call removes the remains.

    All ranks call it, outside of compiled functions.

    Args:
      path: a folder, which is made if it does not exist. The states in it are folders with numbers of eight or more
        digits as names. Other files stay as they are.
      tree: the tree to save, as by `save`.
      keep: how many states are kept: this one and the newest of the others. None: all.
      step: the number of the state. None: one more than the largest.
      grid, width, axes, comm, chunks, dims, coords, attrs, compressor, overwrite: as for `save`.

    Returns:
      The path of the state, for `load`.

    It raises the errors of `save`. If an old state cannot be removed, it raises an OSError; then the new state exists.
    """
    operation = "checkpoint"
    options = Options(width, axes, chunks, dims, coords, attrs, compressor)
    with layout.together(grid, comm, operation) as clone:

        def prepare() -> Plan:
            if keep is not None and arguments.integer(keep, operation, "keep") < 1:
                raise ValueError(f"{operation}: keep is {keep}: pass 1 or more, or None to keep all states.")
            if step is not None and arguments.integer(step, operation, "step") < 0:
                raise ValueError(f"{operation}: step is {step}: pass 0 or more, or None for the next number.")
            return plan_of(operation, path, tree, grid, clone, options, overwrite)

        plan = agreed(clone, prepare, operation, overwrite=overwrite, keep=keep, step=step)
        folder = plan.path
        number, plan.path = agreement.on_root(clone, operation, lambda: _next(folder, step, operation))
        write(clone, plan, operation, overwrite)
        if keep is not None:
            agreement.on_root(clone, operation, lambda: commit.prune(plan.path.parent, keep, number, operation))
        return plan.path


def _next(folder: Path, step: int | None, operation: str) -> tuple[int, Path]:
    """Return the number and the path of the new state, on rank 0."""
    with commit.naming(f"{operation}: cannot use", folder):
        if commit.is_ours(folder):
            raise FileExistsError(f"{operation}: {folder} is a state itself: pass a folder that holds states.")
        commit.tidy(folder, operation)
        number = max(commit.numbers(folder), default=-1) + 1 if step is None else int(step)
        return number, commit.numbered(folder, number)


def latest(path: str | os.PathLike[str], *, comm: MPI.Comm | None = None) -> Path | None:
    """Return the path of the last state that `checkpoint` has written to a folder, for `load`.

    All ranks call it. Rank 0 looks, and all get the same result.

    Args:
      path: the folder.
      comm: an intra-communicator. None: a clone of COMM_WORLD.

    Returns:
      The path of the state with the largest number. None if there is no state, or no folder.

    Raises:
      OSError: rank 0 cannot read the folder. On all ranks.
      TypeError, ValueError: `path` is no path.
    """
    operation = "latest"
    with layout.together(None, comm, operation) as clone:

        def look() -> Path | None:
            folder = Path(commit.place(path, operation))
            with commit.naming(f"{operation}: cannot read", folder):
                return commit.newest(folder) if clone.rank == 0 else None

        return agreement.of_rank(clone, agreement.run_on_all(clone, operation, look))


def plan_of(
    operation: str, path: Any, tree: Any, grid: Any, comm: MPI.Intracomm, options: Options, overwrite: Any
) -> Plan:
    """Return the plan of this rank. Raise TypeError, ValueError or ImportError. Communicate nothing."""
    place = Path(commit.place(path, operation))
    checks.truth(overwrite, operation, "overwrite")
    compressors = store.codecs(options.compressor, operation)
    parts = layout.parts(tree, grid, comm, options, operation)
    dims = {dim for part in parts for dim in part.dims}
    for part in parts:  # xarray could not open the file
        if part.record.name in dims and part.source is not None and part.dims != (part.record.name,):
            raise ValueError(
                f"{operation}: a leaf of the tree and an axis are both called {part.record.name!r}: rename the leaf, "
                "or pass other dims=."
            )
    coordinates = layout.coordinates(parts, options.coords, comm, operation)
    attributes = layout.attributes([*parts, *coordinates], options.attrs, operation)
    return Plan(place, parts, coordinates, trees.skeleton(tree), attributes, compressors)


def agreed(comm: MPI.Intracomm, make: Callable[[], Plan], operation: str, **more: Any) -> Plan:
    """Return the plan of this rank. Raise ValueError on all ranks if values that must be the same differ."""

    def work() -> tuple[Plan, agreement.Facts]:
        plan = make()
        facts = [*more.items(), ("the tree", plan.skeleton), ("path", plan.path)]
        facts.append(("attrs", (plan.attributes, plan.of_time)))
        facts.append(("compressor", [codec.to_dict() for codec in plan.compressors]))
        common = [(name, repr(value)) for name, value in facts]
        for part in (*plan.parts, *plan.coordinates):
            name, chunks = part.record.name, part.source.region.chunks if part.source else ()
            halo = f", width {part.source.widths}" if isinstance(part.source, Blocks) else ""
            common.append((name, f"{part.record}{halo}, chunks {chunks}, dims {part.dims}, attrs {part.attributes}"))
            if not part.record.division and part.source is not None:
                common.append((f"the value of {name}", records.digest(tiles.values_of(part.value))))
        return plan, common

    return agreement.check_equal(comm, operation, work, differs)


def differs(what: str, mine: str, root: str) -> str:
    if what.startswith("the value of "):
        return (
            f"{what} differs from rank 0. A value that is not divided must be the same on all ranks, to the last bit: "
            "send it from rank 0 (jaxmpi.bcast), leave it out, or say with grid= that it is a field."
        )
    return agreement.say_difference(what, mine, root)


def write(comm: MPI.Intracomm, plan: Plan, operation: str, overwrite: bool) -> None:
    arrays = plan.arrays()
    make = lambda folder: store.make(folder, entries(arrays), plan.compressors)  # noqa: E731
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

    def begin() -> tuple[dict[str, Any], tuple[Path, str]]:
        with commit.naming(f"{operation}: cannot make", plan.path):
            commit.begin(plan.path, overwrite, operation, new, old)
            return make(folder), leave_sign(folder)

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
        check_sign(comm, operation, sign)
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


def leave_sign(folder: Path) -> tuple[Path, str]:
    """Leave a sign in a folder, on rank 0, which has locked it: a file that the other ranks look for. Return it and the
    host. Remove the signs of jobs that died."""
    for old in folder.glob(".*.shared"):
        old.unlink()
    file = folder / f".{secrets.token_hex(8)}.shared"
    file.touch()
    return file, socket.gethostname()


def check_sign(comm: MPI.Intracomm, operation: str, sign: tuple[Path, str]) -> None:
    """Raise OSError on all ranks unless each of them sees the sign of rank 0. Remove the sign. All ranks call it.

    A path may lead to another folder on each host, for example in /tmp.
    """
    file, host = sign

    def find() -> None:
        end = time.monotonic() + _SECONDS
        while not file.exists():
            if time.monotonic() > end:
                raise OSError(
                    f"{operation}: {file.parent} on {socket.gethostname()} is not the folder that rank 0 has on "
                    f"{host}: pass a path in a file system that all ranks share."
                )
            time.sleep(0.05)

    try:
        agreement.run_on_all(comm, operation, find)
    finally:
        if comm.rank == 0:
            with contextlib.suppress(OSError):
                file.unlink()


def _joined(stored: store.Stored, listed: Sequence[dict[int, int]]) -> str:
    """Join the checksums of all chunks of an array, from the checksums of each rank."""
    by_number = {number: checksum for sums in listed for number, checksum in sums.items()}
    count = math.prod(stored.counts)
    if sorted(by_number) != [*range(count)] or sum(map(len, listed)) != count:
        raise RuntimeError(f"{stored.path}: ranks have written {len(by_number)} of {count} chunks: an error of jaxmpi.")
    return metadata.pack(np.array([by_number[number] for number in range(count)], np.uint32))


def entries(parts: Sequence[StoredArray]) -> dict[str, dict[str, Any]]:
    made = {}
    for part in parts:
        record, region = part.record, part.source.region
        made[record.name] = store.entry(region.shape, region.chunks, record.stored_dtype, part.dims, part.attributes)
    return made


def _write_chunks(
    folder: Path, arrays: Sequence[StoredArray], metas: dict[str, Any], operation: str
) -> tuple[Sums, Exception | None]:
    """Write this rank's chunks, and return their checksums and the first error. After an error still take part in all
    communication, because other ranks wait for it."""
    failure, sums = None, []
    for part in arrays:
        values, error = agreement.capture(partial(part.source.take, part.value))
        failure = failure or error
        if failure is None:
            stored = store.Stored.from_meta(folder / part.record.name, metas[part.record.name])
            written, failure = agreement.capture(partial(_write, stored, part, values, operation))
            sums.append(written or {})
    return sums, failure


def _write(stored: store.Stored, part: StoredArray, values: Any, operation: str) -> dict[int, int]:
    with commit.naming(f"{operation}: cannot write", stored.path):
        return store.write(stored, part.source.region, values)

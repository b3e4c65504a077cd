"""`jaxmpi.io.checkpoint` and `latest`: numbered states in a folder, for programs that are started again."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpi4py import MPI

from jaxmpi._files import commit, layout, saving
from jaxmpi._files.layout import Options
from jaxmpi._grid.grid import Width
from jaxmpi._mpi import agreement
from jaxmpi._primitive import arguments


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

    Raises: as `save`. If an old state cannot be removed, an OSError as well; then the new state exists.
    """
    operation = "checkpoint"
    options = Options(width, axes, chunks, dims, coords, attrs)
    with layout.together(grid, comm, operation) as clone:

        def prepare() -> saving.Plan:
            if keep is not None and arguments.integer(keep, operation, "keep") < 1:
                raise ValueError(f"{operation}: keep is {keep}: pass 1 or more, or None to keep all states.")
            if step is not None and arguments.integer(step, operation, "step") < 0:
                raise ValueError(f"{operation}: step is {step}: pass 0 or more, or None for the next number.")
            return saving.plan_of(operation, path, tree, grid, clone, options, compressor, overwrite)

        plan = saving.agreed(clone, prepare, operation, overwrite=overwrite, keep=keep, step=step)
        folder = plan.path
        number, plan.path = agreement.on_root(clone, operation, lambda: _next(folder, step, operation))
        saving.write(clone, plan, operation, overwrite)
        if keep is not None:
            agreement.on_root(clone, operation, lambda: _prune(plan.path.parent, keep, number, operation))
        return plan.path


def _next(folder: Path, step: int | None, operation: str) -> tuple[int, Path]:
    """Return the number and the path of the new state, on rank 0."""
    with commit.naming(f"{operation}: cannot use", folder):
        if commit.is_ours(folder):
            raise FileExistsError(f"{operation}: {folder} is a state itself: pass a folder that holds states.")
        commit.tidy(folder, operation)
        number = max(commit.numbers(folder), default=-1) + 1 if step is None else int(step)
        return number, commit.numbered(folder, number)


def _prune(folder: Path, keep: int, number: int, operation: str) -> None:
    with commit.naming(f"{operation}: cannot remove old states in", folder):
        commit.prune(folder, keep, number, operation)


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
        return agreement.of_rank(
            clone, agreement.run_on_all(clone, operation, lambda: _last(path, clone.rank, operation))
        )


def _last(path: Any, rank: int, operation: str) -> Path | None:
    folder = Path(commit.place(path, operation))
    if rank > 0:
        return None
    with commit.naming(f"{operation}: cannot read", folder):
        return commit.newest(folder)

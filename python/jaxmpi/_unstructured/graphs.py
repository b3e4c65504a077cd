"""Sparse matrices and graphs, whose columns and edges name rows by their global indices."""

from typing import Any

import numpy as np

from jaxmpi._unstructured import arguments
from jaxmpi._unstructured.arguments import some


def csr(indptr: Any, indices: Any, rows: Any, operation: str) -> tuple[int, np.ndarray, np.ndarray | None]:
    """Return the number of rows of a block of a matrix, the columns, and the rows if the user has passed them.

    Raise TypeError or ValueError.
    """
    starts = arguments.integers(indptr, operation, "indptr")
    columns = arguments.indices(indices, operation, "indices")
    if len(starts) == 0 or starts[0] != 0 or starts[-1] != len(columns) or (starts[1:] < starts[:-1]).any():
        raise ValueError(
            f"{operation}: indptr must rise from 0 to the number of indices, {len(columns)}, and have one number more "
            f"than this rank has rows; got {len(starts)} numbers: {some(starts)}. If A has all rows, pass the arrays "
            "of A[first:end]."
        )
    owned = None if rows is None else arguments.indices(rows, operation, "rows")
    if owned is not None and len(owned) != len(starts) - 1:
        raise ValueError(
            f"{operation}: {len(owned)} rows, and indptr is of {len(starts) - 1}: pass the global index of each row of "
            "this rank."
        )
    return len(starts) - 1, columns, owned


def edges(senders: Any, receivers: Any, owner: Any, operation: str, rank: int, size: int) -> Any:
    """Return the edges of a rank: their positions in the arguments, their senders and receivers, and the owner of each
    vertex.

    Raise TypeError or ValueError.
    """
    owners = arguments.ranks(owner, operation, "owner", size)
    ends = []
    for name, values in (("senders", senders), ("receivers", receivers)):
        vertices = arguments.indices(values, operation, name)
        if len(beyond := vertices[vertices >= len(owners)]):
            raise ValueError(
                f"{operation}: {name} has {some(beyond)}, and owner is of {len(owners)} vertices: pass the rank of "
                "each vertex of the whole graph."
            )
        ends.append(vertices)
    if len(ends[0]) != len(ends[1]):
        raise ValueError(f"{operation}: {len(ends[0])} senders and {len(ends[1])} receivers: an edge has one of each.")
    kept = np.flatnonzero(owners[ends[1]] == rank)
    return kept, ends[0][kept], ends[1][kept], owners

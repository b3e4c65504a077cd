"""All operations. Each operation that the core executes is in csrc/core/ops.def, under the same name."""

from jaxmpi._mpi import library
from jaxmpi._operations import (
    by_counts,
    collectives,
    exchanges,
    messages,
    neighbors,
    nonblocking,
    reductions,
    replication,
)
from jaxmpi._primitive.operation import KNOWN

FAMILIES = (collectives, reductions, replication, by_counts, messages, neighbors, nonblocking, exchanges)
OPERATIONS = tuple(KNOWN)


def check_names(here: set[str], core: set[str]) -> None:
    """Raise ImportError if this package and the C core, being of two versions, name different operations."""
    if here != core:
        raise ImportError(
            f"jaxmpi: Python and the C core name different operations: {sorted(here ^ core)}. Reinstall jaxmpi."
        )


check_names(
    {operation.name.removeprefix("jaxmpi.") for operation in OPERATIONS if not operation.identity},
    set(library.OPERATIONS) - library.WITHOUT_PRIMITIVE,
)

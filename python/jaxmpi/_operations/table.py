"""All operations. Each operation that the core executes is in csrc/core/ops.def, under the same name."""

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

"""What a rank sends and receives of rows that have global indices."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Connections:
    """What a rank knows of a division of rows: its local rows are those that it owns, then its ghosts.

    The ghosts lie in the order of their owners, and of one owner in the order of their global indices, so that those of
    one owner are consecutive rows.
    """

    owned: int
    """How many rows this rank owns."""
    ghosts: np.ndarray
    """The global index of each ghost, int64, in the order in which they lie."""
    receives: tuple[tuple[int, int], ...]
    """The owners of ghosts in ascending order, and how many ghosts are of each: at least one."""
    sends: tuple[tuple[int, np.ndarray], ...]
    """The ranks that have ghosts of this rank, in ascending order, and which of its rows they are: int64, in the order
    in which they lie on that rank."""
    signature: int = 0
    """A number that is the same on all ranks, and another one for another division of rows; 0 where none was agreed
    on."""

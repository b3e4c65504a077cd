"""The messages of one rank in an exchange of rows with global indices."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Connections:
    """One rank's part of a division of rows. The local rows are the owned rows, then the ghosts.

    The ghosts are sorted by owner, and the ghosts of one owner by global index. So the ghosts of one owner are
    consecutive rows.
    """

    owned: int
    """The number of rows that this rank owns."""
    ghosts: np.ndarray
    """The global index of each ghost, int64, in the local order."""
    receives: tuple[tuple[int, int], ...]
    """The owners of ghosts in ascending order, each with the number of ghosts: at least one."""
    sends: tuple[tuple[int, np.ndarray], ...]
    """The ranks that have ghosts of this rank, in ascending order, and their rows on this rank: int64, in the order of
    the ghosts on that rank."""
    signature: int = 0
    """A number that is the same on all ranks, and differs for another division of rows. 0: the ranks have not agreed on
    one."""

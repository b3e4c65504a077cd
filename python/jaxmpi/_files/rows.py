"""Rows that have global indices, in a file: stored in the ascending order of their indices."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmpi._files.chunks import Region


@dataclass(frozen=True)
class Rows:
    """How this rank comes by its region of rows. All ranks call `take` together."""

    region: Region

    def take(self, x: Any) -> np.ndarray:
        raise NotImplementedError

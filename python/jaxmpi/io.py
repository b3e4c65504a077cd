"""Files with the state of a computation. All ranks write and read them, on any number of ranks. See docs/files.md.

Needs zarr, which the first call imports: pip install 'zarr>=3'.
"""

from jaxmpi._files.loading import load
from jaxmpi._files.saving import checkpoint, latest, save
from jaxmpi._files.writer import Writer

__all__ = ["Writer", "checkpoint", "latest", "load", "save"]

"""Files: states of a computation that all ranks write and read, on any number of ranks. See docs/files.md.

Needs zarr, which is imported by the first call: pip install 'jaxmpi[io]'.
"""

from jaxmpi._files.checkpoints import checkpoint, latest
from jaxmpi._files.loading import load
from jaxmpi._files.saving import save
from jaxmpi._files.writer import Writer

__all__ = ["Writer", "checkpoint", "latest", "load", "save"]

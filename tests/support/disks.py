"""File systems of a test's own, which are full soon or cannot be written."""

import contextlib
import os
import subprocess

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")


@contextlib.contextmanager
def mounted(folder, options):
    """A tmpfs with these options on a new folder, while a block lasts. Skips the test where it cannot be mounted."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(f"mount: {done.stderr}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)

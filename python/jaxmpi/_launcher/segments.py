"""Shared memory in /dev/shm that MPICH leaves behind if its ranks are ended before MPI_Finalize.

Its names do not tell whose job it is of. What is removed is of this user, was made since the job began, and is open in
no process. MPICH maps it as it makes it, and as long as it needs it, so nobody comes back to it. This is known only
where all processes are seen: not within a container, which has a number of its own for each.
"""

import contextlib
import os
import re
import stat
import time
from pathlib import Path

_FOLDER = "/dev/shm"
_NAMES = re.compile(r"mpich_shm_[0-9a-f]{1,8}_[0-9]{1,9}")
_ALL_PROCESSES = "pid:[4026531836]"
"""The kernel's name for the numbers that all processes have."""
_PAUSE_SECONDS = 0.05
"""The time that a process may need between making one and mapping it."""
_MOST_SECONDS = 1.0
"""The time that ranks may need to be gone."""


def remove(since: float) -> None:
    """Removes those that a job has left which began at a time `since`, of time.time()."""
    with contextlib.suppress(OSError):
        if os.readlink("/proc/self/ns/pid") != _ALL_PROCESSES:
            return
        found, end = _made(since), time.monotonic() + _MOST_SECONDS
        while found and time.monotonic() < end:
            time.sleep(_PAUSE_SECONDS)
            mapped = _mapped()
            for name in found - mapped:
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(_FOLDER, name))
            found &= mapped


def _mapped() -> set[str]:
    found = set[str]()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.update(_NAMES.findall((process / "maps").read_text(errors="replace")))
    return found


def _made(since: float) -> set[str]:
    found = set()
    for name in filter(_NAMES.fullmatch, os.listdir(_FOLDER)):
        with contextlib.suppress(OSError):
            file = os.lstat(os.path.join(_FOLDER, name))
            if stat.S_ISREG(file.st_mode) and file.st_uid == os.geteuid() and file.st_mtime >= since:
                found.add(name)
    return found

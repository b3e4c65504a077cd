"""The folder of a job, where the ranks of the launcher's machine leave files for it, named RANK.KIND.

`tempfile.mkdtemp` makes it for this user alone, under a name that nobody can guess. A FIFO in it ties the ranks to the
launcher: the launcher alone keeps the writing end open, and each rank asks the kernel to end the rank by SIGKILL when
the last writer goes. This takes no thread and no lock, so it works in compiled code, in a sleep, and where the
interpreter is held. A second FIFO says that the launcher asks the ranks what they do (csrc/core/job.c): looking at it
costs no disk anything, so a thousand ranks on a shared disk may look each second.
"""

import contextlib
import fcntl
import os
import re
import shutil
import signal
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

VARIABLE = "JAXMPI_JOB_FOLDER"
"""The variable that names the folder to the ranks."""
_ALIVE, _BELL, _MACHINE = "alive", "bell", "machine"


def machine() -> str:
    """A name of this machine, the same in all processes under one kernel; empty where the system has none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


class Folder:
    """The files of a job. Methods raise OSError when the folder is gone, or its disk is full."""

    def __init__(self, path: str):
        self.path = path
        self._fifos: list[int] = []  # that the launcher keeps open; the bell is the last

    @classmethod
    def make(cls) -> "Folder":
        """Make the folder of a new job. The launcher calls this, and `remove` in the end."""
        folder = cls(tempfile.mkdtemp(prefix="jaxmpi-"))
        try:
            folder.write(_MACHINE, machine())
            for name in (_ALIVE, _BELL):
                os.mkfifo(os.path.join(folder.path, name), 0o600)
            # Without a reader the writing end could not be opened.
            for name, flags in ((_ALIVE, os.O_RDONLY), (_ALIVE, os.O_WRONLY), (_BELL, os.O_RDWR)):
                folder._fifos.append(folder._open(name, flags))
        except OSError:
            folder.remove()
            raise
        return folder

    def _open(self, name: str, flags: int) -> int:
        return os.open(os.path.join(self.path, name), flags | os.O_NONBLOCK | os.O_CLOEXEC)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        while self._fifos:
            os.close(self._fifos.pop())

    def is_here(self) -> bool:
        """Whether the folder is of this machine, and not of another one that sees the same disk."""
        return self.read(_MACHINE) == machine()

    def tie(self) -> None:
        """End this process when the launcher goes, and at once if it has gone."""
        with contextlib.suppress(OSError, AttributeError):
            known: Any = fcntl  # some systems have no such signals
            file = self._open(_ALIVE, os.O_RDONLY)  # until the process ends
            fcntl.fcntl(file, known.F_SETOWN, os.getpid())
            fcntl.fcntl(file, known.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_ASYNC)
            with contextlib.suppress(BlockingIOError):  # there is a writer, which has written nothing
                if not os.read(file, 1) and machine():
                    os.kill(os.getpid(), signal.SIGKILL)

    def ring(self) -> None:
        """Let the ranks look at the question. The byte stays in the FIFO until `hush`."""
        os.write(self._fifos[-1], b"?")

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._fifos[-1], 100)

    def write(self, name: str, text: str) -> None:
        """Write a file at once and whole, in the place of an older one."""
        draft = os.path.join(self.path, f"{name}.{os.getpid()}.{threading.get_ident()}.draft")
        with open(draft, "x", errors="replace") as file:  # never through a link
            file.write(text)
        os.rename(draft, os.path.join(self.path, name))

    def read(self, name: str) -> str:
        return Path(self.path, name).read_text(errors="replace")

    def kinds(self) -> dict[str, dict[int, str]]:
        """kind -> rank -> name, of the files that ranks have left."""
        found = defaultdict[str, dict[int, str]](dict)
        for name in os.listdir(self.path):
            if match := re.fullmatch(r"([0-9]{1,9})\.([a-z]+)", name):
                found[match[2]][int(match[1])] = name
        return found

    def texts(self, kind: str) -> dict[int, str]:
        """rank -> the file's text, in the order in which the ranks have left the files."""
        names = self.kinds()[kind]
        ages = {rank: os.stat(os.path.join(self.path, name)).st_mtime_ns for rank, name in names.items()}
        return {rank: self.read(names[rank]) for rank in sorted(ages, key=lambda rank: (ages[rank], rank))}

    def clear(self, kind: str) -> None:
        for name in self.kinds()[kind].values():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.path, name))

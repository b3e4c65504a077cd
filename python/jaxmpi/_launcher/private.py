"""Folders and files that are certainly ours: csrc/core/private.h does the same in C.

A folder whose path others know may be made by them beforehand, hold links to files of ours, or be replaced. So it is
opened once, through no link, and looked at by its descriptor: it must belong to this user, and be of no use to others.
What is in it is then opened, renamed and removed by the descriptor, and new files are never older ones.
Nothing here imports jax, mpi4py or the package: child.py loads this file by its path.
"""

import contextlib
import errno
import os
import stat
import tempfile
import threading

_MOST_BYTES = 1 << 20
"""The size of the largest file that is read."""
_TRIES = 5


class Folder:
    """One folder, for one thread, until `close`. OSError: it is not there, or not certainly ours."""

    def __init__(self, path: str | os.PathLike):
        self.path = os.fspath(path)
        self.descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        if fault := _fault(os.fstat(self.descriptor)):
            self.close()
            raise PermissionError(errno.EPERM, fault, self.path)

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self.descriptor)

    def names(self) -> list[str]:
        return os.listdir(self.descriptor)

    def create(self, name: str) -> int:
        """A new file, to be written. FileExistsError: there is something of this name."""
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=self.descriptor)

    def write(self, name: str, text: str) -> None:
        """A file at once and whole, in the place of one that is there."""
        draft = f"{name}.{threading.get_ident()}.draft"
        self.remove(draft)  # of a thread that has ended
        with open(self.create(draft), "w", errors="replace") as file:
            file.write(text)
        os.rename(draft, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def open(self, name: str, kind: int = stat.S_IFREG) -> int:
        """What is there of a kind, to be read; it is not waited for."""
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self.descriptor)
        found = os.fstat(file)
        if stat.S_IFMT(found.st_mode) == kind and found.st_uid == os.geteuid():
            return file
        os.close(file)
        raise PermissionError(errno.EPERM, "it is not what was expected, or another user's", name)

    def read(self, name: str) -> str:
        with open(self.open(name), "rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace")

    def changed_at(self, name: str) -> int:
        """The time of a file's last change, in nanoseconds."""
        return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mtime_ns

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)


def _fault(folder: os.stat_result) -> str:
    if folder.st_uid != os.geteuid():
        return "it belongs to another user"
    if folder.st_mode & 0o077:
        return "other users may use it"
    return ""


def make(prefix: str) -> Folder:
    """A new one in the folder for temporary files, under a name that nobody can guess."""
    path = tempfile.mkdtemp(prefix=prefix)
    try:
        return Folder(path)
    except OSError:  # a disk that knows no users
        os.rmdir(path)
        raise


def remove(path: str) -> None:
    """The folder and the files in it, as far as they are ours."""
    with contextlib.suppress(OSError), Folder(path) as folder:
        for _ in range(_TRIES):  # what goes on may make another file meanwhile
            for name in folder.names():
                with contextlib.suppress(OSError):
                    folder.remove(name)
            with contextlib.suppress(OSError):
                os.rmdir(path)
                return

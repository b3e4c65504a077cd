"""How a state comes to be there at once: written under another name, and renamed when all ranks have written it.

Beside a state NAME there may be three hidden ones: `.NAME.partial`, which is being written, or is left of a run that
has died; `.NAME.replaced`, an old state while a new one is renamed to its name; and `.NAME.removed`, which is being
removed. A run that dies between the two renames of a replacement leaves the old state under its hidden name, where
readers find it, and the next run puts it back. All of this is done by rank 0 alone.

Rank 0 holds a lock of the folder that it writes, which goes with it, also if it dies. So a second job, or a second
`Writer`, that would write the same is an error, where the file system has locks of folders.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxmpi._files import store

_STATE = re.compile(r"(\.?)(\d{8,})(\.partial|\.replaced|\.removed|)")
"""Names in a folder of checkpoints: of states, and the hidden ones."""
KEY = "jaxmpi"
"""The attribute of the group that says what is ours."""


def partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def removed(path: Path) -> Path:
    return path.with_name(f".{path.name}.removed")


def place(path: Any, operation: str) -> str:
    """The path of a state, absolute. Raises TypeError and ValueError for what is no path of a file system."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{operation}: path must be a string or a path, got {path!r:.80} of {type(path).__name__}.")
    text = os.fspath(path)
    if not isinstance(text, str) or "://" in text or "\0" in text or not text:
        raise ValueError(f"{operation}: path is {text!r}: pass a folder of a file system that all ranks share.")
    whole = os.path.abspath(text)
    if os.path.islink(whole):  # the folder that it leads to is written, beside which there is room
        whole = os.path.realpath(whole)
    if not os.path.basename(whole):
        raise ValueError(f"{operation}: path is {text!r}: pass the name of a folder to be made.")
    return whole


def is_there(path: Path) -> bool:
    return os.path.lexists(path)


def is_ours(path: Path) -> bool:
    """Whether it is a state that `save` or a `Writer` has made."""
    try:
        return KEY in json.loads(store.root(path))["attributes"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def restore(path: Path) -> None:
    """Puts back an old state that was being replaced as a run died, or removes it if the new one is in its place."""
    old = replaced(path)
    if is_there(old):
        if is_there(path):
            discard(old)
        else:
            os.rename(old, path)


def discard(path: Path) -> None:
    """Removes a folder; of a file or a link that has its name, that alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


class Lock:
    """A lock of a folder, which is held until `release`, or until the process ends."""

    def __init__(self) -> None:
        self._file: int | None = None

    @property
    def is_held(self) -> bool:
        return self._file is not None

    def take(self, path: Path, operation: str) -> None:
        """Raises OSError if another one is held, by another job or by this process."""
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return  # this file system has none
            os.close(self._file)
            self._file = None
            raise OSError(
                f"{operation}: {path} is being written, by another job, or by a Writer of this one that is not closed: "
                "choose another path, or wait for its end."
            ) from None

    def release(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)  # also for processes that have been forked meanwhile
            os.close(self._file)
            self._file = None

    __del__ = release


def check_free(path: Path, operation: str) -> None:
    """Raises OSError if a folder is being written."""
    if path.is_dir():
        lock = Lock()
        lock.take(path, operation)
        lock.release()


def begin(path: Path, overwrite: bool, operation: str, lock: Lock) -> Path:
    """Makes the empty folder in which a state is written, and locks it. What a dead run has left is removed.

    Raises FileExistsError if there is something that may not be replaced, OSError if it is being written.
    """
    folder = partial(path)
    check_free(folder, operation)
    restore(path)
    if is_there(path):
        if not overwrite:
            raise FileExistsError(f"{operation}: {path} exists: overwrite=True replaces it, or choose another path.")
        if not is_ours(path):
            raise FileExistsError(f"{operation}: {path} is not a state of jaxmpi.io, and is not replaced: remove it.")
        check_free(path, operation)
    if is_there(folder):
        discard(folder)
    make_parents(folder)
    folder.mkdir()
    lock.take(folder, operation)
    return folder


def make_parents(path: Path) -> None:
    """Makes the folders that a path is in. Those that are made go again if one cannot be made."""
    absent = [parent for parent in path.parents if not is_there(parent)]
    try:
        for parent in reversed(absent):
            parent.mkdir(exist_ok=True)
    except OSError:
        for parent in absent:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


def publish(path: Path) -> None:
    """Gives the state its name. An old one of this name is removed."""
    if is_there(path):
        os.rename(path, replaced(path))
    os.rename(partial(path), path)
    if is_there(old := replaced(path)):
        discard(old)


def drop(path: Path) -> None:
    """Removes what has been written of a state, as far as that is possible."""
    shutil.rmtree(partial(path), ignore_errors=True)


def remove(path: Path) -> None:
    """Removes a state: it is gone at once, whatever happens then."""
    if is_there(removed(path)):
        discard(removed(path))
    os.rename(path, removed(path))
    discard(removed(path))


def numbers(folder: Path) -> list[int]:
    """The numbers that are names in a folder of checkpoints, in ascending order; some may not be states of ours."""
    if not folder.is_dir():
        return []
    names = [match for name in os.listdir(folder) if (match := _STATE.fullmatch(name))]
    found = {match[2] for match in names if (match[1], match[3]) in (("", ""), (".", ".replaced"))}
    return sorted(int(name) for name in found if numbered(folder, int(name)).name == name)


def numbered(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}"


def newest(folder: Path) -> Path | None:
    """The path of the state with the largest number; None if there is none."""
    paths = (numbered(folder, number) for number in reversed(numbers(folder)))
    return next((path for path in paths if is_ours(found(path))), None)


def tidy(folder: Path, operation: str) -> None:
    """Removes what runs that have died have left in a folder of checkpoints, and puts back what they were replacing."""
    if not folder.is_dir():
        return
    for name in os.listdir(folder):
        match = _STATE.fullmatch(name)
        if match and match[1]:
            if match[3] == ".replaced":
                restore(folder / match[2])
            elif match[3]:
                check_free(folder / name, operation)
                discard(folder / name)


def prune(folder: Path, keep: int, written: int) -> None:
    """Removes all states but so many: the one that has been written, and the newest ones. What is not ours stays."""
    others = [number for number in numbers(folder) if number != written and is_ours(numbered(folder, number))]
    for number in others[: max(0, len(others) - keep + 1)]:
        remove(numbered(folder, number))


def found(path: Path) -> Path:
    """Where a state is: an old one that was being replaced as a run died is under its hidden name."""
    return replaced(path) if not is_there(path) and is_there(replaced(path)) else path


@contextlib.contextmanager
def naming(what: str, path: Any) -> Iterator[None]:
    """Says in an error of the file system what could not be done."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # it is one of ours, which says that
            raise
        said = type(error)(f"{what} {path}: {error.strerror}")
        said.errno = error.errno
        raise said from error

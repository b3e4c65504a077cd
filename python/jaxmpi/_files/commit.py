"""The commit of a state: it is written under another name, and renamed when all ranks have written it.

Beside a state NAME there may be three hidden folders. `.NAME.partial` is being written, or a run that died left it.
`.NAME.replaced` is an old state while a new one gets its name. `.NAME.removed` is being removed. Rank 0 alone does all
of this.

Two jobs must not write one state. So rank 0 locks the hidden folder that it writes, and the state that it replaces,
before it looks at anything else. It holds both locks until the new state has its name. A lock belongs to the folder
itself, and stays with it when the folder is renamed. So after locking a folder, rank 0 checks that the name still leads
to it. The system releases the locks of a process that dies. File systems without locks of folders lack this
protection.

A run that dies between the two renames of a replacement leaves the old state under its hidden name. Readers look there,
too, and the next run puts it back. Readers take no locks.
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

from jaxmpi._files import metadata, store

_STATE = re.compile(r"(\.?)(\d{8,})(\.partial|\.replaced|\.removed|)")
"""Names in a folder of checkpoints: states and hidden folders."""
_LOOKS = 20
"""How often a reader looks for a state. While another job replaces it, its name is gone for a moment."""


def partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def removed(path: Path) -> Path:
    return path.with_name(f".{path.name}.removed")


def place(path: Any, operation: str) -> str:
    """Return the absolute path of a state. Raise TypeError or ValueError if it is no path of a file system."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{operation}: path must be a string or a path, got {path!r:.80} of {type(path).__name__}.")
    text = os.fspath(path)
    if not isinstance(text, str) or "://" in text or "\0" in text or not text:
        raise ValueError(f"{operation}: path is {text!r}: pass a folder of a file system that all ranks share.")
    whole = os.path.abspath(text)
    if os.path.islink(whole):  # write the folder that the link leads to, where there is room for hidden folders
        whole = os.path.realpath(whole)
    return whole


is_there = os.path.lexists


def is_ours(path: Path) -> bool:
    """Return whether it is a state of `save` or of a `Writer`."""
    try:
        return metadata.KEY in json.loads(store.root(path))["attributes"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def look(path: Path) -> tuple[Path, bytes]:
    """Return the place of a state, and the root's metadata. Raise FileNotFoundError if there is no state.

    While another job replaces the state, it always has one of two names.
    """
    for _ in range(_LOOKS):
        for place in (path, replaced(path)):
            with contextlib.suppress(FileNotFoundError):
                return place, store.root(place)
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def discard(path: Path) -> None:
    """Remove a folder, a file or a link (not what it leads to). Another job may be removing it, too."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


class Lock:
    """A lock of a folder, which is held until `release`, until the context ends, or until the process ends."""

    def __init__(self) -> None:
        self._file: int | None = None

    @property
    def is_held(self) -> bool:
        return self._file is not None

    def take(self, path: Path, operation: str) -> None:
        """Lock the folder that has this name. Raise BlockingIOError if another job or this process has locked it, and
        FileNotFoundError if it does not exist."""
        while not self.holds(path):
            self.release()
            self._file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    return  # this file system has no locks
                self.release()
                raise BlockingIOError(
                    f"{operation}: {path} is being written, by another job, or by a Writer of this one that is not "
                    "closed: choose another path, or wait for its end."
                ) from None

    def make(self, path: Path, operation: str) -> None:
        """Make the folder, unless it exists, and lock it. Raise BlockingIOError as `take` does."""
        while not self.is_held:
            if path.is_symlink() or (is_there(path) and not path.is_dir()):
                discard(path)
            path.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # another job has renamed or removed it in between
                self.take(path, operation)

    def holds(self, path: Path) -> bool:
        try:
            return self._file is not None and os.path.samestat(os.fstat(self._file), os.stat(path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)  # a process forked in between also holds the file
            os.close(self._file)
            self._file = None

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    __del__ = release


def begin(path: Path, overwrite: bool, operation: str, new: Lock, old: Lock) -> None:
    """Make the empty folder in which a state is written. Lock it, and the state that will be replaced. Remove the
    remains of a run that died.

    Raise FileExistsError if something exists that must not be replaced, OSError if it is being written. Then the caller
    calls `drop`.
    """
    folder = partial(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    new.make(folder, operation)
    _put_back(path)
    while is_there(path) and not old.is_held:
        if not overwrite:
            raise FileExistsError(f"{operation}: {path} exists: overwrite=True replaces it, or choose another path.")
        if not is_ours(path):
            raise FileExistsError(f"{operation}: {path} is not a state of jaxmpi.io, and is not replaced: remove it.")
        with contextlib.suppress(FileNotFoundError):
            old.take(path, operation)
    if old.is_held:
        discard(replaced(path))
    for name in os.listdir(folder):
        discard(folder / name)


def _put_back(path: Path) -> None:
    """Give an old state its name back, if a run died while it replaced it. The caller has locked the hidden folder of
    the new state, so no other job is between its two renames."""
    if not is_there(path) and is_there(replaced(path)):
        os.rename(replaced(path), path)


def publish(path: Path, new: Lock, old: Lock, operation: str) -> None:
    """Give the state its name. Remove the locked old one.

    Raise OSError if the written folder or the old state is no longer the locked one.
    """
    if not new.holds(partial(path)) or (old.is_held and not old.holds(path)) or (is_there(path) and not old.is_held):
        raise FileExistsError(
            f"{operation}: another program has changed {path} while it was written: write there from one job at a time."
        )
    if old.is_held:
        os.rename(path, replaced(path))
    try:
        os.rename(partial(path), path)
    except BaseException:
        _put_back(path)
        raise
    shutil.rmtree(replaced(path), ignore_errors=True)  # the next save removes the rest


def drop(path: Path, new: Lock) -> None:
    """Remove the written part of a state, as far as possible."""
    if new.holds(partial(path)):
        shutil.rmtree(partial(path), ignore_errors=True)


def remove(path: Path, operation: str) -> None:
    """Remove a state. It disappears at once, even if this process dies. It stays if another job is writing it."""
    with Lock() as lock, contextlib.suppress(FileNotFoundError, BlockingIOError):
        lock.take(path, operation)
        discard(removed(path))
        os.rename(path, removed(path))
        discard(removed(path))


def numbers(folder: Path) -> list[int]:
    """Return the names in a folder of checkpoints that are numbers, in ascending order. Some may not be our states."""
    listed = os.listdir(folder) if folder.is_dir() else ()
    names = [match for name in listed if (match := _STATE.fullmatch(name))]
    known = {match[2] for match in names if (match[1], match[3]) in (("", ""), (".", ".replaced"))}
    return sorted(int(name) for name in known if numbered(folder, int(name)).name == name)


def numbered(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}"


def newest(folder: Path) -> Path | None:
    for number in reversed(numbers(folder)):
        with contextlib.suppress(OSError):
            if is_ours(look(numbered(folder, number))[0]):
                return numbered(folder, number)
    return None


def tidy(folder: Path, operation: str) -> None:
    """Remove the remains of runs that died from a folder of checkpoints, and put back the states that they replaced.
    Raise OSError if another job is writing there."""
    for name in os.listdir(folder) if folder.is_dir() else ():
        match = _STATE.fullmatch(name)
        if match and match[1]:
            settle(folder / match[2], operation)


def settle(path: Path, operation: str) -> None:
    """Remove the remains of a run that died beside a state, and put back the state that it replaced."""
    with Lock() as new, Lock() as old:
        new.make(partial(path), operation)
        try:
            _put_back(path)
            if is_there(path) and is_there(replaced(path)):
                old.take(path, operation)
                discard(replaced(path))
            discard(removed(path))
        finally:
            drop(path, new)


def prune(folder: Path, keep: int, written: int, operation: str) -> None:
    """Remove all states but `keep`: the one that was just written, and the newest ones. Leave what is not ours."""
    with naming(f"{operation}: cannot remove old states in", folder):
        others = [number for number in numbers(folder) if number != written and is_ours(numbered(folder, number))]
        for number in others[: max(0, len(others) - keep + 1)]:
            remove(numbered(folder, number), operation)


@contextlib.contextmanager
def naming(what: str, path: Any) -> Iterator[None]:
    """Add to an error of the file system what failed."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # an error of jaxmpi, which already says what failed
            raise
        named = type(error)(f"{what} {path}: {error.strerror}")
        named.errno = error.errno
        raise named from error

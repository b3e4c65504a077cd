"""Waiting for files that are ready, by poll.

`select` refuses descriptors over 1,023, which a program with many open files has, and a launcher that inherits them.
"""

import errno
import os
import select
from collections.abc import Iterable


def ready(files: Iterable[int], seconds: float | None = None) -> list[int]:
    """The files that can be read without waiting, or have come to their end; none of them when the time is over."""
    return _polled(files, select.POLLIN, seconds)


def wait_to_write(file: int) -> None:
    _polled([file], select.POLLOUT, None)


def _polled(files: Iterable[int], what: int, seconds: float | None) -> list[int]:
    poll = select.poll()
    for file in files:
        poll.register(file, what)
    found = poll.poll(None if seconds is None else 1000 * seconds)
    if any(event & select.POLLNVAL for _, event in found):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return [file for file, _ in found]

"""Programs that are written for the other API of mpi4jax are refused where they call it.

The launcher reads the program, and the modules beside it, before it starts. Here everything else is seen: packages that
are installed, what `install_as_mpi4jax` is called for, and calls through functions that are passed on.
"""

import linecache
import os
import warnings
from types import FrameType
from typing import Any

from jaxmpi._launcher import written_for
from jaxmpi.compat import _frames


class CallSites:
    """Where a program calls the functions of one API, and whether it is written for that."""

    def __init__(self, api: str):
        self.api = api
        self._on = written_for.checks(os.environ)
        self._errors: dict[str, str] = {}
        """What is wrong with each file that has calls; empty if nothing is. It does not concern a call that the text
        does not show: the function may be another one."""

    def before(self, frame: FrameType) -> None:
        """Called before a function that `frame` calls. Raises RuntimeError if its file is written for the other API."""
        file = frame.f_code.co_filename
        if file not in self._errors:
            self._errors[file] = self._error(frame) if self._on else ""
        if (text := self._errors[file]) and frame.f_lineno in _read(frame).lines:
            raise RuntimeError(text)

    def after(self, frame: FrameType, name: str, result: Any) -> None:
        """Called after it. An array of two rows can be taken for a result and a token; others cannot.

        Raises RuntimeError if that is what the caller does; warns if it may be.
        """
        if not self._on or self.api != "notoken" or getattr(result, "shape", ())[:1] != (2,):
            return
        if (pair := _frames.pair_of(frame)) is not None:
            self._judge(*pair, name)

    def _error(self, frame: FrameType) -> str:
        verdict = _read(frame).verdict
        if verdict is None or not verdict.certain or verdict.sign.api == self.api:
            return ""
        return (
            f"{written_for.complaint(verdict.sign, frame.f_code.co_filename)}. {_remedy(verdict.sign.api)}; "
            f"{written_for.SWITCH}=0 runs it as it is."
        )

    def _judge(self, frame: FrameType, names: list[str], name: str) -> None:
        """An array of two rows is unpacked into two names."""
        file, line = frame.f_code.co_filename, frame.f_lineno
        token, written = written_for.is_token(names[1]), _read(frame).sure_of("notoken")
        if written and not token:
            return
        text = (
            f"{file}:{line}: the result of mpi4jax.{name}, an array of two rows, is unpacked into "
            f"two names, as programs for {written_for.RELEASES['token']} do with a result and a token. If this one is "
            f"written for that: {_remedy('token')}. If the rows are meant: {written_for.SWITCH}=0"
        )
        if token and not written:
            raise RuntimeError(text)
        registry = frame.f_globals.setdefault("__warningregistry__", {})
        warnings.warn_explicit(text, RuntimeWarning, file, line, registry=registry)


def _remedy(api: str) -> str:
    return f"run it by --as {written_for.OPTIONS[api]}, or call jaxmpi.compat.install_as_mpi4jax(api={api!r})"


_readings: dict[str, written_for.Reading] = {}


def _read(frame: FrameType) -> written_for.Reading:
    """What the source text of the frame's file says; nothing if it cannot be found."""
    file = frame.f_code.co_filename
    if file not in _readings:
        _readings[file] = written_for.read("".join(linecache.getlines(file, frame.f_globals)))
    return _readings[file]

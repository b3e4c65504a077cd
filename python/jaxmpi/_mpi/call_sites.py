"""Call sites: lines of the user's program that call the package."""

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax

PACKAGES = (
    *(os.path.dirname(file) + os.sep for file in (os.path.dirname(__file__), jax.__file__)),
    threading.__file__,
)
"""The beginnings of the names of files that are not part of the user's program."""

_eager_calls = ("", "")
"""File and name of the function through which eager calls get a program, which serves all calls alike."""


def makes_eager_calls(function: Callable[..., Any]) -> None:
    """Name the function through which all eager calls pass: a traceback with it has no line of a call in a trace."""
    global _eager_calls
    _eager_calls = (function.__code__.co_filename, function.__name__)


def frame() -> Any:
    """Return the innermost frame of the user's program that is being executed."""
    return _of_program(sys._getframe(1))


def _of_program(frame: Any) -> Any:
    """Return the innermost frame of the user's program, from this frame on outwards."""
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGES):
        frame = frame.f_back
    return frame


def of_frame(frame: Any) -> str:
    """Return the line of a frame, with the name of the function."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def here() -> str:
    """Return the line of the user's program that is being executed."""
    return of_frame(frame())


def of_main_thread() -> str:
    """Return the line of the user's program that Python's main thread is executing; empty if that has ended."""
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    return of_frame(_of_program(innermost)) if innermost is not None else ""


def of_traceback(traceback: Any) -> str | None:
    """Return the line of the user's program in a traceback of JAX, the innermost call first; None if there is no line,
    or if the call was eager."""
    for frame in getattr(traceback, "frames", ()):
        if not frame.file_name.startswith(PACKAGES):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
        if (frame.file_name, frame.function_name) == _eager_calls:
            return None
    return None

"""What to say at the end of a traceback if another `--as`, or none, may be the reason.

Loaded by path on a rank that has failed, so nothing here imports jax, mpi4py or this package, and whoever loads it has
loaded written_for.py before.
"""

import linecache
import os
import re
import sys
from types import FrameType
from typing import Any

_UNPACKED = re.compile(r"values to unpack \(expected 2|iteration over a 0-d|Too many indices: 0-dim")
"""What Python and JAX say of an array that is taken for a pair."""
_PAIR = re.compile(r"\b(tuple|Token)\b")
"""What they say of a pair that is taken for an array."""
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep


def _frames(error: BaseException) -> list[FrameType]:
    """The frames of the traceback that are not this package's, the innermost first."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_OURS):
            frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames[::-1]


def _lines(frame: FrameType) -> list[str]:
    return linecache.getlines(frame.f_code.co_filename, frame.f_globals)


def _reading(frame: FrameType) -> Any:
    return _written_for().read("".join(_lines(frame)))


def _written_for() -> Any:
    return sys.modules["jaxmpi._launcher.written_for"]


def _mentions(frame: FrameType) -> bool:
    """Whether the frame's file knows mpi4jax, or its line takes something that is named like a token."""
    line = "".join(_lines(frame)[frame.f_lineno - 1 : frame.f_lineno])
    taken = re.match(r"\s*[\w.]+, *([\w.]+) *=[^=]", line)
    return any("mpi4jax" in line for line in _lines(frame)) or bool(taken and _written_for().is_token(taken[1]))


def of_error(error: BaseException, replaced: list[str]) -> str:
    """Advice on an exception of a program for which the packages `replaced` are replaced; empty if there is none."""
    if "--as " in str(error):
        return ""
    if isinstance(error, ImportError):
        return _of_import(error, replaced)
    if not any(map(_mentions, _frames(error))):
        return ""
    if "mpi4jax" in replaced and isinstance(error, AttributeError) and _of_tokens(str(error)):
        return _for_tokens()
    if "mpi4jax" in replaced and _UNPACKED.search(str(error)):
        return f"if that is a result of mpi4jax: {_for_tokens()}"
    if "mpi4jax-token" in replaced and isinstance(error, (TypeError, AttributeError)) and _PAIR.search(str(error)):
        return (
            "if that is a result of mpi4jax: with --as mpi4jax-token functions return (result, token), as up to 0.7; "
            "for a program written for 0.8 or later: --as mpi4jax"
        )
    return ""


def _for_tokens() -> str:
    return (
        "with --as mpi4jax functions return the result alone, and there is no experimental or notoken, as from 0.8 on; "
        "for a program written for mpi4jax up to 0.7: --as mpi4jax-token"
    )


def _of_tokens(text: str) -> bool:
    return re.search(r"\b(experimental|notoken|auto_tokenize)\b", text) is not None


def _of_import(error: ImportError, replaced: list[str]) -> str:
    package = (error.name or "").partition(".")[0]
    if package not in ("mpi4jax", "jpi"):
        return ""
    if any(name.partition("-")[0] == package for name in replaced):
        return _for_tokens() if "mpi4jax" in replaced and _of_tokens(str(error)) else ""
    if not isinstance(error, ModuleNotFoundError):
        return ""
    option, other = package, ""
    if package == "mpi4jax":
        verdicts = (reading.verdict for reading in map(_reading, _frames(error)) if reading.signs)
        if (verdict := next(verdicts, None)) is not None:
            option = _written_for().OPTIONS[verdict.sign.api]
        else:
            other = " (mpi4jax-token if it is written for mpi4jax up to 0.7)"
    return f"with jaxmpi in its place: --as {option}, before the program{other}"

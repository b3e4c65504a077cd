"""The tags of messages: those of derivatives are never taken for those of the function itself.

The upper half of the tags that MPI has belongs to derivatives, one for each tag below: with the tag of a message go its
tangents and cotangents, moved up.
"""

from typing import Any

from mpi4py import MPI

LIMIT: int = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # type: ignore[assignment]
"""The highest tag."""

_FIRST = (LIMIT + 1) // 2

OF_RULES = _FIRST - 1
"""The tag of exchanges that a derivative makes of its own: the highest one that users may use with derivatives."""


def sent(tag: int, derivative: bool) -> int:
    """The tag under which a message travels, of a derivative or not; ANY_TAG stays what it is."""
    return tag + _FIRST if derivative and tag >= 0 else tag


def refusal(params: dict[str, Any], *names: str) -> str:
    """Why messages with these parameters have no derivative; empty where they may have one."""
    for name in names:
        if params[name] >= _FIRST:
            limit = f"{name} must be below {_FIRST} here, got {params[name]}."
            return f"the messages of derivatives have tags of their own, so {limit}"
    return ""

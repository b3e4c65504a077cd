"""The tags of messages. Derivatives have other tags, so that their messages never match messages of the function.

The upper half of MPI's tags belongs to derivatives, one for each tag in the lower half: the tangents and cotangents of
a message with tag t have tag t + half. The last three tags of the lower half belong to the library. Two of them are for
messages of plans (plans.py), whose labels say which array and derivative they are of.
"""

from typing import Any

from mpi4py import MPI

from jaxmpi._mpi.library import CONSTANTS

LIMIT: int = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # type: ignore[assignment]
"""The highest tag."""

_FIRST: int = CONSTANTS["FIRST_TAG_OF_DERIVATIVES"]

TRACED: int = CONSTANTS["TRACED"]
"""A rank or tag that is known at run time, as a parameter; tags of derivatives count from there."""

OF_RULES = _FIRST - 1
"""The tag of exchanges that only a derivative makes."""

KEPT = range(CONSTANTS["FIRST_TAG_OF_PLANS"], _FIRST)
"""The tags that users may not use: two tags of messages of plans, and the tag of rules."""


def sent(tag: int, derivative: bool) -> int:
    """Return the tag with which a message is sent, by `derivative` or not; ANY_TAG is unchanged."""
    return tag + _FIRST if derivative and (tag >= 0 or tag == TRACED) else tag


def why_not_differentiable(params: dict[str, Any], *names: str) -> str:
    """Return why messages with these parameters have no derivative; empty if they may have one."""
    for name in names:
        if params[name] >= _FIRST:
            limit = f"{name} must be below {_FIRST} here, got {params[name]}."
            return f"the messages of derivatives have tags of their own, so {limit}"
    return ""

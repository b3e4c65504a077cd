"""Versions of JAX: the newest one that was tried, and how versions compare."""

import re

NEWEST_TRIED = "0.12.0.1"
"""The newest version of JAX and jaxlib with which the tests of jaxmpi were run."""


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, without those of its build."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("dev")[0].partition("+")[0]))

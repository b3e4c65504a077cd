"""The collectives of a compiled program, and the devices that take part: read from the HLO."""

import math
import re

import jax

from jaxmpi._sharded import replica_groups

_SHAPE = re.compile(r"([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")
_MOST = 2**31 - 1
_BY_MPI = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_OF_BYTES = ("all-to-all", "collective-permute")
"""Collectives that XLA makes of messages of bytes."""
_TYPES = {"pred", *(f"{kind}{bits}" for kind in "su" for bits in (8, 16, 32, 64)), "f32", "f64", "c64", "c128"}
"""XLA's types for which it knows an MPI datatype."""
ADVICE = "use --collectives gloo, or jaxmpi's own functions outside of the sharded program (docs/sharded.md)"


def _check(name: str, shapes: str, line: str) -> None:
    """Raise for collectives that XLA, or XLA's use of MPI, cannot do."""
    where = ((match := re.search(r'op_name="([^"]*)"', line)) and f" ({match[1]})") or ""
    if name not in _BY_MPI:
        raise NotImplementedError(f"jaxmpi: XLA has no {name} by MPI{where}: {ADVICE}")
    for kind, sizes in _SHAPE.findall(shapes):
        count = math.prod(int(n) for n in sizes.split(",") if n)
        of_bytes = name in _OF_BYTES
        if not of_bytes and kind not in _TYPES:
            raise TypeError(
                f"jaxmpi: XLA's {name} by MPI has no {kind}{where}: convert to another dtype before it, or {ADVICE}"
            )
        width = max(1, int(re.sub(r"\D", "", kind.partition("e")[0]) or 8) // 8)
        if count * (width if of_bytes else 1) > _MOST:
            unit = "bytes" if of_bytes else "elements"
            raise ValueError(
                f"jaxmpi: XLA's {name} of {kind}[{sizes}]{where} has more than {_MOST} {unit}, and XLA passes their "
                f"number to MPI as an int: divide it, or {ADVICE}"
            )


def groups_of(program: str, devices: int) -> list[tuple[int, ...]]:
    """Return the groups of devices that communicate in a program, by their positions among so many devices.

    Args:
      program: the text of an HLO module after optimization.

    Raises:
      TypeError, ValueError, NotImplementedError: XLA cannot do a collective of the program by MPI, or writes it in an
        unknown way.
    """
    groups: set[tuple[int, ...]] = set()
    try:
        for collective, line in replica_groups.collectives(program, devices):
            _check(collective.opcode, collective.shapes, line)
            groups.update(collective.groups)
    except replica_groups.Unreadable as error:
        raise NotImplementedError(
            f"jaxmpi: JAX {jax.__version__} writes which devices communicate in a way that jaxmpi cannot read "
            f"({error}): {ADVICE}"
        ) from None
    return sorted(groups)

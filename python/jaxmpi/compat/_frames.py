"""What the caller of a function does with what it gets, by the bytecode that follows the call."""

import dis
from types import CodeType, FrameType

RETURNED = "returned"
Use = list[str] | str | None
"""What is done with a value: it is unpacked into two names, it is returned, or something else."""

_uses: dict[tuple[int, int], tuple[CodeType, Use]] = {}
"""The uses of values, by the code of their functions and the position in it. The code is kept, so that its number stays
its own."""


def imports_name(frame: FrameType) -> bool:
    """Whether the frame is executing `from ... import name`."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"


def pair_of(frame: FrameType) -> tuple[FrameType, list[str]] | None:
    """The frame that unpacks the value of the call it is executing into two names, and these names.

    It is this one, or if it returns the value, its caller, and so on. A target that is no name is an empty string.
    """
    caller: FrameType | None = frame
    while caller is not None:
        use = _use(caller)
        if use != RETURNED:
            return (caller, use) if isinstance(use, list) else None
        caller = caller.f_back
    return None


def _use(frame: FrameType) -> Use:
    place = id(frame.f_code), frame.f_lasti
    if place not in _uses:
        _uses[place] = frame.f_code, _read(frame)
    return _uses[place][1]


def _read(frame: FrameType) -> Use:
    """What the instructions after the one that a frame is executing do with its value."""
    after = [i for i in dis.get_instructions(frame.f_code) if i.offset > frame.f_lasti and i.opname != "NOP"]
    if not after or (after[0].opname, after[0].argval) != ("UNPACK_SEQUENCE", 2):
        return RETURNED if after and after[0].opname == "RETURN_VALUE" else None
    names: list[str] = []
    for instruction in after[1:]:
        if instruction.opname == "STORE_SUBSCR":
            names.append("")
        elif instruction.opname.startswith("STORE_"):  # STORE_FAST_STORE_FAST stores two, STORE_FAST_LOAD_FAST one
            stored = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
            names += stored[: instruction.opname.count("STORE_")]
        if len(names) >= 2:
            break
    return [*names, "", ""][:2]

"""What the caller of a function does with what it gets, by the bytecode that follows the call."""

import dis
from types import FrameType


def _following(frame: FrameType) -> list[dis.Instruction]:
    """The instructions after the one that a frame is executing."""
    return [i for i in dis.get_instructions(frame.f_code) if i.offset > frame.f_lasti and i.opname != "NOP"]


def imports_name(frame: FrameType) -> bool:
    """Whether the frame is executing `from ... import name`."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"


def pair_of(frame: FrameType) -> tuple[FrameType, list[str]] | None:
    """The frame that unpacks the value of the call it is executing into two names, and these names.

    It is this one, or if it returns the value, its caller, and so on. A target that is no name is an empty string.
    """
    caller: FrameType | None = frame
    while caller is not None:
        after = _following(caller)
        if not after or after[0].opname != "RETURN_VALUE":
            break
        caller = caller.f_back
    if caller is None or not after or (after[0].opname, after[0].argval) != ("UNPACK_SEQUENCE", 2):
        return None
    names: list[str] = []
    for instruction in after[1:]:
        if instruction.opname == "STORE_SUBSCR":
            names.append("")
        elif instruction.opname.startswith("STORE_"):  # STORE_FAST_STORE_FAST stores two, STORE_FAST_LOAD_FAST one
            stored = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
            names += stored[: instruction.opname.count("STORE_")]
        if len(names) >= 2:
            break
    return caller, [*names, "", ""][:2]

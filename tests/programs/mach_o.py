"""What is wrong with the core in a wheel for macOS, as far as can be seen without macOS: `python mach_o.py WHEEL 11.0`.

`make wheel` calls it. lief reads the file. Each symbol that is missing in the core was either found in the stubs of
macOS's libraries by the linker, or is left to be looked up in the whole process, where only Python's will be.
"""

import re
import sys
import zipfile
from dataclasses import dataclass

LIBRARIES = {"/usr/lib/libSystem.B.dylib"}
IN_THE_PROCESS = -2
"""BIND_SPECIAL_DYLIB_FLAT_LOOKUP of Apple's loader.h: where a symbol comes from that no library was named for."""


@dataclass(frozen=True)
class Core:
    """What is known of a core that was compiled for macOS."""

    processor: str
    oldest: str
    """The oldest macOS for which it was linked."""
    libraries: frozenset[str]
    left: frozenset[str]
    """Symbols that are looked up in the process."""
    signed: bool


def problems(core, oldest):
    """In words."""
    if core.processor != "ARM64":
        yield f"it is for {core.processor}"
    if core.oldest != oldest:
        yield f"it needs macOS {core.oldest}"
    if other := core.libraries - LIBRARIES:
        yield f"it needs {', '.join(sorted(other))}"
    if missing := sorted(name for name in core.left if not re.match("__?Py", name)):
        yield f"macOS lacks {', '.join(missing)}"
    if not core.signed:
        yield "it is not signed, so that a Mac with an ARM processor does not load it"


def read(data):
    import lief

    parsed = lief.MachO.parse(list(data))
    if parsed is None or parsed.size != 1:
        raise SystemExit("mach_o.py: not a library for one kind of processor")
    (library,) = parsed
    symbols = [symbol for symbol in library.imported_symbols if symbol.has_binding_info]
    own = {command.name for command in library.commands if command.command.name == "ID_DYLIB"}
    return Core(
        processor=library.header.cpu_type.name,
        oldest=".".join(map(str, library.build_version.minos[:2])),
        libraries=frozenset(command.name for command in library.libraries) - own,
        left=frozenset(symbol.name for symbol in symbols if symbol.binding_info.library_ordinal == IN_THE_PROCESS),
        signed=library.has_code_signature,
    )


def main():
    wheel, oldest = sys.argv[1:]
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith((".so", ".dylib"))]
        core = read(archive.read(name))
    print(
        f"{name}: macOS {core.oldest}, {core.processor}, {', '.join(sorted(core.libraries))}, {len(core.left)} symbols"
    )
    return "\n".join(f"{wheel}: {problem}" for problem in problems(core, oldest)) or 0


if __name__ == "__main__":
    sys.exit(main())

"""Prints names.def: the names that jaxlib looks up in the library of MPITRAMPOLINE_LIB. `python names.py > names.def`

MPItrampoline, which is compiled into jaxlib, has these names as strings.
"""

import pathlib
import re
import textwrap

import jaxlib

HERE = pathlib.Path(__file__).parent
NAME = re.compile(rb"\0MPIABI_(\w+)(?=\0)")


def is_function(name: str) -> bool:
    """Return whether a name is a function's: a capital letter, then a small one, as in MPI. Constants are capitals."""
    return re.match(r"[A-Z][a-z]", name) is not None


def main() -> None:
    wanted: set[str] = set()
    for library in pathlib.Path(jaxlib.__file__).parent.glob("*.so"):
        wanted.update(name.decode() for name in NAME.findall(library.read_bytes()))
    wanted -= set(re.findall(r"\bMPIABI_(\w+)", (HERE / "sharded.c").read_text()))
    print("/* The names of MPItrampoline that XLA does not use, without MPIABI_ in front: made by names.py.")
    print(" * C is a constant, F a function. */")
    names = sorted(wanted, key=lambda name: (is_function(name), name))
    rows = " ".join(f"{'F' if is_function(name) else 'C'}({name})" for name in names)
    print(textwrap.fill(rows, 120))


if __name__ == "__main__":
    main()

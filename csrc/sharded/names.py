"""Prints names.def: the names that jaxlib looks up in the library of MPITRAMPOLINE_LIB. `python names.py > names.def`

MPItrampoline, which is compiled into jaxlib, has these names as strings. With --check it prints nothing, and fails if
this environment's jaxlib has a name that names.def and trampoline.c lack: then `import jax` would end the process.
"""

import pathlib
import re
import subprocess
import sys

import jaxlib

HERE = pathlib.Path(__file__).parent
NAME = re.compile(rb"\0(MPIX?ABI_\w+|mpiwrapper_\w+|mpiabi_(?!loaded)\w+)(?=\0)")


def wanted() -> set[str]:
    """Return the names that jaxlib looks up."""
    names: set[str] = set()
    for library in pathlib.Path(jaxlib.__file__).parent.glob("*.so"):
        names.update(name.decode() for name in NAME.findall(library.read_bytes()))
    return names


def exported(library: str) -> set[str]:
    """Return the names that a library exports, by nm."""
    listing = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in listing.stdout.splitlines()}


def is_function(name: str) -> bool:
    """Return whether a name is a function's: a capital letter, then a small one, as in MPI. Constants are capitals."""
    return re.match(r"MPIX?ABI_[A-Z][a-z]", name) is not None


def main() -> None:
    if sys.argv[1:2] == ["--check"]:
        if missing := sorted(wanted() - exported(sys.argv[2])):
            sys.exit(f"{sys.argv[2]} lacks {len(missing)} names of jaxlib {jaxlib.__version__}: {' '.join(missing)}")
        return
    ours = set(re.findall(r"\b(?:MPIABI|mpiwrapper|mpiabi)_\w+\b", (HERE / "trampoline.c").read_text()))
    print("/* The names of MPItrampoline that XLA does not use: made by names.py. */")
    for name in sorted(wanted() - ours):
        if name.startswith("MPI"):
            print(f"{'FUNCTION' if is_function(name) else 'CONSTANT'}({name})")


if __name__ == "__main__":
    main()

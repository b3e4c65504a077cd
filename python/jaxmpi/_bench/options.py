"""The command line. All ranks read the same one. Rank 0 alone reports the problems in it, and then all ranks end."""

import argparse
import difflib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from jaxmpi._bench import operations, programs
from jaxmpi._bench.data import Numbers
from jaxmpi._bench.operations import Case, Operation
from jaxmpi._bench.timing import COMM
from jaxmpi._mpi.library import DATATYPES
from jaxmpi._primitive import arguments

SIZES = (8, 1 << 10, 32 << 10, 1 << 20, 16 << 20)
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Parser(argparse.ArgumentParser):
    """A parser that several ranks share. It prints messages once, and no rank ends before that."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if COMM.rank == 0:
            super()._print_message(message, file)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if message:
            self._print_message(message, sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        COMM.Barrier()  # a launcher ends the job when the first rank ends with an error
        sys.exit(status)


def size(text: str) -> int:
    """Read a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:(B?)|([KMG])(?:iB)?)", text)
    if not match:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: write bytes, or as in 64KiB, 1M or 2G, of 1024 each; operations come before options"
        )
    nbytes = int(float(match[1]) * _UNITS[match[2] or match[3] or ""])
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is less than a byte; for an empty message measure barrier")
    return nbytes


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not 0 < value < 1e6:
            raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1000000")
        return value

    return number


def _parser() -> Parser:
    parser = Parser(
        prog="python -m jaxmpi.bench",
        usage="%(prog)s [operation ...] [options]",
        description="Latency and bandwidth of the operations, on data that is checked. All ranks run it: "
        "python -m jaxmpi.run -n 4 -m jaxmpi.bench, or mpiexec -n 4 python -m jaxmpi.bench.",
        epilog="Sizes and bandwidths are those of nccl-tests. The exit code is 1 if an element was wrong.",
    )
    parser.add_argument(
        "operations",
        nargs="*",
        metavar="operation",
        help=f"what to measure, also by the names of OSU and nccl-tests (default: {' '.join(operations.USUAL)})",
    )
    parser.add_argument("--list", action="store_true", help="list the operations, and the meaning of sizes, and end")
    usual = " ".join(map(show_size, SIZES))
    add = parser.add_argument
    add("--bytes", nargs="+", type=size, metavar="SIZE", default=SIZES, help=f"such as 8 64KiB 1M (default: {usual})")
    add("-d", "--dtype", default="float32", help="such as float32, bfloat16, int8 (default: %(default)s)")
    add(
        "--how",
        choices=programs.HOW,
        default="loop",
        help="in a loop of one compiled program (default); by a call of jaxmpi.jit each; by an eager operation each",
    )
    add("--rounds", type=_positive(int), default=5, metavar="N", help="(default: %(default)s)")
    add("--seconds", type=_positive(float), default=0.2, help="for each size, about (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write all figures there, with their units")
    add("--plot", type=Path, metavar="FILE", help="draw them there, such as bench.png; by matplotlib")
    return parser


def _without_files(words: Sequence[str]) -> list[str]:
    """Return the arguments without names of files, which rank 0 alone uses."""
    files = ("--json", "--plot")
    pairs = zip(["", *map(str, words)], map(str, words), strict=False)
    return [text for before, text in pairs if before not in files and not text.startswith(files)]


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, with `rows`: (name asked for, row). End all ranks with status 2 if an option is wrong."""
    parser = _parser()
    asked = COMM.allgather(_without_files(sys.argv[1:] if words is None else words))
    differs = next((rank for rank, theirs in enumerate(asked) if theirs != asked[0]), None)
    if differs is not None:
        parser.error(f"the ranks have different arguments: 0 {asked[0]}, {differs} {asked[differs]}")
    options = parser.parse_intermixed_args(words)
    if options.list:
        return options
    # Rank 0 alone looks at the files, which it alone writes.
    problem = next(filter(None, COMM.allgather(next(_problems(options), ""))), "")
    if problem:
        parser.error(problem)
    return options


def _problems(options: argparse.Namespace) -> Iterator[str]:
    """Yield the problems of the options. Also set further options that follow from them."""
    options.rows = []
    usual = (name for name in operations.USUAL if operations.OPERATIONS[name].least <= COMM.size)
    for name in options.operations or usual:
        row = operations.named(name)
        if row is None:
            close = difflib.get_close_matches(name, operations.all_names(), 1)
            yield f"no operation {name!r}{f': did you mean {close[0]}?' if close else ''} (--list names all)"
            return
        if COMM.size < row.least:
            yield f"{name} needs {row.least} ranks: python -m jaxmpi.run -n {row.least} -m jaxmpi.bench {name}"
        options.rows.append((name, row))
    yield from _dtype_problems(options)
    if COMM.rank == 0:
        yield from _file_problems(options)


def _dtype_problems(options: argparse.Namespace) -> Iterator[str]:
    name = options.dtype
    if name not in DATATYPES:
        close = difflib.get_close_matches(name, DATATYPES, 1)
        hint = f": did you mean {close[0]}?" if close else "."
        yield f"no dtype {name!r}{hint} Possible: {', '.join(DATATYPES)}"
        return
    if jax.dtypes.canonicalize_dtype(np.dtype(name)).name != name:
        jax.config.update("jax_enable_x64", True)
    for asked, row in options.rows:
        adds = row.reduces(COMM.size)
        if adds and "SUM" not in arguments.REDUCTIONS[DATATYPES[name].kind]:
            yield f"{asked}: MPI.SUM is not defined for {name}: pass another --dtype"
        try:
            Numbers.for_operands(np.dtype(name), COMM.size if adds else 1)
        except ValueError as error:
            yield f"{asked}: {error}"
    if max(options.bytes) // DATATYPES[name].itemsize >= 1 << 31:
        yield f"{show_size(max(options.bytes))} of {name} is more than {2**31 - 1} elements"


def _file_problems(options: argparse.Namespace) -> Iterator[str]:
    """Yield the problems of the files, on rank 0, which writes them, before the measurement."""
    for option, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
            yield f"{option}: {path} cannot be written"
    if options.plot is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        yield "--plot needs matplotlib: pip install matplotlib"
        return
    from matplotlib.figure import Figure

    known = Figure().canvas.get_supported_filetypes()
    if options.plot.suffix[1:] not in known:
        yield f"--plot: {options.plot} is no picture: the name must end in one of {', '.join(known)}"


def show_size(nbytes: float) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}".replace(" ", "")
    return f"{nbytes:g}"


def cases(row: Operation, options: argparse.Namespace) -> tuple[list[Case], str]:
    """Return the cases of the operation, one for each size, and a remark if sizes were rounded to whole elements."""
    if not row.size:
        return [Case(COMM.rank, COMM.size, 1)], ""
    parts, itemsize = row.parts(COMM.size), DATATYPES[options.dtype].itemsize
    elements = [row.fit(nbytes // itemsize, parts) for nbytes in options.bytes]
    sizes = zip(options.bytes, [count * parts * itemsize for count in elements], strict=True)
    rounded = ", ".join(f"{asked} to {actual}" for asked, actual in sizes if asked != actual)
    where = [Case(COMM.rank, COMM.size, count) for count in dict.fromkeys(elements)]
    return where, f"sizes are rounded: {rounded}" if rounded else ""

"""The command line. All ranks read the same one. Rank 0 alone reports the problems in it, and then all ranks end."""

import argparse
import difflib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from mpi4py import MPI

from jaxmpi._bench import operations, timing
from jaxmpi._bench.data import Numbers
from jaxmpi._bench.operations import Case, Operation
from jaxmpi._mpi.library import DATATYPES
from jaxmpi._primitive import arguments

COMM = MPI.COMM_WORLD

SIZES = (8, 1 << 10, 32 << 10, 1 << 20, 16 << 20)
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_DEFAULT_RANGE = (8, 16 << 20, 2.0)


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


def _number(least: int, most: int) -> Any:
    def number(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from {least} to {most}")
        return int(text)

    return number


def _real(above: float, what: str) -> Any:
    def real(text: str) -> float:
        try:
            if above < float(text) < 1e6:
                return float(text)
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}")

    return real


_seconds, _factor = _real(0, "number of seconds"), _real(1, "factor above 1")


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
    sizes = parser.add_argument_group("sizes")
    usual = " ".join(map(show_size, SIZES))
    sizes.add_argument("--bytes", nargs="+", type=size, metavar="SIZE", help=f"such as 8 64KiB 1M (default: {usual})")
    least, most, factor = _DEFAULT_RANGE
    sizes.add_argument("-b", "--min-bytes", type=size, metavar="SIZE", help=f"or from here on ({show_size(least)}),")
    sizes.add_argument("-e", "--max-bytes", type=size, metavar="SIZE", help=f"up to this ({show_size(most)}),")
    sizes.add_argument(
        "-f",
        "--step-factor",
        type=_factor,
        metavar="F",
        help=f"each so many times the last ({factor:g})",
    )
    data = parser.add_argument_group("data")
    data.add_argument("-d", "--dtype", default="float32", help="such as float32, bfloat16, int8 (default: %(default)s)")
    data.add_argument("-o", "--op", default="sum", choices=operations.REDUCTIONS, help="of reductions (default: sum)")
    data.add_argument("--device", choices=("cpu", "gpu"), help="where the arrays are (default: JAX's default device)")
    data.add_argument(
        "--check", action=argparse.BooleanOptionalAction, default=True, help="compare with NumPy (default)"
    )
    how = parser.add_argument_group("how it is measured")
    how.add_argument(
        "--how",
        choices=timing.HOW,
        default="loop",
        help="in a loop of one compiled program (default); by a call of jaxmpi.jit each; by an eager operation each",
    )
    how.add_argument("--rounds", type=_number(1, 10**6), default=5, metavar="N", help="(default: %(default)s)")
    length = how.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=_seconds, default=0.2, help="for each size, about (default: %(default)s)")
    length.add_argument("-n", "--iterations", type=_number(1, 10**6), metavar="N", help="in a round, instead")
    how.add_argument(
        "-w",
        "--warmup",
        type=_number(0, timing.MOST),
        default=5,
        metavar="N",
        help="before them (default: %(default)s)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, with their units")
    output.add_argument("--plot", type=Path, metavar="FILE", help="draw them there, such as bench.png; by matplotlib")
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
    problem = next((text for text in _agreed(_problems(options)) if text), "")
    if problem:
        parser.error(problem)
    return options


def _agreed(texts: Iterator[str]) -> list[str]:
    """Return the first text of each rank, because files and devices may be missing on one of them."""
    return COMM.allgather(next(texts, ""))


def _problems(options: argparse.Namespace) -> Iterator[str]:
    """Yield the problems of the options. Also set further options that follow from them."""
    options.rows = []
    for name in options.operations or usual():
        row = operations.named(name)
        if row is None:
            close = difflib.get_close_matches(name, operations.all_names(), 1)
            yield f"no operation {name!r}{f': did you mean {close[0]}?' if close else ''} (--list names all)"
            return
        if COMM.size < row.least:
            yield f"{name} needs {row.least} ranks: python -m jaxmpi.run -n {row.least} -m jaxmpi.bench {name}"
        options.rows.append((name, row))
    yield from _sizes_problems(options)
    yield from _dtype_problems(options)
    yield from _device_problems(options)
    if COMM.rank == 0:
        yield from _file_problems(options)


def usual() -> list[str]:
    return [name for name in operations.USUAL if operations.OPERATIONS[name].least <= COMM.size]


def _sizes_problems(options: argparse.Namespace) -> Iterator[str]:
    asked = (options.min_bytes, options.max_bytes, options.step_factor)
    if options.bytes is None and asked == (None, None, None):
        options.bytes = list(SIZES)
    elif options.bytes is None:
        least, most, factor = (mine or default for mine, default in zip(asked, _DEFAULT_RANGE, strict=True))
        if options.max_bytes is None:
            most = max(least, most)
        if options.min_bytes is None:
            least = min(least, most)
        if least > most:
            yield f"--min-bytes is {show_size(least)}, and --max-bytes {show_size(most)}, which is less"
        options.bytes = [int(least)]
        while (larger := max(options.bytes[-1] + 1, int(options.bytes[-1] * factor))) <= most:
            options.bytes.append(larger)
    elif asked != (None, None, None):
        yield "--bytes names the sizes; without it --min-bytes, --max-bytes and --step-factor do"


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
        reduces = row.reduces(COMM.size)
        possible = arguments.REDUCTIONS[DATATYPES[name].kind]
        if reduces and options.op.upper() not in possible:
            known = [op for op in operations.REDUCTIONS if op.upper() in possible]
            others = f"--op {' or '.join(known)}, or another --dtype" if known else "another --dtype"
            yield f"{asked}: MPI.{options.op.upper()} is not defined for {name}: pass {others}"
        try:
            Numbers.for_reduction(np.dtype(name), options.op if reduces else "", COMM.size)
        except ValueError as error:
            yield f"{asked}: {error}"
    if max(options.bytes) // DATATYPES[name].itemsize >= 1 << 31:
        yield f"{show_size(max(options.bytes))} of {name} is more than {2**31 - 1} elements"


def _device_problems(options: argparse.Namespace) -> Iterator[str]:
    try:
        options.placed = jax.local_devices(backend=options.device)[0]
    except RuntimeError as error:
        yield f"--device {options.device}: {str(error).splitlines()[0]}"


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
        return [Case(COMM.rank, COMM.size, 1, options.op)], ""
    parts, itemsize = row.parts(COMM.size), DATATYPES[options.dtype].itemsize
    elements = [row.fit(nbytes // itemsize, parts) for nbytes in options.bytes]
    sizes = zip(options.bytes, [count * parts * itemsize for count in elements], strict=True)
    rounded = ", ".join(f"{asked} to {actual}" for asked, actual in sizes if asked != actual)
    where = [Case(COMM.rank, COMM.size, count, options.op) for count in dict.fromkeys(elements)]
    return where, f"sizes are rounded: {rounded}" if rounded else ""

"""Where the time of a job went: `python -m jaxmpi.trace FOLDER`, after a run with JAXMPI_TRACE=FOLDER.

Reads the timelines of all ranks and brings their clocks together. For each operation and line of the program it prints
how long the ranks were in it, and how much of this time they waited for others. Writes three files into the folder:
`timeline.json` of all ranks, for ui.perfetto.dev, and the pictures `timeline.png` and `messages.png`. Needs no MPI.
"""

import argparse
import contextlib
import importlib.util
import io
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from jaxmpi._trace import clocks, files, matching, pictures, report


def _tables(ranks: list[files.Rank], matched: matching.Matched, top: int) -> Iterator[str]:
    uncertainty = clocks.align(ranks, matched)
    caused = matching.add_waiting(matched)
    span = max(event.end for rank in ranks for event in rank.events) / 1e6
    many = len(ranks) > 1
    yield f"{len(ranks)} rank{'s' if many else ''}, {span:.3g} s from the first operation to the end of the last"
    yield ""
    yield from report.by_line(ranks, span, top)
    yield ""
    yield from report.by_rank(ranks, span, caused)
    if matched.messages:
        yield ""
        yield from report.by_pair(matched.messages, caused, top)
    notes = list(report.caveats(ranks, matched, uncertainty))
    yield from ["", *(f"Note: {note}." for note in notes)] if notes else []


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jaxmpi.trace", description="Where the time of a job went.")
    parser.add_argument("folder", type=Path, help="the value of JAXMPI_TRACE in the run")
    parser.add_argument(
        "--job", default="", metavar="NAME", help="if the folder has several jobs: the name, or how it begins"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where files are written (default: the folder)")
    parser.add_argument("--top", type=int, default=15, metavar="N", help="rows of a table, at most (default: 15)")
    parser.add_argument("--no-pictures", action="store_true", help="tables only")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head`
    try:
        ranks = files.read(options.folder, options.job)
    except (ValueError, OSError) as error:
        sys.exit(_shown(f"jaxmpi.trace: {error}"))
    if not any(rank.events for rank in ranks):
        sys.exit(f"jaxmpi.trace: no operation was executed in the job of {options.folder}")
    matched = matching.match(ranks)
    tables = list(_tables(ranks, matched, options.top))
    notes, problems = _write(options, ranks, matched)  # before anything is printed, because `head` may end the program
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may hold anything
    print("\n".join(map(report.printable, [*tables, "", *notes])), flush=True)
    if problems:
        sys.exit("\n".join(report.printable(f"jaxmpi.trace: {problem}") for problem in problems))


def _shown(text: str) -> str:
    """Make a text of several lines printable. Names in it may hold characters that a terminal would obey."""
    return "\n".join(map(report.printable, text.split("\n")))


def _write(
    options: argparse.Namespace, ranks: list[files.Rank], matched: matching.Matched
) -> tuple[list[str], list[str]]:
    """Write the files. Return notes about them for the user, and the problems."""
    notes, problems, written = [], [], []
    folder = options.output or options.folder
    to_write: dict[str, Callable[[IO[bytes]], None]] = {
        "timeline.json": lambda file: report.merge(file, ranks, matched),
        "timeline.png": lambda file: pictures.timeline(file, ranks),
        "messages.png": lambda file: pictures.matrix(file, ranks, matched.messages),
    }
    if options.no_pictures or importlib.util.find_spec("matplotlib") is None:
        to_write = {"timeline.json": to_write["timeline.json"]}
        if not options.no_pictures:
            notes.append("No pictures: they need matplotlib (pip install matplotlib).")
    for name, write in to_write.items():
        path = folder / name
        try:
            with _whole(path) as file:
                write(file)
            written.append(str(path))
        except OSError as error:
            problems.append(f"{path} cannot be written: {error.strerror or error}. --output names another folder")
    if written:
        notes.append(f"Written: {', '.join(written)}")
    return notes, problems


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    """Open a draft that replaces the file at `path` when all of it is written. Follow no link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
        try:
            yield file
            file.flush()
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


if __name__ == "__main__":
    main()

"""Where the time of a job went: `python -m jaxmpi.trace FOLDER`, after a run with JAXMPI_TRACE=FOLDER.

Reads the timelines of all ranks and brings their clocks together. For each operation and line of the program it prints
how long the ranks were in it, and how much of this time they waited for others. Writes `timeline.json` of all ranks,
for ui.perfetto.dev, into the folder. Needs no MPI.
"""

import argparse
import contextlib
import io
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from jaxmpi._trace import clocks, files, matching, report


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
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where the file is written (default: the folder)")
    parser.add_argument("--top", type=int, default=15, metavar="N", help="rows of a table, at most (default: 15)")
    options = parser.parse_args(arguments)
    if options.top < 0:
        parser.error(f"--top must be 0 or more, not {options.top}")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head`
    try:
        ranks = files.read(options.folder, options.job)
    except (ValueError, OSError) as error:
        sys.exit("\n".join(map(report.printable, f"jaxmpi.trace: {error}".split("\n"))))
    if not any(rank.events for rank in ranks):
        sys.exit(f"jaxmpi.trace: no operation was executed in the job of {options.folder}")
    matched = matching.match(ranks)
    tables = list(_tables(ranks, matched, options.top))
    path, problem = (options.output or options.folder) / "timeline.json", ""
    try:  # before anything is printed, because `head` may end the program
        with _whole(path) as file:
            report.merge(file, ranks, matched)
    except OSError as error:
        problem = f"jaxmpi.trace: {path} cannot be written: {error.strerror or error}. --output names another folder"
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may hold anything
    written = [] if problem else ["", f"Written: {path}"]
    print("\n".join(map(report.printable, [*tables, *written])), flush=True)
    if problem:
        sys.exit(report.printable(problem))


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

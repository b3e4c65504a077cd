"""Where the time of a job went: `python -m jaxmpi.trace FOLDER`, after a run with JAXMPI_TRACE=FOLDER.

Reads the timelines of all ranks, brings their clocks together, prints per operation and line of the program how long
the ranks were in it and how long of that they waited for others, and writes into the folder `timeline.json`, of all
ranks, for ui.perfetto.dev, and the pictures `timeline.png` and `messages.png`. Needs no MPI.
"""

import argparse
import importlib.util
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxmpi._trace import clocks, files, matching, pictures, report


def _tables(ranks: list[files.Rank], matched: matching.Matched, top: int) -> Iterator[str]:
    uncertainty = clocks.align(ranks, matched)
    caused = matching.add_waiting(matched)
    span = max(event.end for rank in ranks for event in rank.events) / 1e6
    many = len(ranks) > 1
    yield f"{len(ranks)} rank{'s' if many else ''}, {span:.3g} s from the first operation to the end of the last\n"
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
    parser.add_argument("folder", type=Path, help="what JAXMPI_TRACE was in the run")
    parser.add_argument("--top", type=int, default=15, metavar="N", help="rows of a table, at most (default: 15)")
    parser.add_argument("--no-pictures", action="store_true", help="tables only")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head`
    try:
        ranks = files.read(options.folder)
    except (ValueError, OSError) as error:
        sys.exit(f"jaxmpi.trace: {error}")
    if not any(rank.events for rank in ranks):
        sys.exit(f"jaxmpi.trace: no operation was executed in the job of {options.folder}")
    matched = matching.match(ranks)
    tables = list(_tables(ranks, matched, options.top))
    written = _write(options, ranks, matched)  # before anything is printed, to `head` perhaps
    print("\n".join([*tables, "", *written]))


def _write(options: argparse.Namespace, ranks: list[files.Rank], matched: matching.Matched) -> list[str]:
    notes = []
    written = [options.folder / "timeline.json"]
    report.merge(written[0], ranks, matched)
    if not options.no_pictures and importlib.util.find_spec("matplotlib") is not None:
        written += [options.folder / "timeline.png", options.folder / "messages.png"]
        pictures.timeline(written[1], ranks)
        pictures.matrix(written[2], ranks, matched.messages)
    elif not options.no_pictures:
        notes.append("No pictures: they need matplotlib (pip install matplotlib).")
    return [*notes, f"Written: {', '.join(map(str, written))}"]


if __name__ == "__main__":
    main()

"""Writes the table of docs/errors.md: python tests/programs/errors_page.py FILE..., each with one MPI library's times.

`make errors` makes such a file by tests in tests/launcher and tests/doors, and calls this program.
"""

import json
import os
import re
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "errors.md"
HEAD = "| what one of two ranks does, or what happens to the job | what is told | "
TIMES = "JAXMPI_FAULT_TIMES"
"""The variable that names the file."""


GOES_ON = {
    "standard input belongs to another user": "nothing: rank 0 reads all of it",
    "the folder of the job belongs to another user": "`has no folder for what its ranks tell the launcher`",
    "the folder of the job is a symbolic link": "`has no folder for what its ranks tell the launcher`",
    "files in the folder of the job are symbolic links": "nothing: they are replaced, and none is followed",
    "a child of `fork` communicates": "`was forked by a rank and is none itself`, an error in the child",
    "two jobs trace into one folder": "nothing; `python -m jaxmpi.trace` then asks for one of them, by `--job`",
}
"""Faults that do not end the job, and what the user sees of them instead."""


def _add(*line):
    """Adds a line to the file, if there is to be one."""
    if path := os.environ.get(TIMES):
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")


def note(case, told, seconds):
    """A fault that ends the job: what is told, and how long it takes."""
    _add(case, f"`{told}`" if told else "", f"{seconds:.1f} s")


def goes_on(case):
    """A fault in spite of which the job goes on."""
    _add(case, GOES_ON[case], "goes on")


def rows(page):
    """The cells of the table, by the case."""
    table = page[page.index(HEAD) :].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {first: rest for first, *rest in cells}


def main(files):
    page = PAGE.read_text()
    notes = [[json.loads(line) for line in Path(file).read_text().splitlines()] for file in files]
    found = [{case: (told, end) for case, told, end in lines} for lines in notes]
    names = [re.sub(r"^faults-|\.jsonl$", "", Path(file).name) for file in files]
    lines = [f"{HEAD}{' | '.join(names)} |", "|---|---|" + "---|" * len(files)]
    cases = dict.fromkeys(case for ends in found for case in ends)
    for case in sorted(cases, key=lambda case: case in GOES_ON):
        told = next(ends[case][0] for ends in found if case in ends)
        lines.append(f"| {case} | {told} | {' | '.join(ends.get(case, ('', ''))[1] for ends in found)} |")
    before, _, rest = page.partition(HEAD)
    PAGE.write_text(before + "\n".join(lines) + "\n\n" + rest.partition("\n\n")[2])


if __name__ == "__main__":
    main(sys.argv[1:])

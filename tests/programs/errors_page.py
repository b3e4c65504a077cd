"""Writes the table of docs/errors.md: python tests/programs/errors_page.py FILE..., each with one MPI library's times.

`make errors` makes such a file with tests of test_faults.py and test_launcher.py, and calls this program.
"""

import json
import os
import re
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "errors.md"
HEAD = "| what one of two ranks does, or what happens to its launcher | what is told | "
TIMES = "JAXMPI_FAULT_TIMES"
"""The variable that names the file."""


def note(case, told, seconds):
    """Adds a line to the file, if there is to be one."""
    if path := os.environ.get(TIMES):
        with open(path, "a") as file:
            file.write(json.dumps([case, told, seconds]) + "\n")


def rows(page):
    """The cells of the table, by the case."""
    table = page[page.index(HEAD) :].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {first: rest for first, *rest in cells}


def main(files):
    page = PAGE.read_text()
    notes = [[json.loads(line) for line in Path(file).read_text().splitlines()] for file in files]
    found = [{case: (told, seconds) for case, told, seconds in lines} for lines in notes]
    names = [re.sub(r"^faults-|\.jsonl$", "", Path(file).name) for file in files]
    lines = [f"{HEAD}{' | '.join(names)} |", "|---|---|" + "---|" * len(files)]
    for case, (told, _) in found[0].items():
        times = (f"{times[case][1]:.1f} s" if case in times else "" for times in found)
        lines.append(f"| {case} | {f'`{told}`' if told else ''} | {' | '.join(times)} |")
    before, _, rest = page.partition(HEAD)
    PAGE.write_text(before + "\n".join(lines) + "\n\n" + rest.partition("\n\n")[2])


if __name__ == "__main__":
    main(sys.argv[1:])

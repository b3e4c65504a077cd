"""The tables of docs/errors.md on how jobs end, and how long that takes on this machine:
python tests/programs/errors_page.py FILE...

With `make errors` tests write such a file, JAXMPI_FAULT_TIMES, with one MPI library, and this prints the times of all.
"""

import json
import os
import re
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "errors.md"

GOES_ON = {
    "standard input belongs to another user": "nothing: rank 0 reads all of it",
    "a child of `fork` communicates": "`was forked by a rank and is none itself`, an error in the child",
    "two jobs trace into one folder": "nothing; `python -m jaxmpi.trace` then asks for one of them, by `--job`",
}
"""Faults that do not end the job, and what the user sees of them instead."""


def note(case, told, seconds):
    """A row of the page: a fault that ends the job, what is told, if it is always told, and how long it takes."""
    assert tables()[0][case] in ("", f"`{told}`"), case
    if path := os.environ.get("JAXMPI_FAULT_TIMES"):
        with open(path, "a") as file:
            file.write(json.dumps([case, seconds]) + "\n")


def goes_on(case):
    """A row of the page: a fault in spite of which the job goes on."""
    assert case in tables()[1]


def tables():
    """What is told of each fault: of those that end the job, and of the others."""
    section = PAGE.read_text().partition("\n## How a job ends\n")[2].partition("\n## ")[0]
    return [
        dict(tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.splitlines())
        for table in re.findall(r"(?<=^\|---\|---\|\n)(?:\|.*\n)+", section, re.MULTILINE)
    ]


def main(files):
    for file in files:
        print(Path(file).stem)
        for line in Path(file).read_text().splitlines():
            case, seconds = json.loads(line)
            print(f"{seconds:8.1f} s  {case}")


if __name__ == "__main__":
    main(sys.argv[1:])

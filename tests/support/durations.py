"""How long tests take: each process of pytest writes a line for each of its tests, and `make slowest` adds them up.

    python tests/support/durations.py output/durations --most 40

The processor time of a test is that of its process and of what it has started and waited for.
"""

import argparse
import json
import os
import resource
import time
from collections import defaultdict
from pathlib import Path

FOLDER = "JAXMPI_TEST_DURATIONS"
"""The variable that names the folder of a run; without it nothing is written."""


def _now():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.monotonic(), sum(its.ru_utime + its.ru_stime for its in used)


def record(item, rank, size, since=None):
    """Without `since` returns the beginning of a test; with it writes how long the test took."""
    if FOLDER not in os.environ:
        return None
    if since is None:
        return _now()
    wall, processor = (end - begin for begin, end in zip(since, _now(), strict=True))
    kind = "alone" if item.get_closest_marker("alone") else f"{size} ranks"
    line = {"test": item.nodeid, "kind": kind, "rank": rank, "wall": round(wall, 4), "cpu": round(processor, 4)}
    folder = Path(os.environ[FOLDER])
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{os.getpid()}.jsonl", "a") as file:
        print(json.dumps(line), file=file)
    return None


def added(folder):
    """For tests, files and kinds: wall time, that of the slowest rank; processor time, that of all; and runs."""
    runs = defaultdict(lambda: [0.0, 0.0])
    for path in sorted(Path(folder).rglob("*.jsonl")):
        for line in path.read_text().splitlines():
            its = json.loads(line)
            run = runs[path.parent, its["test"], its["kind"]]
            run[0] = max(run[0], its["wall"])
            run[1] += its["cpu"]
    tables = {name: defaultdict(lambda: [0.0, 0.0, 0]) for name in ("test", "file", "kind")}
    for (_, test, kind), (wall, processor) in runs.items():
        for table, key in (("test", test), ("file", test.partition("::")[0]), ("kind", kind)):
            row = tables[table][key]
            row[:] = row[0] + wall, row[1] + processor, row[2] + 1
    return tables


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--most", type=int, default=40, metavar="N", help="lines of tests (40)")
    options = parser.parse_args()
    tables = added(options.folder)
    if not tables["test"]:
        raise SystemExit(f"{options.folder} has no durations: run tests first, such as make test")
    for name, most in (("test", options.most), ("file", None), ("kind", None)):
        print(f"\n{'wall s':>8} {'CPU s':>8} {'runs':>6}  {name}")
        rows = sorted(tables[name].items(), key=lambda row: -row[1][1])
        for key, (wall, processor, count) in rows[:most]:
            print(f"{wall:8.1f} {processor:8.1f} {count:6d}  {key}")


if __name__ == "__main__":
    main()

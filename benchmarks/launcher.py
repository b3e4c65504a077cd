"""What the launcher itself costs: seconds of a core per second, of a job whose ranks are simulated.

    python benchmarks/launcher.py --ranks 1000

No rank runs: their files are in the folder. Three states: nothing is asked; a rank has ended and the launcher asks the
others, which all answer, or of which none does.
"""

import argparse
import contextlib
import os
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from jaxmpi_launch import monitor

ANSWER = "0.5\nallreduce of 5 float32, op SUM\nthe default communicator\nPython is at here.py:7"


def put(folder: Path, name: str, text: str = "") -> None:
    (folder / f"{name}.draft").write_text(text)
    (folder / f"{name}.draft").rename(folder / name)


def answer(folder: Path, ranks: int, ending: threading.Event) -> None:
    """A process that does what all ranks would do."""
    asked = ""
    while not ending.wait(0.1):
        with contextlib.suppress(OSError):
            if (question := (folder / "ask").read_text()) != asked:
                asked = question
                for rank in range(1, ranks):
                    put(folder, f"{rank}.state", ANSWER)


def measure(ranks: int, state: str, seconds: float) -> float:
    """The share of a core."""
    ending = threading.Event()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made, subprocess.Popen(["sleep", "1000"]) as job:
        folder = Path(made)
        for rank in range(ranks):
            put(folder, f"{rank}.began")
        file, beside = os.pidfd_open(job.pid), 0
        watched = (folder, ranks, file, job.pid, [], lambda text: None)
        if state != "nothing":
            put(folder, "0.ended")
        if state == "answers" and (beside := os.fork()) == 0:
            answer(folder, ranks, ending)
        threading.Thread(target=monitor.watch, args=watched, daemon=True).start()
        time.sleep(3)
        begin, used = time.monotonic(), time.process_time()
        time.sleep(seconds)
        share = (time.process_time() - used) / (time.monotonic() - begin)
        if beside:
            os.kill(beside, 9)
            os.waitpid(beside, 0)
        job.kill()
        time.sleep(0.5)
    return share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    for state in ("nothing", "answers", "no answers"):
        print(f"{state:12}{1000 * measure(options.ranks, state, options.seconds):8.1f} ms per second", flush=True)


if __name__ == "__main__":
    main()

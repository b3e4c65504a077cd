"""Measure what the launcher itself costs: seconds of a core per second, for a job whose ranks are simulated.

    python benchmarks/launcher.py --ranks 1000

No rank runs: their files are in the folder. Three states: nothing is asked; a rank has ended and the launcher asks the
others, which all answer, or of which none does.
"""

import argparse
import os
import time

from jaxmpi_launch.folder import Folder
from jaxmpi_launch.monitor import Monitor

ANSWER = "0.5\nallreduce of 5 float32, op SUM\nthe default communicator\nPython is at here.py:7"
PAUSE = 0.25
"""Between two looks of the launcher."""


def answer(folder: Folder, ranks: int) -> None:
    """Do what all ranks would do."""
    asked = ""
    while os.path.exists(folder.path):
        time.sleep(0.1)
        if os.path.exists(os.path.join(folder.path, "ask")) and (question := folder.read("ask")) != asked:
            asked = question
            for rank in range(1, ranks):
                folder.write(f"{rank}.state", ANSWER)


def measure(ranks: int, state: str, seconds: float) -> float:
    """Return the share of a core."""
    folder, beside = Folder.make(), 0
    try:
        for rank in range(ranks):
            folder.write(f"{rank}.began", "")
        if state != "nothing":
            folder.write("0.ended", "")
        if state == "answers" and (beside := os.fork()) == 0:
            answer(folder, ranks)
            os._exit(0)
        monitor = Monitor(folder, ranks, False, lambda text: None)
        begin, used = time.monotonic(), time.process_time()
        while time.monotonic() - begin < seconds:
            monitor.step(False)
            time.sleep(PAUSE)
        return (time.process_time() - used) / (time.monotonic() - begin)
    finally:
        if beside:
            os.kill(beside, 9)
            os.waitpid(beside, 0)
        folder.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    for state in ("nothing", "answers", "no answers"):
        print(f"{state:12}{1000 * measure(options.ranks, state, options.seconds):8.1f} ms per second", flush=True)


if __name__ == "__main__":
    main()

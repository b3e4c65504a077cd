"""How long ranks take to start from an environment that is a folder, and from one that is a single file.

    python benchmarks/one_file.py --ranks 100          # as root, with bindfs, squashfs-tools and squashfuse installed

bindfs stands for a parallel file system: one process that answers each request of every rank. The kernel keeps neither
names nor attributes for it, as if each rank were on a node of its own. The contenders, in turn:

  folder         the environment on this machine's disk
  served folder  the same, from bindfs
  mount          an image (squashfs) that lies there, mounted by the kernel, which needs root
  squashfuse     the same image, mounted by a program of the user

A job imports JAX, mpi4py and jaxmpi, and ends. Printed are the seconds from the start of the launcher to its end, and
the requests that bindfs has answered in another job, of --counted ranks. Python itself and its library stay where they
are.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jobs import run
from scale import BASE

PROGRAM = "import jaxmpi" + BASE


@contextlib.contextmanager
def mounted(at, *words, log=os.devnull):
    """The folder `at`, on which `words` mount something; what goes on until it is unmounted writes to `log`."""
    at.mkdir()
    with open(log, "w") as errors, subprocess.Popen([*words, at], stderr=errors):
        deadline = time.monotonic() + 10
        while not at.is_mount() and time.monotonic() < deadline:
            time.sleep(0.1)
        try:
            yield at
        finally:  # else what serves it would be waited for
            deadline = time.monotonic() + 10  # what was mounted from here is let go of a moment later
            while subprocess.run(["umount", at]).returncode and time.monotonic() < deadline:
                time.sleep(0.1)


def start(contender, environment, image, ranks, log=os.devnull):
    """Seconds of a job, with all that bindfs is asked for in `log`."""
    bindfs = ["bindfs", "-f" if log == os.devnull else "-d"]
    by = {"mount": ["mount", "-o", "loop,ro"], "squashfuse": ["squashfuse", "-f"]}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if contender == "served folder":
            environment = stack.enter_context(mounted(folder / "served", *bindfs, environment, log=log))
        elif contender in by:
            served = stack.enter_context(mounted(folder / "served", *bindfs, image.parent, log=log))
            environment = stack.enter_context(mounted(folder / "environment", *by[contender], served / image.name))
        program = PROGRAM + "import sys; print(sys.prefix)"
        seconds, said = run("jaxmpi.run", "-n", ranks, "-c", program, python=environment / "bin" / "python")
        if said.splitlines() != [str(environment)] * ranks:
            raise RuntimeError(f"the ranks have started from elsewhere than {environment}")
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=100)
    parser.add_argument("--counted", type=int, default=4, metavar="RANKS")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--environment", type=Path, default=Path(sys.prefix), help="whole: no editable install")
    options = parser.parse_args()
    needed = ("bindfs", "mksquashfs", "squashfuse", "umount")
    if os.geteuid() or not all(map(shutil.which, needed)):
        parser.error(f"needs root, and {', '.join(needed)}")
    environment = options.environment.resolve()
    contenders = ("folder", "served folder", "mount", "squashfuse")
    seconds = {contender: [] for contender in contenders}
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "environment.sqfs"
        begin = time.perf_counter()
        subprocess.run(["mksquashfs", environment, image, "-quiet", "-no-progress"], check=True)
        made = time.perf_counter() - begin
        print(f"the image: {image.stat().st_size / 2**20:.0f} MiB, made in {made:.0f} s", flush=True)
        requests = {}
        for contender in contenders[1:]:
            start(contender, environment, image, options.counted, log := Path(folder) / "requests")
            requests[contender] = log.read_text().count("opcode: ")
        for _ in range(options.rounds):
            for contender in contenders:
                seconds[contender].append(start(contender, environment, image, options.ranks))
    for contender in contenders:
        median, asked = statistics.median(seconds[contender]), requests.get(contender, 0)
        print(f"{contender:14} {options.ranks} ranks: {median:6.1f} s, {options.counted} ranks: {asked} requests")


if __name__ == "__main__":
    main()

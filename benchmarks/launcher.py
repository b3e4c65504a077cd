"""What the launcher itself costs: seconds of a core per second, of a job whose ranks are simulated.

    python benchmarks/launcher.py --ranks 1000 --machines 200

No rank runs: their files are in the folder, and the machines speak the protocol of relay.py, written here once more.
Four states: nothing is asked; a rank has ended and the launcher asks the others, which all answer, or of which none
does; and other machines are connected, whose ranks tell one thing each second.
"""

import argparse
import contextlib
import hmac
import json
import os
import resource
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from jaxmpi._launcher import monitor, relay

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


def proof(secret: str, side: str, number: str) -> str:
    return hmac.new(secret.encode(), f"{side} {number}".encode(), "sha256").hexdigest()


def connect(address: str, ranks: int, machines: int, seconds: float) -> int:
    """In a process of its own: the machines, each with its part of the ranks. How many are connected at the end."""
    *_, port, secret = address.split()
    connections = []
    for _ in range(machines):
        connection = socket.create_connection(("127.0.0.1", int(port)), timeout=20)
        with contextlib.suppress(OSError), connection.makefile("r") as lines:
            connection.sendall(b"00\n")
            connection.sendall(proof(secret, "machine", lines.readline().strip()).encode() + b"\n")
            if lines.readline().strip() == proof(secret, "launcher", "00"):
                connections.append(connection)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for number, connection in enumerate(list(connections)):
            told = "".join(json.dumps([f"{rank}.state", ANSWER]) + "\n" for rank in range(number, ranks, machines))
            try:
                connection.sendall(told.encode())
            except OSError:
                connections.remove(connection)
        time.sleep(1)
    return len(connections)


def measure(ranks: int, state: str, machines: int, seconds: float) -> tuple[float, str]:
    """In a process of its own: the share of a core, and a remark."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    remark, ending = "", threading.Event()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made, subprocess.Popen(["sleep", "1000"]) as job:
        folder = Path(made)
        for rank in range(ranks):
            put(folder, f"{rank}.began")
        file, beside = os.pidfd_open(job.pid), 0
        watched = (folder, ranks, file, job.pid, [], lambda text: None)
        if state == "machines":
            listening, secret, address = relay.listen()
            # The watch stays out of it: it would ask those that report.
            threading.Thread(
                target=relay.serve,
                args=(folder, ranks, listening, secret, lambda text: print(text, end="")),
                daemon=True,
            ).start()
            reads, writes = os.pipe()
            if (beside := os.fork()) == 0:
                os.write(writes, str(connect(address, ranks, machines, seconds + 3)).encode())
                os._exit(0)
        else:
            if state != "nothing":
                put(folder, "0.ended")
            if state == "answers" and (beside := os.fork()) == 0:
                answer(folder, ranks, ending)
            threading.Thread(target=monitor.watch, args=watched, daemon=True).start()
        time.sleep(3)
        begin, used = time.monotonic(), time.process_time()
        time.sleep(seconds)
        share = (time.process_time() - used) / (time.monotonic() - begin)
        if state == "machines":
            remark = f"{os.read(reads, 100).decode()} of {machines} machines connected"
            listening.close()
        elif beside:
            os.kill(beside, 9)
        if beside:
            os.waitpid(beside, 0)
        job.kill()
        time.sleep(0.5)
    return share, remark


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--machines", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    for state in ("nothing", "answers", "no answers", "machines"):
        share, remark = measure(options.ranks, state, options.machines, options.seconds)
        print(f"{state:12}{1000 * share:8.1f} ms per second  {remark}", flush=True)


if __name__ == "__main__":
    main()

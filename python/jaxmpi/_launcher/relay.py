"""Brings the files of a job's folder from other machines to the launcher: see monitor.py.

On each machine that does not see the launcher's folder, the first rank makes one and starts a process, which connects
to the launcher, passes on what ranks write (RANK.report, RANK.state, RANK.ended), and writes the launcher's questions
(`ask`). The ranks there end with the process, as those beside the launcher end with it (lifeline.py): it ends as the
launcher does, and if it cannot tell, because there is no connection, it stays until the ranks have ended. Both ends
show by a keyed hash that they know the secret of the job; nothing that is received is executed, and only files of these
names are written. Where there is no connection the launcher does not hear of those ranks. Nothing here imports jax,
mpi4py or this package.
"""

import contextlib
import hmac
import json
import os
import re
import secrets
import select
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

ADDRESS = "JAXMPI_JOB_ADDRESS"
"""The variable with the launcher's addresses, its port and the secret."""

_PAUSE_SECONDS = 0.1
_BEAT_SECONDS = 5.0
_SILENT_SECONDS = 60.0  # after which the other end is taken for gone
_MOST_BYTES = 16384  # of a line
_NAMES = re.compile(r"([0-9]{1,9})\.(began|report|state|ended|aborts)")


class _Lines:
    """Lines through a socket. OSError: the other end is gone, or says nothing for long, or too much."""

    def __init__(self, connection: socket.socket):
        self.connection, self._lines, self._rest, self._heard = connection, list[str](), b"", time.monotonic()
        connection.settimeout(_BEAT_SECONDS)

    def send(self, text: str) -> None:
        self.connection.sendall(text.encode() + b"\n")

    def _wait(self, seconds: float) -> None:
        if select.select([self.connection], [], [], seconds)[0]:
            if not (more := self.connection.recv(_MOST_BYTES)):
                raise ConnectionResetError("closed")
            *lines, self._rest = (self._rest + more).split(b"\n")
            self._lines += [line.decode(errors="replace") for line in lines]
            self._heard = time.monotonic()
        if time.monotonic() - self._heard > _SILENT_SECONDS or len(self._rest) > _MOST_BYTES:
            raise OSError("silent, or too long a line")

    def received(self) -> list[str]:
        """The lines that have come, or come within a moment."""
        self._wait(_PAUSE_SECONDS)
        lines, self._lines = self._lines, []
        return lines

    def next(self) -> str:
        """One line, for which it waits as long as for a beat."""
        end = time.monotonic() + _BEAT_SECONDS
        while not self._lines and time.monotonic() < end:
            self._wait(_PAUSE_SECONDS)
        return self._lines.pop(0) if self._lines else ""


def _proof(secret: str, side: str, number: str) -> str:
    return hmac.new(secret.encode(), f"{side} {number}".encode(), "sha256").hexdigest()


def _shake_hands(lines: _Lines, secret: str, mine: str, theirs: str) -> None:
    """Each end sends a number, and the hash of that of the other end."""
    number = secrets.token_hex(16)
    lines.send(number)
    lines.send(_proof(secret, mine, lines.next()))
    if not hmac.compare_digest(lines.next().encode(), _proof(secret, theirs, number).encode()):
        raise OSError("another job")


def write(folder: Path, name: str, text: str) -> None:
    """A file at once and whole."""
    draft = folder / f"{name}.{threading.get_ident()}.draft"
    draft.write_text(text)
    draft.rename(folder / name)


def _read(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text(errors="replace")[: _MOST_BYTES // 4]
    return ""


# --- the launcher's end ------------------------------------------------------------------------------------------


def listen() -> tuple[socket.socket, str, str]:
    """A socket that listens, the secret, and the value of the variable for the ranks."""
    listening, secret = socket.create_server(("", 0)), secrets.token_hex(16)
    addresses = [socket.gethostname()]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing, and tells the address of the way out
        addresses.append(probe.getsockname()[0])
    return listening, secret, " ".join([*addresses, str(listening.getsockname()[1]), secret])


def serve(folder: Path, ranks: int, listening: socket.socket, secret: str) -> None:
    """Takes connections, until the job has ended and the socket is closed."""
    while listening.fileno() >= 0:
        try:
            connection, _ = listening.accept()
            threading.Thread(target=_serve_one, args=(folder, ranks, connection, secret), daemon=True).start()
        except (OSError, RuntimeError):  # too many at once, or one that has gone
            time.sleep(_PAUSE_SECONDS)


def _serve_one(folder: Path, ranks: int, connection: socket.socket, secret: str) -> None:
    asked, beat = "", 0.0
    with contextlib.suppress(OSError, ValueError, TypeError), connection:
        lines = _Lines(connection)
        _shake_hands(lines, secret, "launcher", "machine")
        while folder.is_dir():  # until the job has ended
            question = _read(folder / "ask")
            if question != asked or time.monotonic() - beat > _BEAT_SECONDS:
                lines.send(json.dumps(question))
                asked, beat = question, time.monotonic()
            for text in lines.received():
                name, content = json.loads(text) or ("", "")
                if (match := _NAMES.fullmatch(name)) and int(match[1]) < ranks:
                    write(folder, f"{int(match[1])}.{match[2]}", str(content))


# --- another machine's end ---------------------------------------------------------------------------------------


RELAYED = "relayed"
"""A file in a folder whose files are taken away to the launcher."""


def folder_here(folder: str, address: str, hold: Callable[[str], tuple[int, int]]) -> str:
    """The folder for this rank: `folder`, or where that does not exist one of this machine, whose files are relayed.

    `hold`: lifeline.py's, for the ranks of this machine.
    """
    if os.path.isdir(folder):
        return folder
    here = os.path.join(tempfile.gettempdir(), os.path.basename(folder))
    if not os.path.lexists(here):
        with contextlib.suppress(OSError):  # another rank was first, or there is no place for files
            _make(here, address, hold)
    return here if os.path.isdir(here) and os.lstat(here).st_uid == os.geteuid() else folder


def _make(here: str, address: str, hold: Callable[[str], tuple[int, int]]) -> None:
    """The folder, which has all that ranks look for as soon as it is there, and its process."""
    draft = tempfile.mkdtemp(prefix="jaxmpi-draft-")
    alive: tuple[int, ...] = ()
    try:
        alive = hold(draft)
        Path(draft, RELAYED).touch()
        os.rename(draft, here)
        if (child := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                if os.fork() == 0:  # no child of the program, which may wait for its own
                    _begin(here, address, alive[1])
            os._exit(0)
        os.waitpid(child, 0)
    finally:
        for file in alive:
            os.close(file)
        shutil.rmtree(draft, ignore_errors=True)


def _begin(folder: str, address: str, alive: int) -> None:
    """The process of a machine. It keeps nothing open of the rank's, whose launcher would wait for that."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1, 2):
        os.dup2(null, file)
    for file in map(int, os.listdir("/proc/self/fd")):
        if file > 2 and file != alive:
            with contextlib.suppress(OSError):
                os.close(file)
    os.chdir("/")
    gone = False
    with contextlib.suppress(Exception):
        *hosts, port, secret = address.split()
        gone = _relay(Path(folder), hosts, int(port), secret, alive)
    while not gone and _has_ranks(alive):
        time.sleep(1)
    shutil.rmtree(folder, ignore_errors=True)


def _has_ranks(alive: int) -> bool:
    """Whether ranks of this machine are there: the readers of the FIFO, of which this is the writer."""
    poll = select.poll()
    poll.register(alive, 0)
    return not poll.poll(0)  # else an error: no reader


def _relay(folder: Path, hosts: list[str], port: int, secret: str, alive: int) -> bool:
    """Whether it has had a connection, and now the launcher has gone. One that is silent, or slow, is tried again."""
    reached = False
    while not reached or _has_ranks(alive):
        refused = False
        for host in hosts:
            try:
                with socket.create_connection((host, port), timeout=_BEAT_SECONDS) as connection:
                    lines = _Lines(connection)
                    _shake_hands(lines, secret, "machine", "launcher")
                    reached, refused, hosts = True, False, [host]
                    _talk(lines, folder)
            except ConnectionRefusedError:
                refused = True
            except OSError:
                pass
        if not reached or refused:
            return reached
        time.sleep(_PAUSE_SECONDS)
    return False


def _talk(lines: _Lines, folder: Path) -> None:
    told, beat = "", 0.0
    while True:
        for text in lines.received():
            question = str(json.loads(text))
            if question != told:
                write(folder, "ask", question)
                told = question
        if time.monotonic() - beat > _BEAT_SECONDS:
            lines.send(json.dumps(None))
            beat = time.monotonic()
        for file in (file for file in folder.iterdir() if _NAMES.fullmatch(file.name)):
            lines.send(json.dumps([file.name, _read(file)]))
            file.unlink()

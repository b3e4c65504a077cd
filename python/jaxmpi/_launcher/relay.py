"""Brings the files of a job's folder from other machines to the launcher: see monitor.py.

On each machine but the launcher's the first rank makes a folder and starts a process, which connects to the launcher,
passes on what ranks write (RANK.report, RANK.state, RANK.ended), tells of ranks whose processes have ended (RANK.gone),
and writes the launcher's questions (`ask`). So it is where the machines see one folder, too: the ranks then leave the
disk that they share alone. The ranks there end with the process, as those beside the launcher end with it
(lifeline.py): it ends as the launcher does, and if it cannot tell, because there is no connection, it stays until the
ranks have ended. Both ends show by a keyed hash that they know the secret of the job; nothing that is received is
executed, and only files of these names are written. Where there is no connection the launcher does not hear of those
ranks.

All ranks of a machine find its folder by the job's secret. So nobody else can make it beforehand, not even a user of
both machines, who sees the name of the launcher's. Something of that name that is not ours is not used (private.py).
Nothing here imports jax, mpi4py or this package; whoever loads this file by its path has loaded private.py and
lifeline.py before.
"""

import contextlib
import hmac
import importlib
import json
import os
import re
import resource
import secrets
import select
import selectors
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxmpi._launcher import lifeline, private, ready
else:
    private, lifeline, ready = (
        sys.modules.get(name) or importlib.import_module(name)
        for name in ("jaxmpi._launcher.private", "jaxmpi._launcher.lifeline", "jaxmpi._launcher.ready")
    )

ADDRESS = "JAXMPI_JOB_ADDRESS"
"""The variable with the launcher's addresses, its port and the secret."""

_PAUSE_SECONDS = 0.1
_KEPT_FILES = 32
_BEAT_SECONDS = 5.0
_SILENT_SECONDS = 60.0  # after which the other end is taken for gone
_RING_SECONDS = 4.0  # in which each rank looks
_MOST_BYTES = 16384  # of a line
_SENT = re.compile(r"([0-9]{1,9})\.(began|report|state|ended|left|aborts|lost|deaths|spare|joined|gone)")
_NAMES = re.compile(rf"{_SENT.pattern}|[0-9]{{1,9}}\.pid")


def of_kind(names: Iterable[str], kind: str) -> dict[str, int]:
    """The files of ranks of a kind, and their ranks."""
    end = f".{kind}"
    found = (name for name in names if name.endswith(end))
    return {name: int(name[: -len(end)]) for name in found if _NAMES.fullmatch(name)}


class Ends:
    """Sees the end of each rank of this machine that has told its number of a process (RANK.pid): so far as it does in
    jobs that go on without it."""

    def __init__(self, folder: "private.Folder"):
        self._folder, self._processes = folder, dict[int, int]()

    def gone(self, names: Iterable[str]) -> set[int]:
        """The ranks whose processes have ended, of those with files of these names."""
        for name, rank in of_kind(names, "pid").items():
            if rank not in self._processes:
                try:
                    self._processes[rank] = os.pidfd_open(int(self._folder.read(name)))
                except (OSError, ValueError):
                    self._processes[rank] = -1
        return {rank for rank, file in self._processes.items() if file < 0 or ready.ready([file], 0)}

    def close(self) -> None:
        for file in self._processes.values():
            if file >= 0:
                os.close(file)


class _Lines:
    """Lines through a socket. OSError: the other end is gone, or says nothing for long, or too much."""

    def __init__(self, connection: socket.socket):
        self.connection, self._lines, self._rest, self._heard = connection, list[str](), b"", time.monotonic()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        connection.settimeout(_BEAT_SECONDS)

    def send(self, text: str) -> None:
        self.connection.sendall(text.encode() + b"\n")

    def take(self) -> None:
        """What has come."""
        if not (more := self.connection.recv(_MOST_BYTES)):
            raise ConnectionResetError("closed")
        *lines, self._rest = (self._rest + more).split(b"\n")
        self._lines += [line.decode(errors="replace") for line in lines]
        self._heard = time.monotonic()

    def check(self) -> None:
        if time.monotonic() - self._heard > _SILENT_SECONDS or len(self._rest) > _MOST_BYTES:
            raise OSError("silent, or too long a line")

    def come(self) -> list[str]:
        """The lines that have been taken."""
        lines, self._lines = self._lines, []
        return lines

    def _wait(self, seconds: float) -> None:
        if self._poll.poll(1000 * seconds):
            self.take()
        self.check()

    def received(self) -> list[str]:
        """The lines that have come, or come within a moment."""
        self._wait(_PAUSE_SECONDS)
        return self.come()

    def next(self) -> str:
        """One line, for which it waits as long as for a beat."""
        end = time.monotonic() + _BEAT_SECONDS
        while not self._lines and time.monotonic() < end:
            self._wait(_PAUSE_SECONDS)
        return self._lines.pop(0) if self._lines else ""


def _proof(secret: str, side: str, number: str) -> str:
    return hmac.new(secret.encode(), f"{side} {number}".encode(), "sha256").hexdigest()


def _check(proof: str, secret: str, side: str, number: str) -> None:
    if not hmac.compare_digest(proof.encode(), _proof(secret, side, number).encode()):
        raise OSError("another job")


def _read(folder: "private.Folder", name: str) -> str:
    with contextlib.suppress(OSError):
        return folder.read(name, _MOST_BYTES // 4)
    return ""


# --- the launcher's end ------------------------------------------------------------------------------------------


def listen() -> tuple[socket.socket, str, str]:
    """A socket that listens, the secret, and the value of the variable for the ranks."""
    listening, secret = socket.create_server(("", 0), backlog=socket.SOMAXCONN), secrets.token_hex(16)
    addresses = [socket.gethostname()]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing, and tells the address of the way out
        addresses.append(probe.getsockname()[0])
    return listening, secret, " ".join([*addresses, str(listening.getsockname()[1]), secret])


class _Machine:
    """A connection, which must show that it knows the secret before anything it says is taken."""

    def __init__(self, connection: socket.socket, secret: str):
        self.lines, self._secret = _Lines(connection), secret
        connection.setblocking(False)  # what does not take the few bytes that it is sent is given up
        self._number, self._begun, self._heard = secrets.token_hex(16), time.monotonic(), 0
        self._asked, self._beat = "", 0.0
        self.lines.send(self._number)

    def _knows(self, line: str) -> bool:
        """Each end sends a number, and the hash of that of the other end."""
        self._heard += 1
        if self._heard == 1:
            self.lines.send(_proof(self._secret, "launcher", line))
        elif self._heard == 2:
            _check(line, self._secret, "machine", self._number)
        return self._heard > 2

    def take(self, folder: "private.Folder", ranks: int) -> None:
        self.lines.take()
        for line in filter(self._knows, self.lines.come()):
            name, content = json.loads(line) or ("", "")
            if (match := _SENT.fullmatch(name)) and int(match[1]) < ranks:
                folder.write(f"{int(match[1])}.{match[2]}", str(content))

    def ask(self, question: str) -> None:
        now = time.monotonic()
        self.lines.check()
        if self._heard < 2:
            if now - self._begun > 2 * _BEAT_SECONDS:
                raise OSError("nobody of this job")
        elif question != self._asked or now - self._beat > _BEAT_SECONDS:
            self.lines.send(json.dumps(question))
            self._asked, self._beat = question, now


def _most_machines() -> int:
    """As many as this process may have files open, but some that the launcher needs itself."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd")) - _KEPT_FILES


def serve(
    path: str | os.PathLike, ranks: int, listening: socket.socket, secret: str, say: Callable[[str], None]
) -> None:
    """Takes connections, until the job has ended and the socket is closed. One thread for all machines."""
    with private.Folder(path) as folder, selectors.DefaultSelector() as selector:
        listening.setblocking(False)
        selector.register(listening, selectors.EVENT_READ)
        looked, most, said = 0.0, _most_machines(), False

        def drop(connection: Any) -> None:
            selector.unregister(connection)
            connection.close()

        def accept() -> None:
            nonlocal said
            try:
                connection, _ = listening.accept()
                if (machines := len(selector.get_map()) - 1) < most:
                    selector.register(connection, selectors.EVENT_READ, _Machine(connection, secret))
                    return
                connection.close()
            except BlockingIOError:  # it has gone
                return
            except OSError:  # the program that has called the launcher has opened more files
                machines = len(selector.get_map()) - 1
                time.sleep(_PAUSE_SECONDS)
            if not said:
                said = True
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                say(
                    f"jaxmpi.run: {machines} machines are connected, and no more can be, for this process may open "
                    f"{limit} files: what ranks on the others wait for is not told. Raise the limit: ulimit -n\n"
                )

        while listening.fileno() >= 0:
            for key, _ in selector.select(_PAUSE_SECONDS):
                if key.data is None:
                    accept()
                    continue
                try:
                    key.data.take(folder, ranks)
                except (OSError, ValueError, TypeError):
                    drop(key.fileobj)
            if time.monotonic() - looked < _PAUSE_SECONDS:
                continue
            looked, question = time.monotonic(), _read(folder, "ask")
            for key in [key for key in selector.get_map().values() if key.data is not None]:
                try:
                    key.data.ask(question)
                except OSError:
                    drop(key.fileobj)
        for key in [key for key in selector.get_map().values() if key.data is not None]:
            drop(key.fileobj)


# --- another machine's end ---------------------------------------------------------------------------------------


RELAYED = "relayed"
"""A file in a folder whose files are taken away to the launcher."""


_MEMORY = "/dev/shm"


def folder_here(path: str, address: str) -> str:
    """The folder for this rank: `path`, or where that is not ours, or another machine's, one of this machine, whose
    files are relayed. OSError: there is no folder that is certainly ours.
    """
    within = tempfile.gettempdir()
    with contextlib.suppress(OSError), private.Folder(path) as folder:
        if lifeline.is_here(folder):
            return path
        within = _MEMORY if os.access(_MEMORY, os.W_OK) else within
    name = _proof(address.rpartition(" ")[2], "folder", f"{os.path.basename(path)} {lifeline.machine()}")[:16]
    here = os.path.join(within, f"jaxmpi-{name}")
    if not os.path.lexists(here):
        try:
            _make(here, address)
            return here  # its process may end at once, and removes it
        except OSError:
            if not os.path.lexists(here):  # else another rank was first
                raise
    with private.Folder(here):
        return here


def _make(here: str, address: str) -> None:
    """The folder, which has all that ranks look for as soon as it is there, and its process."""
    draft = private.make("jaxmpi-draft-", os.path.dirname(here))
    alive: tuple[int, ...] = ()
    try:
        alive = lifeline.hold(draft)
        draft.write(RELAYED, "")
        os.rename(draft.path, here)
        if (child := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                if os.fork() == 0:  # no child of the program, which may wait for its own
                    _begin(here, address, alive[1])
            os._exit(0)
        os.waitpid(child, 0)
    finally:
        draft.close()
        for file in alive:
            os.close(file)
        private.remove(draft.path)


def _begin(path: str, address: str, alive: int) -> None:
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
    with contextlib.suppress(Exception), private.Folder(path) as folder:
        *hosts, port, secret = address.split()
        gone = _relay(folder, hosts, int(port), secret, alive)
    while not gone and _has_ranks(alive):
        time.sleep(1)
    private.remove(path)


def _has_ranks(alive: int) -> bool:
    """Whether ranks of this machine are there: the readers of the FIFO, of which this is the writer."""
    poll = select.poll()
    poll.register(alive, 0)
    return not poll.poll(0)  # else an error: no reader


def _relay(folder: "private.Folder", hosts: list[str], port: int, secret: str, alive: int) -> bool:
    """Whether it has had a connection, and now the launcher has gone. One that is silent, or slow, is tried again."""
    reached, ends, told = False, Ends(folder), set[int]()
    while not reached or _has_ranks(alive):
        refused = False
        for host in hosts:
            try:
                with socket.create_connection((host, port), timeout=_BEAT_SECONDS) as connection:
                    lines = _Lines(connection)
                    _show(lines, secret)
                    reached, refused, hosts = True, False, [host]
                    with contextlib.closing(lifeline.Bell(folder)) as bell:
                        _talk(lines, folder, bell, ends, told)
            except ConnectionRefusedError:
                refused = True
            except OSError:
                pass
        if not reached or refused:
            return reached
        time.sleep(_PAUSE_SECONDS)
    return False


def _show(lines: _Lines, secret: str) -> None:
    """Each end sends a number, and the hash of that of the other end."""
    number = secrets.token_hex(16)
    lines.send(number)
    lines.send(_proof(secret, "machine", lines.next()))
    _check(lines.next(), secret, "launcher", number)


def _talk(lines: _Lines, folder: "private.Folder", bell: "lifeline.Bell", ends: Ends, told_gone: set[int]) -> None:
    """Passes on files and questions until the connection fails. `told_gone`: the ranks whose end the launcher knows."""
    told, beat, rung = "", 0.0, 0.0
    while True:
        if time.monotonic() - rung > _RING_SECONDS:
            bell.hush()
        for text in lines.received():
            question = str(json.loads(text))
            if question != told:
                folder.write("ask", question)
                bell.ring()
                told, rung = question, time.monotonic()
        if time.monotonic() - beat > _BEAT_SECONDS:
            lines.send(json.dumps(None))
            beat = time.monotonic()
        gone = ends.gone(folder.names()) - told_gone  # first: what a rank has said before its end is sent before that
        for name in filter(_SENT.fullmatch, folder.names()):
            lines.send(json.dumps([name, _read(folder, name)]))
            folder.remove(name)
        for rank in gone:
            lines.send(json.dumps([f"{rank}.gone", ""]))
            told_gone.add(rank)

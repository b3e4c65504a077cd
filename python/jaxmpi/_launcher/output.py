"""What mpiexec writes to stderr goes through the launcher, byte by byte and at once.

Only when a rank has told the launcher that it ends the job, what Open MPI then says of that is left out: two texts of
15 lines in all, in which the reader would look for the error. They are known line by line, with the rank and its code,
and each is left out once, so what a rank writes itself stays, were it the same. `--verbose` leaves everything in.
"""

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable

from jaxmpi._launcher.ready import ready, wait_to_write

_MOST_BYTES = 65536
_WAIT_SECONDS = 0.2
"""The time to wait for the rest of a text of Open MPI's that has begun, and after the end of mpiexec for what others
still write: what it has started may keep its stderr open for ever, as ssh may."""

_RULE = b"-" * 74
_RANK, _CODE = b"RANK", b"CODE"
_BLOCKS = (
    (
        rb"MPI_ABORT was invoked on rank RANK in communicator MPI_COMM_WORLD",
        rb"  Proc: \[\[\d+,\d+\],RANK\]",
        rb"  Errorcode: CODE",
        rb"",
        rb"NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes\.",
        rb"You may or may not see output from other processes, depending on",
        rb"exactly when Open MPI kills them\.",
        _RULE,
    ),
    (
        rb"prterun has exited due to process rank RANK with PID \d+ on node \S+ calling",
        rb"\"abort\"\. This may have caused other processes in the application to be",
        rb"terminated by signals sent by prterun \(as reported here\)\.",
        _RULE,
    ),
)
"""What follows a line that ends with the rule."""


class _Block:
    """The lines of a text of Open MPI's about a rank that has ended the job."""

    def __init__(self, lines: tuple[bytes, ...], rank: int, code: int):
        self.rank, self.kind = rank, lines[0]
        values = {_RANK: str(rank).encode(), _CODE: str(code).encode()}
        for name, value in values.items():
            lines = tuple(line.replace(name, value) for line in lines)
        self.lines = [re.compile(line + rb"\n") for line in lines]


class Filter:
    """Takes bytes, and returns those that are to be passed on."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []  # those that may come
        self._line, self._held, self._left_out = b"", list[bytes](), False

    def expect(self, rank: int, code: int) -> None:
        """The rank has told that it ends the job, with this code."""
        self._blocks += [_Block(lines, rank, code) for lines in _BLOCKS]

    @property
    def holds(self) -> bool:
        return bool(self._line or self._held)

    def flush(self) -> bytes:
        """What has been held back, since it might have become a text that is left out."""
        held, self._line, self._held = b"".join(self._held) + self._line, b"", []
        return held

    def end(self) -> bytes:
        """What is held back at the end of all: if it is the byte 0 that ends what Open MPI says, this is left out."""
        held = self.flush()
        return held.removesuffix(b"\0") if self._left_out else held

    def take(self, data: bytes) -> bytes:
        if not self._blocks and not self.holds and not self._left_out:
            return data
        *lines, rest = (self._line + data).split(b"\n")
        self._line = b""
        passed = [self._take_line(line + b"\n") for line in lines]
        passed.append(rest[: self._ready(rest)])
        self._line = rest[self._ready(rest) :]
        if len(self._line) > _MOST_BYTES:  # no line of theirs
            passed.append(self.flush())
        return b"".join(passed)

    def _ready(self, rest: bytes) -> int:
        """How many bytes of a line that may go on are no beginning of a text that is left out."""
        if self._held:
            return 0
        if self._left_out and rest.endswith(b"\0"):
            return len(rest) - 1
        return len(rest.rstrip(b"-")) if self._blocks else len(rest)

    def _take_line(self, line: bytes) -> bytes:
        if self._held:
            held = [*self._held[1:], line]
            fits = [b for b in self._blocks if all(map(re.Pattern.fullmatch, b.lines, held))]
            if any(len(block.lines) == len(held) for block in fits):
                self._held, self._left_out = [], True
                self._blocks.remove(fits[0])
                return b""
            if fits:
                self._held.append(line)
                return b""
            return self.flush() + self._take_line(line)
        if self._blocks and line.endswith(_RULE + b"\n"):
            before = line[: -len(_RULE) - 1]
            self._held = [line[len(before) :]]
            return before
        return line


class Output(threading.Thread):
    """Passes on what comes by a pipe to stderr. A thread of its own: it may wait for long, for who reads that.

    Where nobody can read it any more, or a disk is full, it is lost, and the job goes on.
    """

    def __init__(self, pipe: int, aborting: Callable[[], dict[int, int]] | None):
        """`aborting`: the ranks that have told that they end the job, with their codes; None: nothing is left out."""
        super().__init__(name="jaxmpi.run: stderr", daemon=True)
        self._pipe, self._aborting, self._known = pipe, aborting, set[int]()
        self._filter, self._tail, self._said = Filter(), b"", list[bytes]()
        self._wakes, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._ends, self._quiet_since = False, 0.0
        self.done, self._done = os.pipe()

    def say(self, text: str) -> None:
        """Something of the launcher's own."""
        self._said.append(text.encode(errors="replace"))
        self._stir()

    def finish(self) -> None:
        """mpiexec has ended: `done` gets readable when all has been passed on."""
        self._quiet_since, self._ends = time.monotonic(), True
        self._stir()

    def close(self) -> None:
        """What is left of it if it is done; else it may be in a write for ever, which ends with this process."""
        if self.ident is not None:  # it has been started
            self.join(_WAIT_SECONDS)
        if not self.is_alive():
            for file in (self._pipe, self._wakes, self._wake, self.done):
                os.close(file)

    @property
    def within_a_line(self) -> bool:
        return self._tail.rstrip(b"\0")[-1:] not in (b"", b"\n")

    def last_line(self) -> str:
        return self._tail.rstrip(b"\0\n").rpartition(b"\n")[2].decode(errors="replace")

    def _stir(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it has not noticed the last ones yet
            os.write(self._wake, b"1")

    def run(self) -> None:
        try:
            self._pass_on()
        finally:
            os.close(self._done)

    def _pass_on(self) -> None:
        while True:
            short = self._filter.holds or self._ends
            found = ready([self._pipe, self._wakes], _WAIT_SECONDS if short else None)
            if self._wakes in found:
                os.read(self._wakes, _MOST_BYTES)
            data = os.read(self._pipe, _MOST_BYTES) if self._pipe in found else None
            if data:
                self._expect()
                self._write(self._filter.take(data))
                self._quiet_since = time.monotonic()
            elif not found:
                self._write(self._filter.flush())
            while self._said and not self._filter.holds:
                self._write(self._said.pop(0))
            if data == b"" or (self._ends and time.monotonic() - self._quiet_since > _WAIT_SECONDS):
                break
        self._write(self._filter.end())
        if data == b"":
            while not self._ends:  # it has closed its stderr, and has not ended
                os.read(self._wakes, _MOST_BYTES)
                while self._said:
                    self._write(self._said.pop(0))
        while self._said:
            self._write(self._said.pop(0))

    def _expect(self) -> None:
        if self._aborting is not None:
            for rank, code in self._aborting().items():
                if rank not in self._known:
                    self._known.add(rank)
                    self._filter.expect(rank, code)

    def _write(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-4096:]
        write(data)


def write(data: bytes) -> None:
    """All of it to stderr, or none of the rest where that fails."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(2, rest) :]
        except BlockingIOError:  # another process has made it so
            wait_to_write(2)
        except OSError:
            return

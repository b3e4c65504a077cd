"""A random program in which messages are late: python -m jaxmpi.run -n 3 tests/programs/late_messages.py --seed 1.

All ranks draw the same list of messages: from whom, to whom, which tag, shape and dtype, how late. A message is sent
and received at its place in the list, or somewhat later, in one of several ways; where an error says that it has not
come, it is received again. Its data follow from its number in the list, so NumPy says what is right: an array in the
place of another one is seen. In the end no message and no request may be left.

With JAXMPI_TIMEOUT_ACTION=raise, and a JAXMPI_TIMEOUT shorter than the messages are late. Each thread has a
communicator of its own. Printed is how many errors were raised.
"""

import argparse
import os
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError
from mpi4py import MPI

import jaxmpi
from jaxmpi import _core, notoken

SHAPES = ((), (3,), (2, 5), (20_000,))
DTYPES = ("float32", "int32", "uint8", "complex64")
TAGS = (3, 4)
ANY = 5
"""The tag of messages that are received from any rank."""
RECEIVED = ("recv", "compiled", "started", "started", "together", "pair", "any", "loop")
TRIES = 200


@dataclass
class Message:
    number: int
    source: int
    dest: int
    tag: int
    shape: tuple
    dtype: str
    late: float
    how: str
    """How it is received; of a swap, and of one behind it, both messages are exchanged by `sendrecv`."""

    def data(self):
        values = np.random.default_rng(self.number).integers(0, 200, self.shape)
        return np.asarray(values + self.number * (self.dtype != "uint8")).astype(self.dtype)

    def template(self):
        return jnp.zeros(self.shape, self.dtype)


def drawn(seed, ranks, count, late):
    draw = random.Random(seed)
    messages = []
    while len(messages) < count:
        source, dest = draw.randrange(ranks), draw.randrange(ranks)
        shape, dtype, how = draw.choice(SHAPES), draw.choice(DTYPES), draw.choice((*RECEIVED, "swap"))
        delay = draw.choice((0, 0, late * draw.random()))
        if how == "swap" and source == dest:
            continue
        tag, dtype = (ANY, "uint8") if how == "any" else (draw.choice(TAGS), dtype)
        if how in ("pair", "loop"):  # of two messages, one after the other
            for k in range(2):
                delay = delay if k == 0 else draw.choice((0, late))
                messages.append(Message(len(messages), source, dest, tag, shape, dtype, delay, how))
        else:
            messages.append(Message(len(messages), source, dest, tag, shape, dtype, delay, how))
        if how == "swap":
            messages.append(Message(len(messages), dest, source, tag, shape, dtype, 0, how))
    return messages


class Rank:
    """What a rank does with the messages of a list, in its order."""

    def __init__(self, comm, seed):
        self.comm, self.rank = comm, comm.rank
        self.draw = random.Random(f"{seed} of {self.rank}")
        self.sent, self.begun = [], []
        self.raised = Counter()
        self.of_any = Counter()
        self.first_of_pair = None

    def same(self, message, found):
        expected = message.data()
        found = np.asarray(found)
        assert found.dtype == expected.dtype, (message, found.dtype)
        np.testing.assert_array_equal(found, expected, err_msg=str(message))

    def until_it_comes(self, what, call):
        for _ in range(TRIES):
            try:
                return jax.block_until_ready(call())
            except JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                self.raised[what] += 1
        raise AssertionError(f"rank {self.rank}: {what} does not come")

    def send(self, message):
        time.sleep(message.late)
        self.sent.append(notoken.isend(jnp.asarray(message.data()), message.dest, tag=message.tag, comm=self.comm))

    def receive(self, message, messages):
        """`messages`: all of them."""
        source, tag, comm, template = message.source, message.tag, self.comm, message.template()
        how = message.how
        if how == "recv":
            self.same(message, self.until_it_comes(how, lambda: notoken.recv(template, source, tag=tag, comm=comm)))
        elif how == "any":
            self.receive_any(message, messages)
        elif how == "compiled":
            call = jaxmpi.jit(lambda x: 2 * notoken.recv(x + 1, source, tag=tag, comm=comm))
            found = self.until_it_comes(how, lambda: call(template))
            np.testing.assert_array_equal(found, 2 * message.data())
        elif how == "together":
            call = jaxmpi.jit(lambda x: notoken.wait(notoken.irecv(x, source, tag=tag, comm=comm)))
            self.same(message, self.until_it_comes(how, lambda: call(template)))
        elif how == "started":
            self.begun.append((message, notoken.irecv(template, source, tag=tag, comm=comm)))
        elif self.first_of_pair is None:
            self.first_of_pair = message
        else:
            first, self.first_of_pair = self.first_of_pair, None
            self.receive_two(first, message)

    def receive_two(self, first, second):
        """In one compiled function: once the first has come, an error would lose it."""
        source, tag, comm = first.source, first.tag, self.comm

        def pair(x):
            return [notoken.recv(x, source, tag=tag, comm=comm) for _ in range(2)]

        def started(x):
            return notoken.waitall([notoken.irecv(x, source, tag=tag, comm=comm) for _ in range(2)])

        def loop(x):
            return jax.lax.scan(lambda c, _: (c, notoken.recv(x, source, tag=tag, comm=comm)), 0, None, length=2)[1]

        call = jaxmpi.jit(loop if first.how == "loop" else self.draw.choice((pair, started)))
        found = self.until_it_comes(first.how, lambda: call(first.template()))
        self.same(first, found[0])
        self.same(second, found[1])

    def receive_any(self, message, messages):
        """One that is for any source: those of one rank come in their order."""
        status = MPI.Status()
        room = jnp.zeros(max(int(np.prod(shape)) for shape in SHAPES), jnp.uint8)
        found = self.until_it_comes("any", lambda: notoken.recv(room, tag=message.tag, comm=self.comm, status=status))
        source = status.source
        of_it = [one for one in messages if (one.tag, one.source, one.dest) == (message.tag, source, self.rank)]
        expected = of_it[self.of_any[source]].data()
        self.of_any[source] += 1
        assert status.Get_count(MPI.BYTE) == expected.nbytes
        np.testing.assert_array_equal(np.asarray(found)[: expected.nbytes], np.frombuffer(expected.tobytes(), np.uint8))

    def swap(self, mine, other):
        """After an error what this rank sends is under way, so that only the other message is received again."""
        ends = {"sendtag": mine.tag, "recvtag": other.tag, "comm": self.comm}
        try:
            found = notoken.sendrecv(jnp.asarray(mine.data()), other.template(), other.source, mine.dest, **ends)
            jax.block_until_ready(found)
        except JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error) or "is under way" not in str(error):
                raise
            self.raised["swap"] += 1
            again = {"tag": other.tag, "comm": self.comm}
            found = self.until_it_comes("recv", lambda: notoken.recv(other.template(), other.source, **again))
        self.same(other, found)

    def finish_some(self, all_of_them=False):
        """Waits for some of what has been begun, in any order."""
        while self.begun and (all_of_them or self.draw.random() < 0.3):
            some = self.draw.sample(self.begun, self.draw.randint(1, min(3, len(self.begun))))
            found = self.until_it_comes("waitall", lambda some=some: notoken.waitall([request for _, request in some]))
            for (message, request), array in zip(some, found, strict=True):
                self.same(message, array)
                self.begun.remove((message, request))

    def play(self, messages):
        at = 0
        while at < len(messages):
            message, other = messages[at], messages[min(at + 1, len(messages) - 1)]
            at += 1 + (message.how == "swap")
            if message.how == "swap" and self.rank in (message.source, message.dest):
                first = self.rank == message.source
                time.sleep(message.late if first else 0)
                self.swap(*((message, other) if first else (other, message)))
            elif message.how != "swap":
                if self.rank == message.source:
                    self.send(message)
                if self.rank == message.dest:
                    self.receive(message, messages)
            self.finish_some()
        self.finish_some(all_of_them=True)
        for request in self.sent:
            self.until_it_comes("isend", lambda request=request: notoken.wait(request))
        self.comm.Barrier()
        assert not self.comm.Iprobe(), "a message is left"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--messages", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--late", type=float, default=0.15, help="seconds, at most")
    given = parser.parse_args()
    world, errors, raised = MPI.COMM_WORLD, [], Counter()

    def play(comm, seed):
        try:
            rank = Rank(comm, seed)
            rank.play(drawn(seed, comm.size, given.messages, given.late))
            raised.update(rank.raised)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [
        threading.Thread(target=play, args=(world.Dup(), given.seed + 1000 * thread), daemon=True)
        for thread in range(given.threads)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not errors:
        time.sleep(0.01)
    if errors:
        time.sleep(0.5)
        world.Abort(3)
    for _ in range(200):  # what sendrecv has left is ended in the background
        if _core.requests_in_flight() == 0:
            break
        time.sleep(0.01)
    assert _core.requests_in_flight() == 0, f"{_core.requests_in_flight()} requests are left"
    world.Barrier()
    print(f"rank {world.rank}: all is well; errors: {dict(raised)}", flush=True)


if __name__ == "__main__":
    main()

"""What is measured: operations x contenders x kinds of call.

A step of an operation is the operation and then a multiplication by 0.999 (over the number of ranks, after a sum), so
that data is not zero and changes with every call. Where nothing is added up every rank multiplies by another number, so
that ranks stay different and it is seen when data has not moved. XLA makes the multiplication one pass over the data,
as C and NumPy do. The kinds of call:

  loop    steps in a `lax.fori_loop` inside one compiled call; in C and with mpi4py, steps in a loop
  jit     one compiled call per step
  eager   one call of the operation alone

A call works on the result of the call before (in `eager` only where that has the shape of x: not in `allgather`). In
`jit` and `eager` every result is waited for before the next call, by all contenders, with `block_until_ready`.

What a batch of calls has made of its data is looked at after the clock has stopped, every element of it, on every rank,
in every round: it must be what NumPy makes of the data of all ranks by the same steps (`Operation.witness`). Batches
start in turn from some data and from twice that, so that the result of an earlier batch is wrong as well. Eager
operations alone leave some data as it is (that of `bcast` from the second call on): they are called once more, on other
data, when the clock has stopped. What is not seen is a mistake that the calls after it make good: in `bcast` and in a
ping-pong a rank's data comes from another rank every time, so that it is the last call of a batch that counts.
"""

import ctypes
import functools
import math
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from loops import repeated
from mpi4py import MPI
from peers import MISSING, compile_c, load, load_package

import jaxmpi
from jaxmpi._bench.data import blocks, count_wrong
from jaxmpi._bench.operations import OPERATIONS as ROWS
from jaxmpi._bench.timing import COMM, Batch

RANK, SIZE = COMM.rank, COMM.size
LEFT, RIGHT = (RANK - 1) % SIZE, (RANK + 1) % SIZE
FACTOR = 0.999

if SIZE < 2:
    sys.exit("the benchmarks need at least two ranks: python -m jaxmpi.run -n 2 ...")
MPI4JAX = load_package("mpi4jax")
C: Any = load("C", lambda: compile_c("calls.c"))


# --- the operations ----------------------------------------------------------------------------------------------

FACTORS = tuple(FACTOR - 0.0005 * rank / SIZE for rank in range(SIZE))
"""What each rank multiplies by where nothing is added up."""


@dataclass(frozen=True)
class Operation:
    """One operation. `jax`, `mpi4py` and `witness` are the operation alone; a step scales the result."""

    name: str

    jax: Callable[[Any, jax.Array], jax.Array]
    """(jaxmpi or mpi4jax, x) -> result: the two have the same functions."""

    mpi4py: Callable[[np.ndarray, np.ndarray], Any]
    """(x, room for the result): the result is in that room, or in x."""

    witness: Callable[[np.ndarray], np.ndarray]
    """x of all ranks -> the results of all ranks, without communication; the first axis is the rank."""

    factors: tuple[float, ...] = FACTORS
    """What each rank multiplies by."""

    in_place: bool = False
    """mpi4py leaves the result in x on this rank."""

    keep: Callable[[Any, int], Any] | None = None
    """(result, rank) -> the part of the result that the next step works on, where that is not all."""

    parts: bool = False
    """x has a part for each rank, so that its shape is (size, n), not (n,)."""

    rounding: float = 0.0
    """How much a result may differ from the witness, relative to it: sums have an order, and it is MPI's own. The
    differences of many calls add up as a random walk does; a bound that grew as they do would hide an old result."""

    @property
    def factor(self) -> float:
        return self.factors[RANK]

    def by_mpi4py(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        self.mpi4py(x, y)
        return x if self.in_place else y

    def kept(self, result: Any, rank: int = RANK) -> Any:
        return result if self.keep is None else self.keep(result, rank)

    def step(self, mpi: Any) -> Callable[[jax.Array], jax.Array]:
        return lambda x: self.kept(self.jax(mpi, x)) * self.factor

    def step_of_all(self, x: np.ndarray) -> np.ndarray:
        """A step, of the data of all ranks."""
        result = self.witness(x)
        if self.keep is not None:
            result = np.stack([self.keep(y, rank) for rank, y in enumerate(result)])
        return result * np.array(self.factors, np.float32).reshape(-1, *[1] * (x.ndim - 1))

    def inputs(self, nbytes: int, least: float, rank: int, columns: slice) -> np.ndarray:
        """Some columns of a rank's x, of which it sends `nbytes` bytes to another; the values lie between `least` and
        four times that. Neighbours differ, and so do ranks: what has come to a wrong place is wrong there."""
        index = np.arange(columns.start, columns.stop)
        if self.parts:
            index = index + nbytes // 4 * np.arange(SIZE)[:, None]
        return np.float32(least * (1 + index * 40503 % 65521 / 65521) * (1 + rank / SIZE))


def _pingpong(mpi, x):
    if RANK == 0:
        mpi.send(x, 1, comm=COMM)
        return mpi.recv(x, 1, comm=COMM)
    if RANK == 1:
        x = mpi.recv(x, 0, comm=COMM)
        mpi.send(x, 0, comm=COMM)
    return x


def _sendrecv_traced(mpi, x):
    """With ranks that are known at run time only."""
    left, right = jax.lax.optimization_barrier((jnp.int32(LEFT), jnp.int32(RIGHT)))
    return mpi.sendrecv(x, x, left, right, comm=COMM)


def _sendrecv_by_requests(mpi, x):
    got, _ = mpi.waitall([mpi.irecv(x, LEFT, comm=COMM), mpi.isend(x, RIGHT, comm=COMM)])
    return got


def _alltoallv(mpi, x):
    counts = [x.shape[1]] * SIZE
    return mpi.alltoallv(x.reshape(-1), counts, counts, comm=COMM).reshape(x.shape)


def _barrier(mpi, x):
    mpi.barrier(comm=COMM)
    return x


def _mpi4py_pingpong(x, y):
    if RANK == 0:
        COMM.Send(x, 1)
        COMM.Recv(y, 1)
    if RANK == 1:
        COMM.Recv(y, 0)
        COMM.Send(y, 0)


def _mpi4py_alltoallv(x, y):
    counts = [x.shape[1]] * SIZE
    COMM.Alltoallv([x, counts], [y, counts])


SENDRECV = Operation(
    "sendrecv",
    lambda mpi, x: mpi.sendrecv(x, x, LEFT, RIGHT, comm=COMM),
    lambda x, y: COMM.Sendrecv(x, RIGHT, recvbuf=y, source=LEFT),
    lambda x: x[np.arange(SIZE) - 1],
)
ALLTOALL = Operation(
    "alltoall", lambda mpi, x: mpi.alltoall(x, comm=COMM), COMM.Alltoall, lambda x: x.swapaxes(0, 1), parts=True
)
OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            "allreduce",
            lambda mpi, x: mpi.allreduce(x, op=MPI.SUM, comm=COMM),
            lambda x, y: COMM.Allreduce(x, y, MPI.SUM),
            lambda x: np.broadcast_to(np.add.reduce(x, dtype=np.float32), x.shape),
            factors=(FACTOR / SIZE,) * SIZE,
            rounding=SIZE * float(np.finfo(np.float32).eps) if SIZE > 2 else 0.0,  # two have but one order
        ),
        Operation("pingpong", _pingpong, _mpi4py_pingpong, lambda x: x[[0, 0, *range(2, SIZE)]], in_place=RANK > 1),
        SENDRECV,
        Operation(
            "bcast",
            lambda mpi, x: mpi.bcast(x, 0, comm=COMM),
            lambda x, y: COMM.Bcast(x, 0),
            lambda x: np.broadcast_to(x[0], x.shape),
            in_place=True,
        ),
        Operation(
            "allgather",
            lambda mpi, x: mpi.allgather(x, comm=COMM),
            COMM.Allgather,
            lambda x: np.broadcast_to(x, (SIZE, *x.shape)),
            keep=lambda y, rank: y[(rank + 1) % SIZE],
        ),
        ALLTOALL,
        Operation("barrier", _barrier, lambda x, y: COMM.Barrier(), lambda x: x, in_place=True),
        replace(ALLTOALL, name="alltoallv", jax=_alltoallv, mpi4py=_mpi4py_alltoallv),
        replace(SENDRECV, name="sendrecv, traced", jax=_sendrecv_traced),
        replace(SENDRECV, name="sendrecv by requests", jax=_sendrecv_by_requests),
    )
}
"""The last three are not in the tables of calls.py: mpi4jax does not have them."""


# --- the data, and the check of it -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """What the contenders of one operation start from, at one size, and what must become of it."""

    operation: Operation
    nbytes: int
    least: float = 1.0
    _rights: dict[Any, np.ndarray] = field(default_factory=dict, init=False, repr=False)

    @functools.cached_property
    def host(self) -> tuple[np.ndarray, np.ndarray]:
        """What this rank starts from in even turns and in odd ones: twice that, so that rounding is the same."""
        parts = [self.operation.inputs(self.nbytes, self.least, RANK, part) for part in blocks(self.nbytes // 4)]
        x = np.concatenate(parts, axis=-1)
        return x, 2 * x

    @functools.cached_property
    def device(self) -> tuple[jax.Array, jax.Array]:
        even, odd = self.host
        return jnp.asarray(even), jnp.asarray(odd)

    def on_host(self, turn: int) -> np.ndarray:
        return self.host[turn % 2]

    def on_device(self, turn: int) -> jax.Array:
        return self.device[turn % 2]

    def right(self, step: Callable[[Operation, np.ndarray], np.ndarray], steps: int) -> np.ndarray:
        """What this rank must have after these steps of the data of all ranks, in an even turn."""
        if (step, steps) not in self._rights:
            own = []
            for part in blocks(self.nbytes // 4):
                x = np.stack([self.operation.inputs(self.nbytes, self.least, rank, part) for rank in range(SIZE)])
                for _ in range(steps):
                    x = step(self.operation, x)
                own.append(x[RANK])
            right = np.concatenate(own, axis=-1)
            if not (np.isfinite(right).all() and right.all()):
                raise ValueError(f"{steps} steps of {self.operation.name} leave no data that could be checked")
            self._rights[step, steps] = right
        return self._rights[step, steps]

    def check(self, step: Callable[[Operation, np.ndarray], np.ndarray], steps: int) -> Callable[[int, Any], int]:
        """(turn, result of that many steps) -> how many of its elements are wrong on this rank."""

        def wrong(turn: int, result: Any) -> int:
            own = result.addressable_data(0) if isinstance(result, jax.Array) else result
            tolerance = math.sqrt(steps) * self.operation.rounding
            return count_wrong(own, self.right(step, steps), tolerance, scale=1 + turn % 2)

        return wrong


def alone(operation: Operation, x: np.ndarray) -> np.ndarray:
    return operation.witness(x)


def plus_one(operation: Operation, x: np.ndarray) -> np.ndarray:
    return x + np.float32(1)


# --- the kinds of call -------------------------------------------------------------------------------------------


def chain(function: Callable[[jax.Array], jax.Array], calls: int) -> Callable[[jax.Array], jax.Array]:
    """Calls on the result of the call before, each waited for."""

    def run(x):
        for _ in range(calls):
            x = function(x).block_until_ready()
        return x

    return run


def _jax_loop(mpi, jit):
    def build(data, calls):
        compiled = jit(repeated(data.operation.step(mpi), calls))
        return Batch(
            calls, data.on_device, lambda x: compiled(x).block_until_ready(), data.check(Operation.step_of_all, calls)
        )

    return build


def _jax_call(mpi, jit):
    def build(data, calls):
        run = chain(jit(data.operation.step(mpi)), calls)
        return Batch(calls, data.on_device, run, data.check(Operation.step_of_all, calls))

    return build


# Operations alone: a sum doubles with every call (of two ranks), from a value so small that it stays finite for so
# many calls; then it starts again.
TINY, DOUBLINGS = 1e-30, int(200 / math.log2(SIZE))


def _check_eager(data: Data, calls: int, call: Callable[[int], Any]) -> Callable[[int, Any], int]:
    """Of the last result, and of one more call: call(turn) is the operation on the data of that turn."""
    chained = 1 if data.operation.name == "allgather" else (calls - 1) % DOUBLINGS + 1
    last, once_more = data.check(alone, chained), data.check(alone, 1)
    return lambda turn, result: last(turn, result) + once_more(turn + 1, call(turn + 1))


def _jax_eager(mpi):
    def build(data, calls):
        operation = data.operation
        wait = jax.effects_barrier if operation.name == "barrier" else lambda: None

        def run(start):
            v = start
            for call in range(1, calls + 1):
                y = operation.jax(mpi, v).block_until_ready()
                wait()
                v = start if call % DOUBLINGS == 0 or y.shape != v.shape else y
            return y

        check = _check_eager(data, calls, lambda turn: operation.jax(mpi, data.on_device(turn)))
        return Batch(calls, data.on_device, run, check)

    return build


def _plain_jax(data, calls):
    """The price of a call of JAX itself."""
    if data.operation.name != "allreduce":
        return None
    check = data.check(plus_one, calls)  # in even turns: the result is not twice as large from data that is
    run = chain(jax.jit(lambda x: x + 1), calls)
    return Batch(calls, lambda turn: data.on_device(0), run, lambda turn, y: check(0, y))


def _room(operation: Operation, x: np.ndarray) -> np.ndarray:
    return np.ones((SIZE, *x.shape) if operation.name == "allgather" else x.shape, np.float32)


def _mpi4py_loop(data, calls):
    by_mpi4py, kept, factor = data.operation.by_mpi4py, data.operation.kept, data.operation.factor
    y = _room(data.operation, data.on_host(0))

    def run(x):
        for _ in range(calls):
            np.multiply(kept(by_mpi4py(x, y)), factor, out=x)
        return x

    return Batch(calls, lambda turn: data.on_host(turn).copy(), run, data.check(Operation.step_of_all, calls))


def _mpi4py_eager(data, calls):
    operation = data.operation
    room = _room(operation, data.on_host(0))

    def start(turn):
        return data.on_host(turn).copy(), data.on_host(turn)

    def run(x_and_values):
        x, values = x_and_values
        y = room
        for call in range(calls):
            if call % DOUBLINGS == 0:
                np.copyto(x, values)
            result = operation.by_mpi4py(x, y)
            if result is y and x.shape == y.shape:
                x, y = y, x
        return result

    check = _check_eager(data, calls, lambda turn: operation.by_mpi4py(data.on_host(turn).copy(), room))
    return Batch(calls, start, run, check)


def _c_array(count: int) -> np.ndarray:
    """Memory as a C program has it; NumPy would ask for huge pages."""
    C.buffer.restype, C.buffer.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    C.release.argtypes = [ctypes.c_void_p]
    address = C.buffer(count)
    memory = (ctypes.c_float * count).from_address(address)
    weakref.finalize(memory, C.release, address)
    return np.frombuffer(memory, np.float32)


def _c_loop(in_place):
    def build(data, calls):
        operation, count = data.operation, data.nbytes // 4
        if in_place and operation.name != "allreduce":
            return None
        function = getattr(C, f"{operation.name}_in_place" if in_place else operation.name)
        function.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int, ctypes.c_float, ctypes.c_int]
        x = _c_array(data.on_host(0).size).reshape(data.on_host(0).shape)
        y = _c_array(SIZE * count)
        y[:] = 1

        def run(x):
            function(MPI._addressof(COMM), x.ctypes.data, y.ctypes.data, count, operation.factor, calls)
            return x

        def start(turn):
            x[...] = data.on_host(turn)
            return x

        return Batch(calls, start, run, data.check(Operation.step_of_all, calls))

    return build


PLAIN = "x + 1"
"""The contender that does not communicate."""


@dataclass(frozen=True)
class Contender:
    kind: str
    name: str
    build: Callable[[Data, int], Batch | None]
    """(data, calls in a batch) -> the batch, or None if it does not have that operation."""
    latency: float
    """Roughly the seconds of the smallest call: for the number of calls in a batch."""
    needs: str = ""


CONTENDERS = (
    Contender("loop", "C", _c_loop(False), 0.6e-6, "C"),
    Contender("loop", "C, in place", _c_loop(True), 0.6e-6, "C"),
    Contender("loop", "mpi4py", _mpi4py_loop, 2e-6),
    Contender("loop", "jaxmpi", _jax_loop(jaxmpi, jaxmpi.jit), 0.7e-6),
    Contender("loop", "mpi4jax", _jax_loop(MPI4JAX, jax.jit), 1e-6, "mpi4jax"),
    Contender("jit", "jaxmpi", _jax_call(jaxmpi, jaxmpi.jit), 10e-6),
    Contender("jit", "jaxmpi in jax.jit", _jax_call(jaxmpi, jax.jit), 200e-6),
    Contender("jit", "mpi4jax", _jax_call(MPI4JAX, jax.jit), 200e-6, "mpi4jax"),
    Contender("jit", PLAIN, _plain_jax, 5e-6),
    Contender("eager", "jaxmpi", _jax_eager(jaxmpi), 20e-6),
    Contender("eager", "mpi4py", _mpi4py_eager, 1e-6),
    Contender("eager", "mpi4jax", _jax_eager(MPI4JAX), 18e-3, "mpi4jax"),
)


def build_donated(nbytes: int, calls: int) -> dict[tuple[str, str], Batch]:
    """A jit call of allreduce alone, its operand donated or not: with jaxmpi the former needs no memory besides it."""
    batches = {}
    data = Data(OPERATIONS["allreduce"], nbytes, TINY)
    allreduce, calls = data.operation.jax, min(calls, DOUBLINGS)
    functions = {
        "jaxmpi": (jaxmpi.jit, functools.partial(allreduce, jaxmpi)),
        "mpi4jax": (jax.jit, functools.partial(allreduce, MPI4JAX)),
    }

    def start(turn):  # a donated array is gone afterwards
        return jnp.array(data.on_host(turn))

    for name, (jit, function) in functions.items():
        for suffix, options in (("", {}), (", donated", {"donate_argnums": 0})):
            if name not in MISSING:
                run = chain(jit(function, **options), calls)
                batches["jit", name + suffix] = Batch(calls, start, run, data.check(alone, calls))
    return batches


TOGETHER, EACH = "jaxmpi, one call", "jaxmpi, a call for each leaf"


def build_trees(leaves: int, nbytes: int, seconds: float) -> dict[tuple[str, str], Batch]:
    """allreduce of a pytree of so many leaves of so many bytes each, and of each leaf alone."""
    batches = {}
    data, tiny = (Data(OPERATIONS["allreduce"], leaves * nbytes, least) for least in (1.0, TINY))
    allreduce = functools.partial(data.operation.jax, jaxmpi)
    functions = {TOGETHER: allreduce, EACH: lambda xs: [allreduce(x) for x in xs]}

    def start(data):
        return lambda turn: jnp.split(data.on_device(turn), leaves)

    def whole(wrong):
        return lambda turn, xs: wrong(turn, jnp.concatenate(xs))

    def steps(function, calls):
        def run(xs):
            for _ in range(calls):
                xs = jax.block_until_ready(function(xs))
            return xs

        return run

    for name, function in functions.items():

        def step(xs, function=function):
            return [y * data.operation.factor for y in function(xs)]

        many, few = (max(2, int(seconds / (leaves * latency))) for latency in (1e-6, 20e-6))
        few = min(few, DOUBLINGS)
        loop, check = jaxmpi.jit(repeated(step, many)), whole(data.check(Operation.step_of_all, many))
        batches["loop", name] = Batch(many, start(data), lambda x, f=loop: jax.block_until_ready(f(x)), check)
        check = whole(data.check(Operation.step_of_all, few))
        batches["jit", name] = Batch(few, start(data), steps(jaxmpi.jit(step), few), check)
        batches["eager", name] = Batch(few, start(tiny), steps(function, few), whole(tiny.check(alone, few)))
    return batches


def calls_in_batch(contender: Contender, nbytes: int, seconds: float) -> int:
    """How many calls take about `seconds`, the same on every rank; few enough for 0.999 to their power to count."""
    return max(10 if contender.kind == "loop" else 2, min(20000, int(seconds / (contender.latency + nbytes / 1e9))))


def build(operation: str, nbytes: int, seconds: float, *, only: Any = None) -> dict[tuple[str, str], Batch]:
    """(kind, contender) -> batch, of all that can take part, or of those in `only`."""
    batches = {}
    usual, tiny = (Data(OPERATIONS[operation], nbytes, least) for least in (1.0, TINY))
    for contender in CONTENDERS:
        key = contender.kind, contender.name
        if contender.needs in MISSING or (only is not None and key not in only):
            continue
        data = tiny if contender.kind == "eager" else usual
        batch = contender.build(data, calls_in_batch(contender, nbytes, seconds))
        if batch is not None:
            batches[key] = replace(batch, calls=batch.calls * ROWS.get(operation, ROWS["sendrecv"]).messages)
    return batches

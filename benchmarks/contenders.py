"""What is measured: operations x contenders x kinds of call.

A step of an operation is the operation and then a multiplication by 0.999 (over the number of ranks, after a sum), so
that data is not zero and changes with every call. XLA makes the multiplication one pass over the data, as C and NumPy
do. The kinds of call:

  loop    steps in a `lax.fori_loop` inside one compiled call; in C and with mpi4py, steps in a loop
  jit     one compiled call per step
  eager   one call of the operation alone

A call works on the result of the call before (in `eager` only where that has the shape of x: not in `allgather`). In
`jit` and `eager` every result is waited for before the next call, by all contenders, with `block_until_ready`.
"""

import ctypes
import functools
import math
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
LEFT, RIGHT = (RANK - 1) % SIZE, (RANK + 1) % SIZE
FACTOR = 0.999
CFLAGS = ("-O3", "-march=native")

MISSING: dict[str, str] = {}
"""Contender -> why it cannot take part."""


# --- the peers ---------------------------------------------------------------------------------------------------


def _start_gloo() -> None:
    """Joins the ranks to JAX's own runtime, whose collectives between CPUs are those of gloo."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = COMM.bcast(free.getsockname()[1])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", SIZE, RANK)


def _compile_c() -> ctypes.CDLL:
    """The functions of calls.c, compiled by rank 0 with the mpicc of the MPI in use."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(COMM.bcast(folder)) / "calls.so"
        error = None
        if RANK == 0:
            mpicc = shutil.which("mpicc", path=Path(sys.prefix) / "bin") or shutil.which("mpicc") or "mpicc"
            source = Path(__file__).with_name("calls.c")
            command = [mpicc, *CFLAGS, "-shared", "-fPIC", "-o", str(library), str(source)]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True)
            except (OSError, subprocess.CalledProcessError) as raised:
                error = f"{raised} {getattr(raised, 'stderr', '')}"
        error = COMM.bcast(error)
        if error:
            raise ImportError(error)
        loaded = ctypes.CDLL(str(library))
        COMM.Barrier()
    return loaded


def _unless_missing(name: str, load: Callable[[], Any]) -> Any:
    """What `load` returns on all ranks, or None and a remark."""
    loaded, why = None, ""
    try:
        loaded = load()
    except Exception as error:  # whatever keeps a peer from loading
        why = f"{type(error).__name__}: {error}"
    for reason in COMM.allgather(why):
        if reason:
            MISSING[name] = reason
            return None
    return loaded


def _import_mpi4jax() -> Any:
    import mpi4jax

    return mpi4jax


if SIZE < 2:
    sys.exit("the benchmarks need at least two ranks: python -m jaxmpi.run -n 2 ...")
GLOO = "--gloo" in sys.argv
"""Whether this is the job that compares JAX's own collectives with jaxmpi. It is one of its own: with gloo in the
process calls of the other contenders on 1 MiB took up to twice as long, and gloo, which has threads of its own, is
several times slower on a rank that is bound to one core."""

if GLOO:
    _unless_missing("gloo", _start_gloo)  # before JAX's backend starts

import jaxmpi  # noqa: E402 (after gloo)
from jaxmpi import notoken  # noqa: E402

MPI4JAX = None if GLOO else _unless_missing("mpi4jax", _import_mpi4jax)
C: Any = None if GLOO else _unless_missing("C", _compile_c)


# --- the operations ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """One operation. `jax` and `numpy` are the operation alone; a step scales what they return."""

    jax: Callable[[Any, jax.Array], jax.Array]
    """(jaxmpi.notoken or mpi4jax, x) -> result: the two have the same functions."""

    numpy: Callable[[np.ndarray, np.ndarray], np.ndarray]
    """(x, room for the result) -> result"""

    factor: float = FACTOR
    keep: Callable[[Any], Any] = lambda result: result
    """The part of the result that the next step works on."""

    parts: bool = False
    """x has a part for each rank, so that its shape is (size, n), not (n,)."""

    messages: int = 1
    """Messages, one after the other, in a call: the time is divided by it."""

    def step(self, mpi: Any) -> Callable[[jax.Array], jax.Array]:
        return lambda x: self.keep(self.jax(mpi, x)) * self.factor

    def inputs(self, nbytes: int, least: float = 1.0) -> np.ndarray:
        """x of which one rank sends `nbytes` bytes to another; the values lie between `least` and four times that."""
        shape = (SIZE, nbytes // 4) if self.parts else (nbytes // 4,)
        return np.linspace(least, 2 * least, math.prod(shape), dtype=np.float32).reshape(shape) * (1 + RANK / SIZE)


def _pingpong(mpi, x):
    if RANK == 0:
        mpi.send(x, 1, comm=COMM)
        return mpi.recv(x, 1, comm=COMM)
    if RANK == 1:
        x = mpi.recv(x, 0, comm=COMM)
        mpi.send(x, 0, comm=COMM)
    return x


def _barrier(mpi, x):
    mpi.barrier(comm=COMM)
    return x


def _numpy_allreduce(x, y):
    COMM.Allreduce(x, y, MPI.SUM)
    return y


def _numpy_pingpong(x, y):
    if RANK == 0:
        COMM.Send(x, 1)
        COMM.Recv(y, 1)
    if RANK == 1:
        COMM.Recv(y, 0)
        COMM.Send(y, 0)
    return y


def _numpy_exchange(x, y):
    COMM.Sendrecv(x, RIGHT, recvbuf=y, source=LEFT)
    return y


def _numpy_bcast(x, y):
    COMM.Bcast(x, 0)
    return x


def _numpy_allgather(x, y):
    COMM.Allgather(x, y)
    return y


def _numpy_alltoall(x, y):
    COMM.Alltoall(x, y)
    return y


def _numpy_barrier(x, y):
    COMM.Barrier()
    return x


OPERATIONS = {
    "allreduce": Operation(lambda mpi, x: mpi.allreduce(x, op=MPI.SUM, comm=COMM), _numpy_allreduce, FACTOR / SIZE),
    "pingpong": Operation(_pingpong, _numpy_pingpong, messages=2),
    "exchange": Operation(lambda mpi, x: mpi.sendrecv(x, x, LEFT, RIGHT, comm=COMM), _numpy_exchange),
    "bcast": Operation(lambda mpi, x: mpi.bcast(x, 0, comm=COMM), _numpy_bcast),
    "allgather": Operation(lambda mpi, x: mpi.allgather(x, comm=COMM), _numpy_allgather, keep=lambda y: y[RIGHT]),
    "alltoall": Operation(lambda mpi, x: mpi.alltoall(x, comm=COMM), _numpy_alltoall, parts=True),
    "barrier": Operation(_barrier, _numpy_barrier),
}


# --- the kinds of call -------------------------------------------------------------------------------------------

Measure = Callable[[], float]
"""Measures a batch of calls; the seconds of one call on this rank."""


def batch(calls: int, run: Callable[[Any], Any], prepare: Callable[[], Any]) -> Measure:
    """The time that `run(prepare())` takes after a barrier, for each of its calls."""

    def measure() -> float:
        x = jax.block_until_ready(prepare())
        COMM.Barrier()
        start = time.perf_counter()
        run(x)
        return (time.perf_counter() - start) / calls

    return measure


def chain(function: Callable[[jax.Array], jax.Array], calls: int, start: Callable[[], jax.Array]) -> Measure:
    """Calls on the result of the call before, each waited for."""

    def run(x):
        for _ in range(calls):
            x = function(x).block_until_ready()

    return batch(calls, run, start)


def repeated(step: Callable[[Any], Any], calls: int) -> Callable[[Any], Any]:
    return lambda x: jax.lax.fori_loop(0, calls, lambda _, u: step(u), x)


def _jax_loop(mpi, jit):
    def build(name, nbytes, calls):
        operation = OPERATIONS[name]
        x = jnp.asarray(operation.inputs(nbytes))
        compiled = jit(repeated(operation.step(mpi), calls))
        return batch(calls, lambda v: compiled(v).block_until_ready(), lambda: x)

    return build


def _jax_call(mpi, jit):
    def build(name, nbytes, calls):
        operation = OPERATIONS[name]
        x = jnp.asarray(operation.inputs(nbytes))
        return chain(jit(operation.step(mpi)), calls, lambda: x)

    return build


# Operations alone: a sum doubles with every call (of two ranks), from a value so small that it stays finite for so
# many calls; then it starts again.
TINY, DOUBLINGS = 1e-30, 200


def _jax_eager(mpi):
    def build(name, nbytes, calls):
        operation = OPERATIONS[name]
        x = jnp.asarray(operation.inputs(nbytes, TINY))
        wait = jax.effects_barrier if name == "barrier" else lambda: None

        def run(start):
            v = start
            for call in range(1, calls + 1):
                y = operation.jax(mpi, v).block_until_ready()
                wait()
                v = start if call % DOUBLINGS == 0 or y.shape != v.shape else y

        return batch(calls, run, lambda: x)

    return build


def _plain_jax(name, nbytes, calls):
    """The price of a call of JAX itself."""
    if name != "allreduce":
        return None
    x = jnp.asarray(OPERATIONS[name].inputs(nbytes))
    return chain(jax.jit(lambda x: x + 1), calls, lambda: x)


def _gloo(loop):
    """`psum` over a mesh of one device per rank."""

    def build(name, nbytes, calls):
        if name != "allreduce":
            return None
        local = jnp.asarray(OPERATIONS[name].inputs(nbytes))
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ranks",))
        spec = jax.sharding.PartitionSpec("ranks")
        sharding = jax.sharding.NamedSharding(mesh, spec)
        x = jax.make_array_from_single_device_arrays((SIZE * local.size,), sharding, [local])

        def step(v):
            return jax.lax.psum(v, "ranks") * (FACTOR / SIZE)

        body = repeated(step, calls) if loop else step
        compiled = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
        if loop:
            return batch(calls, lambda v: compiled(v).block_until_ready(), lambda: x)
        return chain(compiled, calls, lambda: x)

    return build


def _room(name: str, x: np.ndarray) -> np.ndarray:
    return np.ones((SIZE, *x.shape) if name == "allgather" else x.shape, np.float32)


def _numpy_loop(name, nbytes, calls):
    operation = OPERATIONS[name]
    values = operation.inputs(nbytes)
    y = _room(name, values)

    def run(x):
        for _ in range(calls):
            np.multiply(operation.keep(operation.numpy(x, y)), operation.factor, out=x)

    return batch(calls, run, values.copy)


def _numpy_eager(name, nbytes, calls):
    operation = OPERATIONS[name]
    values = operation.inputs(nbytes, TINY)
    room = _room(name, values)

    def run(x):
        y = room
        for call in range(calls):
            if call % DOUBLINGS == 0:
                np.copyto(x, values)
            result = operation.numpy(x, y)
            if result is y and x.shape == y.shape:
                x, y = y, x

    return batch(calls, run, values.copy)


def _c_array(count: int) -> np.ndarray:
    """Memory as a C program has it; NumPy would ask for huge pages."""
    C.buffer.restype, C.buffer.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    C.release.argtypes = [ctypes.c_void_p]
    address = C.buffer(count)
    memory = (ctypes.c_float * count).from_address(address)
    weakref.finalize(memory, C.release, address)
    return np.frombuffer(memory, np.float32)


def _c_loop(in_place):
    def build(name, nbytes, calls):
        if in_place and name != "allreduce":
            return None
        operation = OPERATIONS[name]
        function = getattr(C, f"{name}_in_place" if in_place else name)
        function.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int, ctypes.c_float, ctypes.c_int]
        values = operation.inputs(nbytes).reshape(-1)
        x, y = _c_array(values.size), _c_array(SIZE * nbytes // 4)
        y[:] = 1

        def run(x):
            function(MPI._addressof(COMM), x.ctypes.data, y.ctypes.data, nbytes // 4, operation.factor, calls)

        return batch(calls, run, lambda: np.copyto(x, values) or x)

    return build


@dataclass(frozen=True)
class Contender:
    kind: str
    name: str
    build: Callable[[str, int, int], Measure | None]
    """(operation, bytes, calls in a batch) -> its measure, or None: does not have that operation."""
    latency: float
    """Roughly the seconds of the smallest call: for the number of calls in a batch."""
    needs: str = ""


CONTENDERS = (
    Contender("loop", "C", _c_loop(False), 0.6e-6, "C"),
    Contender("loop", "C, in place", _c_loop(True), 0.6e-6, "C"),
    Contender("loop", "mpi4py", _numpy_loop, 2e-6),
    Contender("loop", "jaxmpi", _jax_loop(notoken, jaxmpi.jit), 0.7e-6),
    Contender("loop", "mpi4jax", _jax_loop(MPI4JAX, jax.jit), 1e-6, "mpi4jax"),
    Contender("loop", "psum, gloo", _gloo(True), 100e-6, "gloo"),
    Contender("jit", "jaxmpi", _jax_call(notoken, jaxmpi.jit), 10e-6),
    Contender("jit", "jaxmpi in jax.jit", _jax_call(notoken, jax.jit), 200e-6),
    Contender("jit", "mpi4jax", _jax_call(MPI4JAX, jax.jit), 200e-6, "mpi4jax"),
    Contender("jit", "psum, gloo", _gloo(False), 200e-6, "gloo"),
    Contender("jit", "x + 1", _plain_jax, 5e-6),
    Contender("eager", "jaxmpi", _jax_eager(notoken), 20e-6),
    Contender("eager", "mpi4py", _numpy_eager, 1e-6),
    Contender("eager", "mpi4jax", _jax_eager(MPI4JAX), 18e-3, "mpi4jax"),
)
KINDS = ("loop", "jit", "eager")


def _allreduce_out_of_place() -> Callable[[jax.Array], jax.Array]:
    """What jaxmpi.allreduce would be if its result never took the operand's place."""
    from jaxmpi._arguments import reduction
    from jaxmpi._communicator import resolve
    from jaxmpi._operations import bind

    params = {"comm": resolve(COMM, "allreduce"), "op": reduction(MPI.SUM, "allreduce"), "in_place": False}
    return lambda x: bind("allreduce", params, x)


def build_donated(nbytes: int, calls: int) -> dict[tuple[str, str], Measure]:
    """A jit call of allreduce alone, its operand donated or not: with jaxmpi the former needs no memory besides it."""
    measures = {}
    values = OPERATIONS["allreduce"].inputs(nbytes, TINY)
    allreduce = OPERATIONS["allreduce"].jax
    functions = {
        "jaxmpi": (jaxmpi.jit, functools.partial(allreduce, notoken)),
        "out of place": (jaxmpi.jit, _allreduce_out_of_place()),
        "mpi4jax": (jax.jit, functools.partial(allreduce, MPI4JAX)),
    }
    for name, (jit, function) in functions.items():
        for suffix, options in (("", {}), (", donated", {"donate_argnums": 0})):
            if name not in MISSING:
                measures["jit", name + suffix] = chain(jit(function, **options), calls, lambda: jnp.array(values))
    return measures


def takes_part(contender: Contender) -> bool:
    if GLOO and contender.kind != "eager" and contender.name == "jaxmpi":
        return True
    return (contender.needs == "gloo") == GLOO and contender.needs not in MISSING


def calls_in_batch(contender: Contender, nbytes: int, seconds: float) -> int:
    """How many calls take about `seconds`, the same on every rank; few enough for 0.999 to their power to count."""
    few, many = {"loop": (10, 20000), "jit": (2, 20000), "eager": (2, 20000)}[contender.kind]
    return max(few, min(many, int(seconds / (contender.latency + nbytes / 1e9))))


def build(operation: str, nbytes: int, seconds: float, *, only: Any = None) -> dict[tuple[str, str], Measure]:
    """(kind, contender) -> measure, of all that can take part, or of those in `only`."""
    measures = {}
    for contender in CONTENDERS:
        key = contender.kind, contender.name
        if not takes_part(contender) or (only is not None and key not in only):
            continue
        measure = contender.build(operation, nbytes, calls_in_batch(contender, nbytes, seconds))
        if measure is not None:
            messages = OPERATIONS[operation].messages
            measures[key] = measure if messages == 1 else lambda m=measure, n=messages: m() / n
    return measures


def sample(measures: dict[Any, Measure], rounds: int) -> dict[Any, list[float]]:
    """Seconds per call of each, `rounds` times: all take turns, the slowest rank counts."""
    times: dict[Any, list[float]] = {key: [] for key in measures}
    for turn in range(rounds + 1):  # the first compiles
        for key, measure in measures.items():
            seconds = measure()
            if turn > 0:
                times[key].append(seconds)
    mine = np.array(list(times.values()))
    COMM.Allreduce(MPI.IN_PLACE, mine, MPI.MAX)
    return dict(zip(times, mine.tolist(), strict=True))

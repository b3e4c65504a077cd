"""What a job costs as it has more ranks: `python benchmarks/scale.py --ranks 2 4 8 16 32 64`.

Starts jobs of so many ranks on this machine, more than it has cores, one after the other. Each goes through the same
steps, in which a rank has the same amount of work whatever their number. Of each step it prints, per rank:

  us          the time of the step, or of one call where it is repeated, of the slowest rank, multiplied by cores and
              divided by ranks: what one rank would take with a core of its own, if waiting cost nothing
  messages    sent by the rank that sends most, with those inside of MPI's collectives, by Open MPI's own monitoring
  peers       how many ranks it sends to, of the rank with most
  bytes       sent by the rank that sends most
  KiB         by which the step makes its memory larger (proportional set size, mean of the ranks)

Messages and bytes do not depend on the machine or its load. Below are seconds from the start of the launcher to its
end: of these steps, of a job that imports JAX and mpi4py alone, of one that imports jaxmpi as well (empty), of steps
with a timeline, and of the program that merges the timelines of all ranks. `sharded` is a sum over a sharded array of
JAX's, over MPI.
"""

import argparse
import ctypes
import importlib
import json
import os
import tempfile
import time
from pathlib import Path

from jobs import result, run

RANKS = (2, 4, 8, 16, 32, 64)
REPEATED = 200
COMPARED = 1000
"""So many collectives of a communicator are compared by the ranks as they begin."""
OWNED, SHARED, CELLS = 10_000, 100, 64
"""Of the index map each rank owns so many, of which so many are ghosts of either neighbour; blocks of the grid have so
many cells along each axis."""


class Sent:
    """The messages that this rank has sent to each, and their bytes: performance variables of Open MPI's monitoring,
    which is on in jobs with `--mca pml_monitoring_enable 1`."""

    def __init__(self, comm):
        from mpi4py import MPI

        paths = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libmpi.so" in line]
        self._mpi, self._size = ctypes.CDLL(paths[0]), comm.size
        self._handle = ctypes.c_void_p(MPI._handleof(comm))
        self._session, provided = ctypes.c_void_p(), ctypes.c_int()
        self._call("init_thread", MPI.THREAD_MULTIPLE, ctypes.byref(provided))
        self._call("pvar_session_create", ctypes.byref(self._session))
        self._variables = [self._start(f"pml_monitoring_messages_{what}") for what in ("count", "size")]

    def _call(self, name, *arguments):
        if error := getattr(self._mpi, f"MPI_T_{name}")(*arguments):
            raise RuntimeError(f"MPI_T_{name} answers with error {error}")

    def _start(self, name):
        index, handle, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
        for kind in range(16):
            if self._mpi.MPI_T_pvar_get_index(name.encode(), kind, ctypes.byref(index)) == 0:
                break
        else:
            raise RuntimeError(f"this MPI library has no variable {name}: the benchmark needs Open MPI")
        session, object_handle = self._session, ctypes.byref(self._handle)
        self._call("pvar_handle_alloc", session, index, object_handle, ctypes.byref(handle), ctypes.byref(count))
        self._call("pvar_start", session, handle)
        return handle

    def read(self):
        """Messages to each rank, bytes to each rank."""
        import numpy as np

        both = []
        for handle in self._variables:
            numbers = np.zeros(self._size, np.uint64)
            self._call("pvar_read", self._session, handle, numbers.ctypes.data_as(ctypes.c_void_p))
            both.append(numbers.astype(np.int64))
        return both


def memory():
    """KiB of this process: its own, and its share of what it has in common with others."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def job(folder):
    """Goes through the steps on every rank; rank 0 prints a line of JSON."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.zeros(3)))
    world.Barrier()
    sent = Sent(world)
    steps = {}

    def step(name, function, times=1):
        """Its time and what it sends are divided by `times`, by which the function repeats its operation."""
        world.Barrier()
        time.sleep(0.01)
        held, (messages, size) = memory(), sent.read()
        begin = time.perf_counter()
        result = jax.block_until_ready(function())
        seconds = time.perf_counter() - begin
        messages, size = (after - before for after, before in zip(sent.read(), (messages, size), strict=True))
        grown = memory() - held
        most = [1e6 * seconds / times, messages.sum() / times, np.count_nonzero(messages), size.sum() / times]
        most = world.allreduce(np.array(most), lambda a, b: np.maximum(a, b))
        steps[name] = [*most.tolist(), world.allreduce(grown) / world.size]
        steps[name][0] *= min(1, os.cpu_count() / world.size)
        return result

    def repeat(name, exchange, x):
        compiled = jaxmpi.jit(lambda x: jax.lax.fori_loop(0, REPEATED, lambda _, x: exchange(x), x))
        for _ in range(COMPARED // REPEATED + 1):
            jax.block_until_ready(compiled(x))
        step(name, lambda: compiled(x), REPEATED)

    step("a barrier of MPI", world.Barrier)
    another = step("MPI_Comm_dup", world.Dup)
    jaxmpi = step("import jaxmpi", lambda: importlib.import_module("jaxmpi"))
    jaxmpi = jaxmpi

    x = jnp.ones(1)
    step("first allreduce", lambda: jaxmpi.allreduce(x, MPI.SUM))
    repeat("allreduce of 4 B", lambda x: jaxmpi.allreduce(x, MPI.SUM) / world.size, x)
    shape = jaxmpi.Grid((0, 0), (world.size * CELLS,) * 2).processes
    shape = tuple(CELLS * n for n in shape)
    grid = step("Grid", lambda: jaxmpi.Grid((0, 0), shape, periodic=True))
    u = jnp.ones(tuple(n + 2 for n in grid.local_shape))
    step("first exchange of halos", lambda: grid.exchange(u))
    repeat("exchange of halos", grid.exchange, u)
    total, first = world.size * OWNED, world.rank * OWNED
    owned = np.arange(first, first + OWNED)
    ghosts = np.setdiff1d(np.arange(first - SHARED, first + OWNED + SHARED) % total, owned)
    mesh = step("IndexMap", lambda: jaxmpi.IndexMap(owned, ghosts))
    rows = jnp.ones(OWNED + len(ghosts))
    step("first exchange of ghosts", lambda: mesh.exchange(rows))
    repeat("exchange of ghosts", mesh.exchange, rows)
    step("first allreduce on another communicator", lambda: jaxmpi.allreduce(x, MPI.SUM, comm=another))
    step("save", lambda: jaxmpi.io.save(f"{folder}/state.zarr", {"u": u}, grid=grid, width=1, overwrite=True))
    total = world.allreduce(memory()) / world.size
    if world.rank == 0:
        print(json.dumps({"steps": steps, "memory": total}), flush=True)


def sharded():
    """A sum over all ranks of JAX's own sharded arrays; rank 0 prints a line of JSON."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    mesh = jax.make_mesh((world.size,), ("ranks",))
    divided = NamedSharding(mesh, PartitionSpec("ranks"))
    whole = np.arange(world.size, dtype=np.float32)
    x = jax.make_array_from_callback((world.size,), divided, lambda at: whole[at])
    total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))
    first = time.perf_counter()
    right = float(jax.block_until_ready(total(x))) == world.size * (world.size - 1) / 2
    begin = time.perf_counter()
    for _ in range(REPEATED // 4):
        jax.block_until_ready(total(x))
    seconds = (time.perf_counter() - begin) / (REPEATED // 4)
    shared = min(1, os.cpu_count() / world.size)
    if world.allreduce(not right):
        raise RuntimeError("the sum of a sharded array is wrong")
    held = world.allreduce(memory()) / world.size
    if world.rank == 0:
        print(json.dumps({"first [s]": begin - first, "call [us]": 1e6 * seconds * shared, "memory": held}), flush=True)


BASE = """
import jax, jax.numpy as jnp
from mpi4py import MPI
jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.zeros(3)))
MPI.COMM_WORLD.Barrier()
"""


def measure(ranks, folder):
    job = ["jaxmpi.run", "-n", ranks]
    count = {"OMPI_MCA_pml_monitoring_enable": "1"}

    def steps(**environment):
        seconds, said = run(*job, __file__, "--job", "steps", "--folder", f"{folder}/state", **count, **environment)
        return {"seconds": seconds, **result(said)}

    record = {"ranks": ranks, **steps()}
    record["alone"], _ = run(*job, "-c", BASE)
    record["checked"], record["traced"] = steps(JAXMPI_CHECK="1"), steps(JAXMPI_TRACE=f"{folder}/trace")
    record["merge"], _ = run("jaxmpi.trace", f"{folder}/trace")
    record["empty"], _ = run(*job, "-c", "import jaxmpi" + BASE)
    record["sharded"] = result(run(*job, "--collectives", "mpi", __file__, "--job", "sharded")[1])
    return record


def show(record):
    print(f"\n{record['ranks']} ranks{'us':>50} {'messages':>10} {'peers':>6} {'bytes':>10} {'KiB':>8}")
    for kind, of in (("", record), ("checked: ", record["checked"])):
        for name, (us, messages, peers, size, grown) in of["steps"].items():
            if not kind or name.startswith(("allreduce", "exchange")):
                print(f"{kind + name:42} {us:14.5g} {messages:10.4g} {peers:6.0f} {size:10.5g} {grown:8.0f}")
    print(f"memory of a rank at the end: {record['memory'] / 1024:.0f} MiB")
    for what in ("seconds", "alone", "empty", "merge"):
        print(f"{what}: {record[what]:.3g} s")
    print(f"traced: {record['traced']['seconds']:.3g} s")
    print("sharded:", ", ".join(f"{name} {value:.4g}" for name, value in record["sharded"].items()), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--job", choices=("steps", "sharded"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="of the jobs (default: %(default)s)")
    options = parser.parse_args()
    if options.job:
        sharded() if options.job == "sharded" else job(options.folder)
        return
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            show(measure(ranks, folder))


if __name__ == "__main__":
    main()

"""The communicators of JAX's sharded programs.

XLA asks MPI for a communicator when it first executes a collective of certain processes. It does not say of which
processes, and other processes may ask, too. So before a program's first execution this module reads the groups of
processes from the HLO. The processes of each new group make a communicator, and execute a small program of just that
group, so that XLA asks for it. The same step raises, before anything is sent, for collectives that MPI, or XLA's use of
it, cannot do.
"""

import threading
import weakref
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax._src.interpreters import pxla
from mpi4py import MPI

import jaxmpi._core as _core
from jaxmpi._jax import internals
from jaxmpi._mpi import call_sites, library
from jaxmpi._mpi.communicators import resolve
from jaxmpi._primitive import arguments
from jaxmpi._sharded import hlo

_WORLD = MPI.COMM_WORLD

_preparing = threading.Lock()
_connecting = threading.local()
"""`on` in a thread whose programs are not prepared: it executes the program by which XLA takes a communicator."""
_prepared: Any = weakref.WeakSet()
_connected: set[tuple[int, ...]] = set()
"""Groups of processes for which XLA has a communicator."""


def _devices_of(execute: Any) -> tuple[Any, ...]:
    """Return the devices of a program that can be executed, in the order of the HLO."""
    for sharding in (*execute.in_handler.in_shardings, *execute.out_handler.out_shardings):
        if (devices := getattr(sharding, "_device_assignment", None)) is not None:
            return tuple(devices)
    return tuple(execute.xla_executable.local_devices())


def _texts(execute: Any) -> Iterator[str]:
    for module in execute.xla_executable.hlo_modules():
        yield module.to_string()


def _connect(group: tuple[Any, ...]) -> None:
    """Make the communicator of a group of devices, together with the processes of the other devices."""
    processes = tuple(device.process_index for device in group)
    name = f"JAX's processes {', '.join(map(str, processes))}"
    number = _core.group(processes)
    of_world = resolve(_WORLD, "connect").number
    _core.add_site("connect", (of_world, number), -1, 0, f"{name}: {call_sites.here()}")
    comm = MPI.Comm.fromhandle(_core.connect(number) % 2**64)
    comm.Set_name(name)
    _core.expect(resolve(comm, "connect").number)
    if len(group) == 1:
        return  # XLA does not ask for it in a program of one process
    try:
        with ThreadPoolExecutor(1) as pool:  # a thread without traces and without contexts of the program
            total = pool.submit(_sum, group).result()
    finally:
        _core.expect(0)
    if total != sum(map(_number, processes)) % 2**32:  # another group has another sum
        raise RuntimeError(f"jaxmpi: JAX's collectives of {name} run among other processes: {hlo.ADVICE}")


def _number(process: int) -> int:
    return zlib.crc32(b"%d" % process)


def _sum(group: tuple[Any, ...]) -> int:
    """Return the sum of numbers of all devices, by a program with a collective of this group alone."""
    _connecting.on = True
    mesh = jax.sharding.Mesh(np.array(group), ("processes",))
    spec = jax.sharding.PartitionSpec("processes")
    body = internals.shard_map(lambda x: jax.lax.psum(x, "processes"), mesh=mesh, in_specs=spec, out_specs=spec)
    with jax.disable_jit(False), jax.transfer_guard("allow"), internals.on_mesh(mesh):
        own = jax.device_put(np.full(1, _number(_WORLD.rank), np.uint32), jax.local_devices()[0])
        sharding = jax.sharding.NamedSharding(mesh, spec)
        x = jax.make_array_from_single_device_arrays((len(group),), sharding, [own])
        return int(np.asarray(jax.jit(body)(x).addressable_data(0))[0])


def _ready(execute: Any) -> None:
    """Make the communicators that a program needs before the first execution."""
    devices = _devices_of(execute)
    if devices[0].platform != "cpu":
        return  # only CPUs communicate by MPI
    groups = sorted({group for text in _texts(execute) for group in hlo.groups_of(text, len(devices))})
    rank = _WORLD.rank
    for positions in groups:
        group = tuple(devices[i] for i in positions)
        processes = tuple(device.process_index for device in group)
        if rank not in processes or processes in _connected:
            continue
        if len(set(processes)) < len(processes):
            raise NotImplementedError(
                f"jaxmpi: a collective between {len(processes)} devices of {len(set(processes))} processes: by MPI "
                "each has one device (jax_num_cpu_devices, --xla_force_host_platform_device_count): start more ranks "
                f"instead, or {hlo.ADVICE}"
            )
        _connect(group)
        _connected.add(processes)


def _execute(own: Any, self: Any, *args: Any) -> Any:
    if self not in _prepared and not getattr(_connecting, "on", False):
        with _preparing:
            if self not in _prepared:
                _ready(self)
                _prepared.add(self)
    return own(self, *args)


def _reduction(name: str, datatype: library.Datatype) -> int:
    """Return the core's number of a reduction; 0: there is none for this type."""
    if name not in arguments.REDUCTIONS[datatype.kind]:
        return 0
    return arguments.reduction(getattr(MPI, name), "psum").number_for(datatype)


def install() -> None:
    """Make JAX's programs get communicators before they are first executed, and XLA reduce as this package does."""
    for datatype in library.DATATYPES.values():  # with NaN, and alike on all ranks
        _core.set_reductions(datatype.code, *(_reduction(name, datatype) for name in ("SUM", "PROD", "MAX", "MIN")))
    internals.replace(pxla.ExecuteReplicated, "__call__", "", _execute)

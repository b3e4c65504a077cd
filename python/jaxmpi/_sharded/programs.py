"""JAX's own sharded programs over MPI: how its processes meet, and the communicators of its programs.

XLA asks MPI for a communicator as it first executes a collective of certain processes; it says neither of which, nor
asks only those. So before a program's first execution its groups of processes are read from its HLO; for each that is
new its processes make a communicator, and execute a small program of just that group, by which XLA asks for it. The
same look finds what MPI, or XLA's use of it, cannot do, before anything is sent.
"""

import contextlib
import fcntl
import json
import math
import os
import re
import signal
import socket
import struct
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax._src.interpreters import pxla
from mpi4py import MPI

import jaxmpi._core as _core
from jaxmpi._jax import internals
from jaxmpi._launcher import accelerators, before_jax
from jaxmpi._mpi import call_sites, library
from jaxmpi._mpi import devices as transports
from jaxmpi._mpi.communicators import resolve
from jaxmpi._mpi.settings import SETTINGS
from jaxmpi._primitive import arguments
from jaxmpi._sharded import replica_groups

_WORLD = MPI.COMM_WORLD

# --- how the processes meet ----------------------------------------------------------------------------------------

_PATIENCE_SECONDS = 300
"""As long as JAX itself waits for its processes."""


def world() -> tuple[int, int]:
    """This process and the number of processes."""
    return _WORLD.rank, _WORLD.size


def local_device() -> int | None:
    """The accelerator of this process, by JAX's numbers, as the launcher would choose; None if nothing is to be chosen:
    the launcher or the program has, there are not several, or this process's number on its machine is not known."""
    place = accelerators.local_rank(os.environ)
    if accelerators.decided or place is None:
        return None
    for platform in accelerators.PLACED:
        chosen = getattr(jax.config, f"jax_{platform.lower()}_visible_devices", "all")
        if chosen == "all" and (count := transports.count(platform)) > 1:
            return place[0] % count
    return None


def start() -> None:
    """Starts jax.distributed, unless the program has, or is alone. All ranks; before JAX makes devices."""
    if before_jax.state["kind"] == "mpi" and (reason := before_jax.why_not_mpi()):
        raise RuntimeError(f"jaxmpi: --collectives mpi: {reason}")
    if _WORLD.size > 1 and distributed.global_state.client is None:
        jax.distributed.initialize()
    if os.environ.get(_BINDS, "").endswith(f":{_kept[0].getsockname()[1]}" if _kept else " "):
        del os.environ[_BINDS]  # it is not meant for processes that this one starts
    if distributed.global_state.client is None:
        return
    if before_jax.PREEMPTION not in os.environ and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))  # XLA has replaced it (JAX 0.6)
    found = (distributed.global_state.process_id, distributed.global_state.num_processes)
    if found != world():
        raise RuntimeError(
            f"jaxmpi: jax.distributed.initialize was told process {found[0]} of {found[1]}, but this is rank "
            f"{_WORLD.rank} of {_WORLD.size}: call it without arguments, or not at all"
        )


def meet(seconds: float | None = None) -> str:
    """The address of JAX's coordinator, once all ranks have come here. Raises RuntimeError that names who has not."""
    end = time.monotonic() + (seconds or _PATIENCE_SECONDS)
    answer = _lead(end) if _WORLD.rank == 0 else _follow(end + 5)
    if missing := answer.get("missing"):
        which = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        raise RuntimeError(
            f"jaxmpi: {which} of {_WORLD.size} did not begin to use JAX while the others waited to start "
            "jax.distributed: all ranks must import jax and make an array, or call jax.distributed.initialize()"
        )
    os.environ.update(answer["environment"])
    return answer["address"]


def _tag() -> int:
    return _WORLD.Get_attr(MPI.TAG_UB)  # type: ignore[return-value]


def _follow(end: float) -> dict[str, Any]:
    """Another rank tells rank 0 its host, answers at which of its addresses it reaches rank 0, and is told the rest."""
    _WORLD.send(socket.gethostname(), 0, _tag())
    while True:
        if not _wait_for([0], end):
            raise RuntimeError("jaxmpi: rank 0 has not begun to use JAX, and this rank waits for it to start its own")
        answer = json.loads(_WORLD.recv(source=0, tag=_tag()))
        if "addresses" not in answer:
            return answer
        _WORLD.send([host for host in answer["addresses"] if _is_reached(host, answer["port"])], 0, _tag())


def _lead(end: float) -> dict[str, Any]:
    others = range(1, _WORLD.size)
    came = _wait_for(others, end)
    hosts = {rank: _WORLD.recv(source=rank, tag=_tag()) for rank in came}
    missing = [rank for rank in others if rank not in came]
    answer: dict[str, Any] = {"missing": missing}
    if not missing:
        own = socket.gethostname()
        host, is_address = _reached_by([rank for rank in others if hosts[rank] != own], end)
        address = f"{host}:{_port(host if is_address else '')}"
        answer = {"address": address, "environment": _not_by_a_proxy(host)}
        if is_address:  # XLA's service asks nobody who he is, and takes what it does not understand for a reason to end
            os.environ.setdefault(_BINDS, address)
    for rank in came:
        _WORLD.send(json.dumps(answer), rank, _tag())
    return answer


def _wait_for(ranks: Any, end: float) -> list[int]:
    """Those of the ranks from which a message has come, all of them or at the `end`."""
    came: list[int] = []
    report = time.monotonic() + (SETTINGS.timeout or math.inf)
    while len(came) < len(ranks) and time.monotonic() < end:
        came += [rank for rank in ranks if rank not in came and _WORLD.iprobe(source=rank, tag=_tag())]
        if len(came) < len(ranks) and time.monotonic() > report:
            waited = ", ".join(str(rank) for rank in ranks if rank not in came)
            print(f"jaxmpi: rank {_WORLD.rank} waits for rank {waited} to start jax.distributed", file=sys.stderr)
            report = math.inf
        time.sleep(0.001)
    return came


def _reached_by(ranks: list[int], end: float) -> tuple[str, bool]:
    """An address of this machine that these ranks of other machines can connect to, and whether it is one: if none is
    known, its name."""
    if not ranks:
        return "127.0.0.1", True
    with socket.create_server(("", 0)) as listening:
        question = {"addresses": _addresses(), "port": listening.getsockname()[1]}
        for rank in ranks:
            _WORLD.send(json.dumps(question), rank, _tag())
        _wait_for(ranks, end)
        answers = [_WORLD.recv(source=rank, tag=_tag()) for rank in ranks]
    common = [host for host in question["addresses"] if all(host in answer for answer in answers)]
    return (common[0], True) if common else (socket.gethostname(), False)


def _is_reached(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=3):
        return True
    return False


def _addresses() -> list[str]:
    """This machine's addresses for others: that of its name, those of its interfaces."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                request = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(request[20:24]))
    return [host for host in dict.fromkeys(found) if not host.startswith("127.")]


_BINDS = "JAX_COORDINATOR_BIND_ADDRESS"
"""JAX's variable of the address at which its coordinator listens: all of the machine's, if it is not set."""

_SIOCGIFADDR = 0x8915  # of Linux: the address of an interface
_kept: list[socket.socket] = []
"""Keeps the coordinator's port from others until it is in use."""


def _port(host: str) -> int:
    """A port of this address, or of all."""
    if port := os.environ.get("JAX_COORDINATOR_PORT"):
        return int(port)
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as XLA's server does, which so can share it
    kept.bind((host, 0))
    _kept.append(kept)
    return kept.getsockname()[1]


def _not_by_a_proxy(host: str) -> dict[str, str]:
    """Variables with which processes connect to the host themselves."""
    if not any(os.environ.get(name) for name in ("grpc_proxy", "https_proxy", "http_proxy")):
        return {}
    direct = os.environ.get("no_grpc_proxy")  # noqa: SIM112 (its name)
    return {"no_grpc_proxy": f"{direct},{host}" if direct else host}


# --- what a program communicates -------------------------------------------------------------------------------------

_SHAPE = re.compile(r"([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")
_MOST = 2**31 - 1
_BY_MPI = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_OF_BYTES = ("all-to-all", "collective-permute")
"""Collectives that XLA does by messages of bytes."""
_TYPES = {"pred", *(f"{kind}{bits}" for kind in "su" for bits in (8, 16, 32, 64)), "f32", "f64", "c64", "c128"}
"""XLA's types for which it knows an MPI datatype."""
_ADVICE = "use --collectives gloo, or jaxmpi's own functions outside of the sharded program (docs/sharded.md)"


def _check(name: str, shapes: str, line: str) -> None:
    """Raises for what XLA, or its use of MPI, cannot do."""
    where = ((match := re.search(r'op_name="([^"]*)"', line)) and f" ({match[1]})") or ""
    if name not in _BY_MPI:
        raise NotImplementedError(f"jaxmpi: XLA has no {name} by MPI{where}: {_ADVICE}")
    for kind, sizes in _SHAPE.findall(shapes):
        count = math.prod(int(n) for n in sizes.split(",") if n)
        of_bytes = name in _OF_BYTES
        if not of_bytes and kind not in _TYPES:
            raise TypeError(
                f"jaxmpi: XLA's {name} by MPI has no {kind}{where}: convert to another dtype before it, or {_ADVICE}"
            )
        width = max(1, int(re.sub(r"\D", "", kind.partition("e")[0]) or 8) // 8)
        if count * (width if of_bytes else 1) > _MOST:
            unit = "bytes" if of_bytes else "elements"
            raise ValueError(
                f"jaxmpi: XLA's {name} of {kind}[{sizes}]{where} has more than {_MOST} {unit}, and XLA passes their "
                f"number to MPI as an int: divide it, or {_ADVICE}"
            )


def groups_of(program: str, devices: int) -> list[tuple[int, ...]]:
    """The groups of devices between which a program communicates, by their positions among so many devices.

    Args:
      program: the text of an HLO module after optimization.

    Raises:
      TypeError, ValueError, NotImplementedError: XLA cannot do one of its collectives by MPI, or writes it in a way
        that is not known here.
    """
    found: set[tuple[int, ...]] = set()
    try:
        for collective, line in replica_groups.collectives(program, devices):
            _check(collective.opcode, collective.shapes, line)
            found.update(collective.groups)
    except replica_groups.Unreadable as error:
        raise NotImplementedError(
            f"jaxmpi: JAX {jax.__version__} writes which devices communicate in a way that jaxmpi cannot read "
            f"({error}): {_ADVICE}"
        ) from None
    return sorted(found)


# --- the communicators of a program ----------------------------------------------------------------------------------

_looking = threading.Lock()
_connecting = threading.local()
"""`on` in a thread whose programs are not looked at: it executes the one by which XLA takes a communicator."""
_looked_at: Any = weakref.WeakSet()
_made: set[tuple[int, ...]] = set()
"""Groups of processes for which XLA has a communicator."""


def _devices_of(execute: Any) -> tuple[Any, ...]:
    """The devices of a program that can be executed, in the order of its HLO."""
    for sharding in (*execute.in_handler.in_shardings, *execute.out_handler.out_shardings):
        if (devices := getattr(sharding, "_device_assignment", None)) is not None:
            return tuple(devices)
    return tuple(execute.xla_executable.local_devices())


def _texts(execute: Any) -> Iterator[str]:
    for module in execute.xla_executable.hlo_modules():
        yield module.to_string()


def _connect(group: tuple[Any, ...]) -> None:
    """Makes the communicator of a group of devices, with the processes of the others."""
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
        with ThreadPoolExecutor(1) as pool:  # where nothing is traced, and no context of the program's holds
            total = pool.submit(_sum, group).result()
    finally:
        _core.expect(0)
    if total != sum(map(_number, processes)) % 2**32:  # another group has another sum
        raise RuntimeError(f"jaxmpi: JAX's collectives of {name} are not theirs: {_ADVICE}")


def _number(process: int) -> int:
    return zlib.crc32(b"%d" % process)


def _sum(group: tuple[Any, ...]) -> int:
    """The sum of numbers of all devices: a program with a collective of this group alone."""
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
    """Makes what a program needs before its first execution."""
    devices = _devices_of(execute)
    if devices[0].platform != "cpu":
        return  # others do not communicate by MPI
    found = sorted({group for text in _texts(execute) for group in groups_of(text, len(devices))})
    rank = _WORLD.rank
    for positions in found:
        group = tuple(devices[i] for i in positions)
        processes = tuple(device.process_index for device in group)
        if rank not in processes or processes in _made:
            continue
        if len(set(processes)) < len(processes):
            raise NotImplementedError(
                f"jaxmpi: a collective between {len(processes)} devices of {len(set(processes))} processes: by MPI "
                "each has one device (jax_num_cpu_devices, --xla_force_host_platform_device_count): start more ranks "
                f"instead, or {_ADVICE}"
            )
        _connect(group)
        _made.add(processes)


def _execute(own: Any, self: Any, *args: Any) -> Any:
    if self not in _looked_at and not getattr(_connecting, "on", False):
        with _looking:
            if self not in _looked_at:
                _ready(self)
                _looked_at.add(self)
    return own(self, *args)


def _reduction(name: str, datatype: library.Datatype) -> int:
    """The core's number of a reduction; 0: there is none for this type."""
    if name not in arguments.REDUCTIONS[datatype.kind]:
        return 0
    return arguments.reduction(getattr(MPI, name), "psum").number_for(datatype)


if before_jax.state.get("kind") == "mpi":
    for _type in library.DATATYPES.values():  # as for jaxmpi's own functions: with NaN, and alike on all ranks
        _core.set_reductions(_type.code, *(_reduction(name, _type) for name in ("SUM", "PROD", "MAX", "MIN")))
    internals.replace(pxla.ExecuteReplicated, "__call__", "", _execute)

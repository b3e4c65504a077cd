"""How the processes of JAX's sharded programs meet: each learns the address of JAX's coordinator."""

import contextlib
import fcntl
import json
import math
import os
import signal
import socket
import struct
import sys
import threading
import time
from typing import Any

import jax
from jax._src import distributed
from mpi4py import MPI

from jaxmpi._mpi import devices as transports
from jaxmpi._mpi.settings import SETTINGS
from jaxmpi._sharded import communicators
from jaxmpi_launch import accelerators, sharded_state

_WORLD = MPI.COMM_WORLD

_PATIENCE_SECONDS = 300
"""The time to wait for other processes: as long as JAX itself waits for them."""


def world() -> tuple[int, int]:
    """Return the number of this process and the number of processes."""
    return _WORLD.rank, _WORLD.size


def local_device() -> int | None:
    """Return the accelerator of this process, by JAX's numbers, as the launcher would choose it. Return None if nothing
    is to be chosen: the launcher or the program has chosen, there are not several, or the number of this process on
    this machine is not known."""
    local = accelerators.local_rank(os.environ)
    if accelerators.decided or local is None:
        return None
    for platform in accelerators.PLACED:
        chosen = getattr(jax.config, f"jax_{accelerators.JAX_NAMES[platform]}_visible_devices", "all")
        if chosen == "all" and (count := transports.count(platform)) > 1:
            return local[0] % count
    return None


def start() -> None:
    """Start jax.distributed, unless the program has, or is alone. All ranks call it before JAX makes devices."""
    if sharded_state.state.kind == "mpi" and (reason := sharded_state.why_not_mpi()):
        raise RuntimeError(f"jaxmpi: --collectives mpi: {reason}")
    if sharded_state.state.kind == "mpi":
        communicators.install()
    if _WORLD.size > 1 and distributed.global_state.client is None:
        jax.distributed.initialize()
    if distributed.global_state.client is None:
        return
    if sharded_state.PREEMPTION not in os.environ and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))  # XLA has replaced it (JAX 0.6)
    joined = (distributed.global_state.process_id, distributed.global_state.num_processes)
    if joined != world():
        raise RuntimeError(
            f"jaxmpi: jax.distributed.initialize got process {joined[0]} of {joined[1]}, but this is rank "
            f"{_WORLD.rank} of {_WORLD.size}: call it without arguments, or not at all"
        )


def meet(seconds: float | None = None) -> str:
    """Return the address of JAX's coordinator, once all ranks have called this. Raise RuntimeError that names the ranks
    that have not."""
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


def forget_address() -> None:
    """Forget the coordinator's address, once it listens: processes that this one starts must not use it."""
    if _chosen and os.environ.get(_BINDS) == _chosen.pop():
        del os.environ[_BINDS]


def _tag() -> int:
    return _WORLD.Get_attr(MPI.TAG_UB)  # type: ignore[return-value]


def _follow(end: float) -> dict[str, Any]:
    """Send rank 0 the host of this rank, then the addresses of rank 0 that this rank reaches. Return the answer."""
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
        if is_address and _BINDS not in os.environ:
            # XLA's service does not authenticate clients, and ends when it gets something that it does not understand.
            os.environ[_BINDS] = address
            _chosen.append(address)
    for rank in came:
        _WORLD.send(json.dumps(answer), rank, _tag())
    return answer


def _wait_for(ranks: Any, end: float) -> list[int]:
    """Return the ranks from which a message has come: all of them, or fewer at the `end`."""
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
    """Return an address of this machine to which these ranks of other machines can connect, and True; if none is known,
    the name of this machine, and False."""
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
    """Return this machine's addresses for others: the address of its name, and the addresses of the interfaces."""
    addresses: list[str] = []
    with contextlib.suppress(OSError):
        addresses.append(socket.gethostbyname(socket.gethostname()))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                request = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                addresses.append(socket.inet_ntoa(request[20:24]))
    return [host for host in dict.fromkeys(addresses) if not host.startswith("127.")]


_BINDS = "JAX_COORDINATOR_BIND_ADDRESS"
"""JAX's variable of the address at which the coordinator listens: all addresses of the machine, if it is not set."""

_chosen: list[str] = []
"""The address in that variable, while this module has set it."""

_SIOCGIFADDR = 0x8915  # of Linux: the address of an interface
_reserved: list[socket.socket] = []
"""Sockets that keep the coordinator's port from others until it is in use."""


def _port(host: str) -> int:
    """Return a port of this address, or of all addresses."""
    if port := os.environ.get("JAX_COORDINATOR_PORT"):
        return int(port)
    reserving = socket.socket()
    reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as XLA's server does, which so can share it
    reserving.bind((host, 0))
    _reserved.append(reserving)
    return reserving.getsockname()[1]


def _not_by_a_proxy(host: str) -> dict[str, str]:
    """Return variables that make processes connect to the host directly, not through a proxy."""
    if not any(os.environ.get(name) for name in ("grpc_proxy", "https_proxy", "http_proxy")):
        return {}
    direct = os.environ.get("no_grpc_proxy")  # noqa: SIM112 (gRPC's own name)
    return {"no_grpc_proxy": f"{direct},{host}" if direct else host}

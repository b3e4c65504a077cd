"""Communicators as parameters of compiled programs, and the default one."""

import threading
import time
import warnings
from typing import Any

import numpy as np
from mpi4py import MPI

import jaxmpi._core as _core
from jaxmpi import _jax, _static, _timeline
from jaxmpi._native import DEVICES, MEANING_OF_DEFAULT, flag, handle_of

# How long an import waits for the imports of other ranks. After that the first use of the default communicator waits.
_PATIENCE_SECONDS = 10.0


class Communicator:
    """An intra-communicator with its rank and size, compared by identity.

    There is one object per communicator and lifetime. The core keeps its number as an attribute of the MPI
    communicator, so a recycled handle never finds the rank and size of its predecessor, and a program compiled for a
    freed communicator raises when it is called. The numbers of COMM_WORLD, its clone and COMM_SELF are the same in
    every run; other processes do not know the numbers of other communicators.
    """

    __slots__ = ("number", "programs", "rank", "size")

    def __init__(self, number: int, rank: int, size: int):
        self.number, self.rank, self.size = number, rank, size
        self.programs: Any = None
        """Finds the compiled programs of eager calls (see _primitive); they go when the communicator is freed."""

    def __repr__(self) -> str:
        return f"Communicator(rank {self.rank} of {self.size})"

    def alive(self) -> bool:
        """Whether it has not been freed."""
        _forget_freed()
        return _known.get(self.number) is self


_known: dict[int, Communicator] = {}
"""By their numbers, until they are freed and the next one is made."""


def _forget_freed() -> None:
    """Drops what is kept for communicators that have been freed: no call finds it any more."""
    for number in _core.take_freed():
        if (freed := _known.pop(number, None)) is not None:
            freed.programs = None


def known() -> list[Communicator]:
    return list(_known.values())


def resolve(comm: Any, operation: str) -> Communicator:
    """The communicator of a call.

    Raises TypeError if `comm` is not an mpi4py communicator, ValueError if it is null, freed or an inter-communicator.
    """
    if comm is None:
        return default()
    if not isinstance(comm, MPI.Comm):
        hint = " It is traced: take it from the enclosing scope instead of passing it." if _jax.is_tracer(comm) else ""
        raise TypeError(
            f"{operation}: comm must be an mpi4py communicator such as MPI.COMM_WORLD, got {comm!r} of type "
            f"{type(comm).__name__}.{hint}"
        )
    if comm == MPI.COMM_NULL:
        raise ValueError(
            f"{operation}: comm is MPI.COMM_NULL: it has been freed, or this rank is not part of it. Pass a live "
            "communicator, and only on its own ranks."
        )
    if isinstance(comm, _static.Static):  # whose handle MPI may have given to another one
        if not comm.lifetime.alive():
            raise ValueError(f"{operation}: comm is {comm!r}, which has been freed. Pass a live communicator.")
        return comm.lifetime
    found = _core.communicator(handle_of(comm))
    if found is None:
        raise ValueError(
            f"{operation}: comm is an inter-communicator, which is not supported. Merge it first: comm.Merge()."
        )
    known = _known.get(found[0])
    if known is None:
        _forget_freed()
        _core.set_chunk(found[0], _default.chunk(ours=False))
        name = comm.Get_name()
        if name:
            _core.set_name(found[0], name)
        _timeline.communicator(found[0], comm, name)
        known = _known.setdefault(found[0], Communicator(*found))
    return known


_PIECE, _LEAST_SHARE = 8 << 20, 256 << 10
"""Bytes of a piece of a long allreduce (`most_at_a_time` in csrc/mpi/ops.c), and of each rank's share of a piece, which
must not get too short: libraries send such shares."""


class _Default:
    """The clone of COMM_WORLD that calls without `comm` use.

    Cloning needs all ranks, so it begins at the import of the package, which all ranks do, and not at the first call,
    which may be a message between two of them. It does not block for ever: if some ranks never import the package, the
    import continues after _PATIENCE_SECONDS, and only a call that needs the default communicator waits.
    """

    def __init__(self) -> None:
        self._comm, cloning = MPI.COMM_WORLD.Idup()
        # The chunk size; whether it holds for all communicators or only for this one, all of whose ranks are known to
        # use this package (see _devices); whether ranks compare their calls; whether any
        # has arrays on devices.
        check = flag("JAXMPI_CHECK")
        self._settings = np.array([DEVICES.chunk, DEVICES.everywhere, check, len(DEVICES.communicated) > 1], np.int64)
        agreeing = MPI.COMM_WORLD.Iallreduce(MPI.IN_PLACE, self._settings, MPI.MAX)
        self._requests = [cloning, agreeing]
        self._resolved: Communicator | None = None
        self._lock = threading.Lock()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not (agreed := MPI.Request.Testall(self._requests)):
            if time.monotonic() > deadline:
                warnings.warn(
                    "jaxmpi: not all ranks of COMM_WORLD have imported jaxmpi yet. Calls without comm= wait until "
                    "they do; if they never will, pass a communicator of the ranks that do.",
                    RuntimeWarning,
                    stacklevel=2,
                )
                break
            time.sleep(0.0005)
        self.agreed = agreed
        """Whether all ranks imported the package before this import ended."""
        self.labels = agreed and not self._settings[3]
        """Whether messages may have labels: no rank has arrays on devices, whose messages have none."""
        self.check = bool(self._settings[2]) if agreed else check
        """Whether ranks compare their calls, as far as this import could learn. It never changes later: otherwise some
        ranks of a communicator in use would compare, and others not."""

    def get(self) -> Communicator:
        if self._resolved is None:
            resolved = resolve(self.mpi(), "the default communicator")
            if bool(self._settings[2]) != self.check:
                raise RuntimeError(
                    "jaxmpi: JAXMPI_CHECK is set on some ranks and not on this one, which has learned of it too late: "
                    "set it on all ranks."
                )
            _core.set_chunk(resolved.number, self.chunk(ours=True))
            if not self._settings[3]:  # nothing is known of an MPI that reads the memory of devices
                _core.set_piece(resolved.number, max(_PIECE, resolved.size * _LEAST_SHARE))
            _core.set_name(resolved.number, "the default communicator")
            _timeline.communicator(resolved.number, self._comm, "the default communicator")
            self._resolved = resolved
        return self._resolved

    def chunk(self, ours: bool) -> int:
        """The agreed chunk size, on our communicator or on another one.

        Waits for the agreement, except for other communicators if this rank names no size: their ranks may never import
        the package.
        """
        with self._lock:
            if ours or DEVICES.everywhere:
                MPI.Request.Waitall(self._requests)
            elif not MPI.Request.Testall(self._requests):
                return 0
        return int(self._settings[0]) if ours or self._settings[1] else 0

    def mpi(self) -> MPI.Comm:
        with self._lock:
            MPI.Request.Waitall(self._requests)
            if self._resolved is None:
                _core.communicator(handle_of(self._comm), MEANING_OF_DEFAULT)
            return self._comm


_default = _Default()
CHECK = _default.check
_core.set_check(CHECK, _default.labels)


def default() -> Communicator:
    """The communicator of calls without `comm`: one clone of COMM_WORLD."""
    return _default.get()


def default_mpi() -> MPI.Comm:
    """That clone as an mpi4py communicator."""
    return _default.mpi()


if _default.agreed:  # a program of an earlier run may use these before this run traces anything
    for _comm in (None, MPI.COMM_WORLD, MPI.COMM_SELF):
        resolve(_comm, "import")

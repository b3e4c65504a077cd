"""Communicators as parameters of compiled programs, and the default one."""

import dataclasses
import math
import os
import threading
import time
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

import jaxmpi._core as _core
from jaxmpi._jax import internals
from jaxmpi._mpi import agreement, groups, spares, static, timeline
from jaxmpi._mpi.devices import NCCL_REFUSALS
from jaxmpi._mpi.library import CONSTANTS, DEVICES, FAILURES, LIBRARY, handle_of, stable_key
from jaxmpi._mpi.settings import ALL, SETTINGS

# How long an import waits for the imports of other ranks. After that the first use of the default communicator waits.
_PATIENCE_SECONDS = 10.0


class Local:
    """An object that belongs to a communicator and never changes: a copy is the object itself. It cannot be pickled."""

    __slots__ = ()

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__}: it cannot be pickled, because it belongs to a communicator of this process. "
            "Pickle the arguments it was made from, such as numbers of processes and shapes, and make it again on each "
            "rank."
        )


class Communicator(Local):
    """An intra-communicator with its rank and size, compared by identity.

    There is one object per communicator and lifetime. The core keeps the number as an attribute of the MPI
    communicator. So a recycled handle never gives the rank and size of a freed communicator, and a program compiled for
    a freed communicator raises when it is called. The numbers of COMM_WORLD, its clone and COMM_SELF are the same in
    every run; other processes do not know the numbers of other communicators.
    """

    __slots__ = ("mpi", "number", "programs", "rank", "size")

    def __init__(self, number: int, rank: int, size: int, mpi: MPI.Comm):
        self.number, self.rank, self.size, self.mpi = number, rank, size, mpi
        self.programs: Any = None
        """Returns the compiled programs of eager calls; they go when the communicator is freed."""

    def __repr__(self) -> str:
        return f"Communicator(rank {self.rank} of {self.size})"

    def alive(self) -> bool:
        """Return whether the communicator has not been freed."""
        _forget_freed()
        return _known.get(self.number) is self


_known: dict[int, Communicator] = {}
"""The communicators by number, until they are freed and the next one is made."""


def _forget_freed() -> None:
    """Drop the programs of freed communicators: no call uses them any more."""
    for number in _core.take_freed():
        if (freed := _known.pop(number, None)) is not None:
            freed.programs = None


_given_up: set[int] = set()
"""The numbers of the communicators that have been given up."""


def give_up(comm: MPI.Comm) -> int:
    """End all work on a revoked communicator: programs compiled for it raise, and no request on it is in flight any
    more. Return how many requests were in flight."""
    if (identity := _core.communicator(handle_of(comm))) is None:
        return 0
    _given_up.add(identity[0])
    requests = _core.give_up(identity[0])
    _forget_freed()
    return requests


def of_number_in_text(number: int) -> Communicator | None:
    """Return the communicator that the text of an error names, by the lower bits of the number."""
    return next((comm for comm in _known.values() if comm.number & _IN_TEXT == number), None)


def was_given_up(number: int) -> bool:
    """Return whether the communicator that the text of an error names has been given up."""
    return any(given_up & _IN_TEXT == number for given_up in _given_up)


_IN_TEXT = (1 << 24) - 1


def known() -> list[Communicator]:
    return list(_known.values())


def check_alive(comm: MPI.Comm, operation: str, made: str) -> None:
    """Raise ValueError if the communicator of an object has been freed, or given up. `made`: the kind of object."""
    if comm == MPI.COMM_NULL:
        raise ValueError(
            f"{operation}: the communicator of the {made} has been freed. Make the {made} with a live one, and free it "
            "after the last call."
        )
    if _given_up and (identity := _core.communicator(handle_of(comm))) is not None and identity[0] in _given_up:
        raise ValueError(
            f"{operation}: the communicator of the {made} has been given up by jaxmpi.survive.recover, because a rank "
            f"had died. Make the {made} again, on the communicator that recover has returned."
        )


def resolve(comm: Any, operation: str, name: int = 0) -> Communicator:
    """Return the communicator of a call. `name`: for a new communicator; its ranks compare their calls by this number,
    which is the same on all of them.

    Raises TypeError if `comm` is not an mpi4py communicator, ValueError if it is null, freed or an inter-communicator.
    """
    if comm is None:
        return default()
    if not isinstance(comm, MPI.Comm):
        hint = (
            " It is traced: take it from the enclosing scope instead of passing it."
            if internals.is_tracer(comm)
            else ""
        )
        raise TypeError(
            f"{operation}: comm must be an mpi4py communicator such as MPI.COMM_WORLD, got {comm!r} of type "
            f"{type(comm).__name__}.{hint}"
        )
    if comm == MPI.COMM_NULL:
        raise ValueError(
            f"{operation}: comm is MPI.COMM_NULL: it has been freed, or this rank is not part of it. Pass a live "
            "communicator, and only on its own ranks."
        )
    if isinstance(comm, static.Static):  # MPI may have reused the handle
        if not comm.lifetime.alive():
            raise ValueError(f"{operation}: comm is {comm!r}, which has been freed. Pass a live communicator.")
        return comm.lifetime
    identity = _core.communicator(handle_of(comm))
    if identity is None:
        raise ValueError(
            f"{operation}: comm is an inter-communicator, which is not supported. Merge it first: comm.Merge()."
        )
    known = _known.get(identity[0])
    if known is None:
        if identity[0] in _given_up:
            raise ValueError(
                f"{operation}: comm has been given up by jaxmpi.survive.recover, because a rank had died. Pass the "
                "communicator that recover has returned."
            )
        _forget_freed()
        _core.configure_communicator(identity[0], chunk=_default.chunk(ours=False))
        _agree(identity[0], comm, name)
        if of_mpi := comm.Get_name():
            _core.configure_communicator(identity[0], name=of_mpi)
        timeline.communicator(identity[0], comm, of_mpi)
        known = _known.setdefault(identity[0], Communicator(*identity, comm))
    return known


_PIECE, _LEAST_SHARE = 8 << 20, 256 << 10
"""Bytes of a piece of a long allreduce (`most_at_a_time` in csrc/mpi/collectives.c), and of each rank's share of a
piece. A share must not get too short, because libraries send shares."""


_THREAD = threading.get_ident()


def _agree(number: int, comm: MPI.Comm, name: int = 0) -> None:
    """Let the ranks of a communicator compare the first collectives, and leave collectives to NCCL, if all ranks of
    COMM_WORLD agreed to and these are ranks of COMM_WORLD."""
    if _default.calls == 0 and not _default.nccl:
        return
    if threading.get_ident() != _THREAD:
        _core.configure(several_threads=True)
    ranks = groups.ranks_within(comm, MPI.COMM_WORLD)
    if MPI.UNDEFINED in ranks:
        return
    if _default.nccl and len(ranks) > 1:
        if threading.get_ident() != _THREAD:
            raise RuntimeError(
                "jaxmpi: with JAXMPI_DEVICE_TRANSPORT=nccl only the thread that imported jaxmpi may communicate: two "
                "threads could use NCCL in another order than those of another rank. Set it to auto for programs whose "
                "threads communicate."
            )
        _core.configure_communicator(number, by_nccl=True)
    if _default.calls > 0:
        of_default, of_world = CONSTANTS["NAME_OF_DEFAULT"], CONSTANTS["NAME_OF_WORLD"]
        if not name:
            name = of_world if comm == MPI.COMM_WORLD else of_default if _default.is_it(comm) else 0
        _core.compare(number, _default.calls, name, np.array(ranks, np.int32).tobytes())


def _all_done(requests: list[MPI.Request], deadline: float) -> bool:
    """Wait for requests until the deadline. Return whether all are complete."""
    while not (done := MPI.Request.Testall(requests)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.0005)
    return done


@dataclass(frozen=True)
class _Agreed:
    """What ranks agree on at the import of the package: the largest number of any rank. Defaults: of this rank."""

    chunk: int = DEVICES.chunk
    """The chunk size."""
    everywhere: int = DEVICES.everywhere
    """Whether it holds for all communicators, or only for the default one, all of whose ranks are known to use this
    package: see devices.py."""
    devices: int = len(DEVICES.communicated) > 1
    """Whether a rank has arrays on devices."""
    calls: int = SETTINGS.compared
    """How many calls are compared, unless a rank compares none; ALL counts on all ranks."""
    compares_none: int = SETTINGS.compared == 0
    """Whether a rank compares no calls."""
    job: int = timeline.new_job() if MPI.COMM_WORLD.rank == 0 else 0
    """A number for the job, from rank 0."""
    spares: int = SETTINGS.spares
    """How many ranks are spare."""
    nccl_asked: int = DEVICES.nccl.asked
    """Whether a rank has been asked to use NCCL."""
    nccl_refusal: int = DEVICES.nccl.refusal
    """Why NCCL cannot be used, one of NCCL_REFUSALS."""
    nccl_library: int = DEVICES.nccl.library
    """The largest number of a library and its version."""
    nccl_least: int = -DEVICES.nccl.library
    """The least of these numbers, negative."""


class _Default:
    """The communicator of calls without `comm`: the clone of COMM_WORLD, or of the ranks of it that are not spare.

    Cloning needs all ranks. So it begins at the import of the package, in which all ranks take part. The first call may
    be a message between two ranks. Cloning does not block for ever: if some ranks never import the package, the import
    continues after _PATIENCE_SECONDS, and only a call that needs the default communicator waits.
    """

    def __init__(self) -> None:
        clone, cloning = MPI.COMM_WORLD.Idup()
        self._comm: MPI.Comm = clone
        self.channel, channelling = MPI.COMM_WORLD.Idup()
        """The clone on which ranks compare settings and calls."""
        self._numbers, agreeing = agreement.start_largest(MPI.COMM_WORLD, *dataclasses.astuple(_Agreed()))
        self._requests = [cloning, channelling, agreeing]
        self._resolved: Communicator | None = None
        self._replaced = False
        self._lock = threading.Lock()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        if not (agreed := _all_done(self._requests, deadline)):
            more = " The ranks do not compare their calls, as JAXMPI_CHECK=1 says." if SETTINGS.compared == ALL else ""
            warnings.warn(
                "jaxmpi: not all ranks of COMM_WORLD have imported jaxmpi yet. Calls without comm= wait until "
                f"they do; if they never will, pass a communicator of the ranks that do.{more}",
                RuntimeWarning,
                stacklevel=2,
            )
        self.agreed = agreed
        """Whether all ranks imported the package before this import ended."""
        self._in_vain, self._hearing = agreement.start_largest(MPI.COMM_WORLD, not agreed)
        # Ranks that have waited in vain have announced it before. The others are as far as this one.
        together = agreed and _all_done([self._hearing], math.inf) and not self._in_vain.any()
        self.labels = together and not self._agreed.devices
        """Whether messages may have labels: no rank has arrays on devices, whose messages have no labels."""
        compare = together and (self._agreed.calls == ALL or not self._agreed.compares_none)
        self.calls = self._agreed.calls if compare else 0
        """How many collectives of a communicator its ranks compare, the same on all ranks; ALL: all calls."""
        self.nccl_refusal = self._why_not_nccl(together)
        """Why NCCL carries nothing, the same on all ranks; empty: it does."""
        self.nccl = together and not self.nccl_refusal
        """Whether NCCL carries what it can, on all communicators of ranks of COMM_WORLD."""
        self._stepping_in = threading.Lock()

    @property
    def _agreed(self) -> _Agreed:
        """What the ranks have agreed on, once the requests are complete."""
        return _Agreed(*self._numbers.tolist())

    def _why_not_nccl(self, together: bool) -> str:
        """Return why NCCL carries nothing, and warn on rank 0 if a rank, or this one, has been asked to use it."""
        if together:
            asked, why = bool(self._agreed.nccl_asked), NCCL_REFUSALS[self._agreed.nccl_refusal]
            if not why and self._agreed.nccl_library != -self._agreed.nccl_least:
                why = "the ranks have different versions of the library, or different libraries"
        else:
            asked, why = DEVICES.nccl.asked, "not all ranks have imported jaxmpi in time"
        if why and asked and MPI.COMM_WORLD.rank == 0:
            more = f" ({DEVICES.nccl.why})" if DEVICES.nccl.why else ""
            warnings.warn(
                f"jaxmpi: JAXMPI_DEVICE_TRANSPORT=nccl, but NCCL carries nothing, because {why}{more}. MPI carries all "
                "operations. Leave the variable out to do without NCCL.",
                RuntimeWarning,
                stacklevel=2,
            )
        return why

    def leave_out(self, count: int) -> spares.Pool:
        """Leave the last `count` ranks out of the default communicator: they are spare."""
        MPI.Request.Waitall(self._requests)
        if self._agreed.spares != count:
            raise ValueError(f"jaxmpi: JAXMPI_SPARES={count} on this rank, and {self._agreed.spares} on another one")
        pool = spares.Pool(MPI.Intracomm(self._comm), count)
        self._comm = pool.current
        return pool

    def get(self) -> Communicator:
        if self._resolved is None:
            resolved = resolve(self.mpi(), "the default communicator")
            _core.configure_communicator(resolved.number, chunk=self.chunk(ours=True), name="the default communicator")
            if not self._agreed.devices:  # with arrays on devices, we know nothing about MPI libraries that read these
                piece = max(_PIECE, resolved.size * _LEAST_SHARE)
                _core.configure_communicator(resolved.number, piece=piece)
            timeline.communicator(resolved.number, self._comm, "the default communicator")
            self._resolved = resolved
        return self._resolved

    def chunk(self, ours: bool) -> int:
        """Return the agreed chunk size, on our communicator or on another one.

        Waits for the agreement. It does not wait for other communicators if this rank sets no size: their ranks may
        never import the package.
        """
        with self._lock:
            if ours or DEVICES.everywhere:
                MPI.Request.Waitall(self._requests)
            elif not MPI.Request.Testall(self._requests):
                return 0
        return self._agreed.chunk if ours or self._agreed.everywhere else 0

    def job(self) -> int | None:
        """Return a number that all ranks of this job share, and no other job has; None if not all ranks have
        answered yet."""
        with self._lock:
            known = not MPI.Is_finalized() and MPI.Request.Testall(self._requests)
        return self._agreed.job if known else None

    def is_it(self, comm: MPI.Comm) -> bool:
        return comm == self._comm

    def mpi(self) -> MPI.Comm:
        with self._lock:
            MPI.Request.Waitall(self._requests)
            if self._resolved is None and not self._replaced and self._comm != MPI.COMM_NULL:
                _core.communicator(handle_of(self._comm), stable_key("default"))
        self._step_in()
        return self._comm

    def _step_in(self) -> None:
        """Wait, on a spare rank, until a default communicator includes this rank."""
        with self._stepping_in:
            if self._comm == MPI.COMM_NULL and _pool is not None:
                repaired, name = _pool.wait()
                resolve(repaired, "the default communicator", name)
                self.replace(repaired)

    def replace(self, comm: Any) -> None:
        self._comm, self._replaced, self._resolved = comm, True, None

    def forget(self) -> None:
        """Make the next call ask the core again."""
        self._lock = threading.Lock()
        self._resolved = None


def _in_child_of_fork() -> None:
    """Make all calls ask the core again, which refuses them: JAX's threads do not exist in a child of fork."""
    _default.forget()
    for comm in _known.values():
        comm.programs = None


def refuse_in_child_of_fork() -> None:
    """Raise RuntimeError if this process has been forked by a rank, or if MPI has been finalized."""
    _core.communicator(handle_of(MPI.COMM_SELF))


_default: _Default
_pool: spares.Pool | None = None
"""The ranks of a job with spare ranks; None if no rank is spare."""
CHECK: bool
"""Whether ranks compare all calls (JAXMPI_CHECK=1), on all ranks alike. Known once they have agreed."""


def agree() -> None:
    """Agree on settings with the other ranks, and begin to clone COMM_WORLD. All ranks call this, at import. Open this
    rank's timeline, whose file is named after the agreed number of the job."""
    global _default, _pool, CHECK
    _check_spares()
    try:
        _default = _Default()
        if SETTINGS.spares:
            _pool = _default.leave_out(SETTINGS.spares)
    except MPI.Exception as error:
        if not FAILURES["failed"]:
            raise
        raise RuntimeError(
            "jaxmpi: a rank has died before all had imported jaxmpi, so the job cannot go on without it"
        ) from error
    CHECK = _default.calls == ALL
    channel = handle_of(_default.channel) if _default.calls else 0
    _core.configure(check=CHECK, labels=_default.labels, channel=channel)
    os.register_at_fork(after_in_child=_in_child_of_fork)
    timeline.begin(LIBRARY.version, _default.job())


def _check_spares() -> None:
    """Raise RuntimeError or ValueError if there can be no spare ranks, or not that many."""
    if SETTINGS.spares and not FAILURES["failed"]:
        raise RuntimeError(
            f"jaxmpi: JAXMPI_SPARES={SETTINGS.spares}: only a job that goes on after a death has spare ranks. Start it "
            "by python -m jaxmpi.run --survive --spare N, with Open MPI 5 or later, or unset the variable"
        )
    if SETTINGS.spares >= MPI.COMM_WORLD.size:
        raise ValueError(f"jaxmpi: JAXMPI_SPARES={SETTINGS.spares}: of {MPI.COMM_WORLD.size} ranks fewer must be spare")


def know() -> None:
    """Register the communicators that every run has, if ranks have agreed: a program of an earlier run may use them
    before this run traces anything."""
    if _default.agreed:
        for comm in (None, MPI.COMM_WORLD, MPI.COMM_SELF):
            if comm is not None or not is_spare():
                resolve(comm, "import")


def default() -> Communicator:
    """Return the communicator of calls without `comm`: one clone of COMM_WORLD."""
    return _default.get()


def nccl_refusal() -> str:
    """Return why NCCL carries nothing; empty: it carries what it can."""
    return _default.nccl_refusal


def replace_default(comm: MPI.Comm) -> None:
    _default.replace(comm)


def is_default(comm: MPI.Comm) -> bool:
    return _default.is_it(comm)


def repair(comm: MPI.Comm) -> tuple[MPI.Comm, int]:
    """Return a communicator without the dead ranks, and a name for it. All living ranks of `comm` call it, after a
    death. In the default communicator of a job with spare ranks, spare ranks take the numbers of the dead."""
    if _pool is not None and _pool.current == comm:
        return _pool.repair()
    repaired = spares.repair(MPI.Intracomm(comm), comm.rank, comm.size)
    return repaired.repaired, repaired.name


def is_spare() -> bool:
    """Return whether this rank is spare: it waits to take the number of another one."""
    return _pool is not None and _pool.current == MPI.COMM_NULL


def has_spares(comm: MPI.Comm) -> bool:
    return _pool is not None and _pool.meets(comm)


def has_stepped_in() -> bool:
    """Return whether this rank has been spare, and is not any more."""
    return _pool is not None and _pool.stepped_in


def end() -> None:
    """End the spare ranks, too. All ranks call this at the end of the program."""
    if _pool is not None and not MPI.Is_finalized():
        _pool.end()


def default_mpi() -> MPI.Comm:
    """Return the communicator of calls without `comm`, as an mpi4py communicator."""
    return _default.mpi()

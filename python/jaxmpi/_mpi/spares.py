"""How a communicator is repaired after a death, and spare ranks, which take the numbers of those that have died.

All that live of a communicator tell each other their ranks, make the next communicator, and agree that all of them have
it; if more of them die meanwhile, again. In a job with spares the ranks of the default communicator and the spares do
so together, on a communicator of their own, the pool. Nothing else is done there, and its revocation says that a repair
has begun. A spare waits for that by asking now and then, which keeps no core busy. The revocation of another
communicator, on which nothing else is done either, tells it that the program is over.
"""

import contextlib
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

import jaxmpi._core as _core
from jaxmpi._mpi import failures, groups, private_comms

_PAUSE_SECONDS = 0.02
_SPARE, _OVER = -1, -2
"""The numbers of ranks that have none: spare ones, and those of them whose program has ended."""


@dataclass(frozen=True)
class Repair:
    """What all that live of a communicator have agreed on."""

    comm: MPI.Intracomm
    """The communicator of all of them."""
    members: list[int]
    """The ranks of `comm` that are in the repaired one, in their order there."""
    repaired: MPI.Comm
    """The repaired communicator; COMM_NULL on a spare."""
    name: int
    """A number that all of them have, and no other repair."""


def repair(comm: MPI.Intracomm, number: int, size: int, *, pool: bool = False) -> Repair:
    """Called by all that live of `comm`, and returns the same on all of them, whoever dies meanwhile.

    `number`: the rank of this one in what is repaired, which had `size` ranks. The first spare takes the first number
    whose rank has died, and so on. Numbers for which there is no spare are left out. `pool`: what is repaired is not
    `comm` itself, but another communicator.
    """
    while True:
        comm, found = MPI.Intracomm(comm.Shrink()), None
        if not private_comms.agree(comm, True):  # all have it: only then may it be revoked, see private_comms.py
            continue
        with contextlib.suppress(MPI.Exception):
            found = _try(comm, number, size, pool)
        if private_comms.agree(comm, found is not None):
            assert found is not None
            return found


def _try(comm: MPI.Intracomm, number: int, size: int, pool: bool) -> Repair:
    """Raise MPI.Exception if a rank has died since."""
    told = np.zeros(1 + comm.size, np.int64)
    if comm.rank == 0:
        told[0] = 1 + secrets.randbits(61)
    told[1 + comm.rank] = number
    with failures.confirmed(comm):
        comm.Allreduce(MPI.IN_PLACE, told, MPI.SUM)
    members = _members([int(its) for its in told[1:]], size)
    return Repair(comm, members, _of_members(comm, members) if pool else comm, int(told[0]))


def _of_members(comm: MPI.Intracomm, members: Sequence[int]) -> MPI.Comm:
    """Return a communicator of these ranks; COMM_NULL on all others, which call it too."""
    group = comm.Get_group()
    wanted = group.Incl(members)
    made = comm.Create(wanted)
    wanted.Free()
    group.Free()
    return made


def _members(numbers: Sequence[int], size: int) -> list[int]:
    """Return the ranks that have the numbers below `size`, in the order of these; nobody, if none has one. `numbers`:
    that of each rank."""
    having = {number: rank for rank, number in enumerate(numbers) if number >= 0}
    spares = (rank for rank, number in enumerate(numbers) if number == _SPARE)
    found = (having[number] if number in having else next(spares, None) for number in range(size))
    return [rank for rank in found if rank is not None] if having else []


class Pool:
    """The ranks of a job with spares.

    `comm`: of all of them; the last `count` are spare. All of them make it together.
    """

    def __init__(self, comm: MPI.Intracomm, count: int) -> None:
        self._comm, self._ends = comm, comm.Dup()
        self._members = list(range(comm.size - count))
        self.current = _of_members(comm, self._members)
        """The communicator of those that are not spare; COMM_NULL on those that are."""
        self.stepped_in = False
        """Whether this rank has been spare, and is not any more."""
        self._spare_as = _SPARE
        comm.Agree(1)  # all have both: see private_comms.py
        if self.current == MPI.COMM_NULL:
            _core.tell_launcher("spare", "")

    def meets(self, comm: MPI.Comm) -> bool:
        """Return whether ranks of a communicator wait here."""
        waiting = set(range(self._comm.size)) - set(self._members) - set(failures.dead(self._comm))
        return not waiting.isdisjoint(groups.ranks_within(comm, self._comm))

    def repair(self) -> tuple[MPI.Comm, int]:
        """Called by all ranks of `current` that live, after a death: the next one, and a name for it."""
        private_comms.revoke(self._comm)
        with contextlib.suppress(MPI.Exception):  # a rank that still agrees on `current` hears that others have left it
            self.current.Shrink().Free()
        return self._repair()

    def _repair(self) -> tuple[MPI.Comm, int]:
        number = self._spare_as if self.current == MPI.COMM_NULL else self.current.rank
        its = repair(self._comm, number, len(self._members), pool=True)
        self._comm, self._members, self.current = its.comm, its.members, its.repaired
        return its.repaired, its.name

    def wait(self) -> tuple[MPI.Comm, int]:
        """Called by a spare: waits until it has the number of a rank that has died. Raise SystemExit if the program is
        over, or all others have died."""
        while True:
            MPI.COMM_SELF.Iprobe()  # MPI takes in what has come
            if self._ends.Is_revoked() or set(self._members) <= set(failures.dead(self._comm)):
                raise SystemExit(0)
            if not self._comm.Is_revoked():
                time.sleep(_PAUSE_SECONDS)
                continue
            repaired, name = self._repair()
            if repaired != MPI.COMM_NULL:
                self.stepped_in = True
                rank, number = MPI.COMM_WORLD.Get_rank(), repaired.Get_rank()
                if not _core.tell_launcher("spare", str(number)):
                    text = f"jaxmpi: rank {rank}, which was spare, is rank {number} of the default communicator"
                    print(text, file=sys.stderr)
                return repaired, name

    def end(self) -> None:
        """Called by each rank at the end of its program: once all that are not spare have done so the spares end."""
        if self.current == MPI.COMM_NULL:
            self._spare_as = _OVER
            with contextlib.suppress(SystemExit):
                self.wait()  # others need it in their repairs
            return
        with contextlib.suppress(MPI.Exception):  # a rank has died since the last operation
            self.current.Agree(1)
        with contextlib.suppress(MPI.Exception):
            self._ends.Revoke()

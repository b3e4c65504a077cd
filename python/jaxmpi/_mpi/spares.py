"""How a communicator is repaired after a death, and spare ranks, which take the numbers of dead ranks.

All living ranks of a communicator exchange their ranks, make the next communicator, and agree that all of them have it.
If more ranks die meanwhile, they start again. In a job with spares, the ranks of the default communicator and the
spares do this together, on a communicator of their own, the pool. Nothing else is done there: a revocation means that a
repair has begun. A spare polls for the revocation now and then, which keeps no core busy. It polls another
communicator, too, on which nothing else is done: a revocation of that one means that the program is over.
"""

import contextlib
import functools
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from mpi4py import MPI

import jaxmpi._core as _core
from jaxmpi._mpi import agreement, failures, groups, private_comms

_PAUSE_SECONDS = 0.02
_SPARE, _OVER = -1, -2
"""The numbers of ranks without a number: spare ranks, and spare ranks whose program has ended."""


@dataclass(frozen=True)
class Repair:
    """The result of a repair, on which all living ranks have agreed."""

    comm: MPI.Intracomm
    """The communicator of all living ranks."""
    members: list[int]
    """The ranks of `comm` that are in the repaired one, in their order there."""
    repaired: MPI.Comm
    """The repaired communicator; COMM_NULL on a spare."""
    name: int
    """A number that all of them share, and no other repair has."""


def repair(comm: MPI.Intracomm, number: int, size: int, *, pool: bool = False) -> Repair:
    """Repair a communicator. All living ranks of `comm` call this; it returns the same on all, whoever dies meanwhile.

    `number`: the rank of this process in the communicator to repair, which had `size` ranks. The first spare takes the
    number of the first dead rank, and so on. Numbers without a spare are left out. `pool`: the communicator to repair
    is not `comm` itself.
    """
    while True:
        comm = MPI.Intracomm(comm.Shrink())
        if not private_comms.agree(comm, True):  # only when all ranks have it may it be revoked: private_comms.py
            continue
        repaired = private_comms.on_all_living(comm, functools.partial(_try, comm, number, size, pool))
        if repaired is not None:
            return repaired


def _try(comm: MPI.Intracomm, number: int, size: int, pool: bool) -> Repair:
    """Try to repair. Raise MPI.Exception if a rank has died since."""
    numbers, names = zip(*agreement.gather_objects(comm, (number, 1 + secrets.randbits(61))), strict=True)
    members = _members(numbers, size)
    return Repair(comm, members, _of_members(comm, members) if pool else comm, names[0])


def _of_members(comm: MPI.Intracomm, members: Sequence[int]) -> MPI.Comm:
    """Return a communicator of these ranks; COMM_NULL on all others, which call this, too."""
    group = comm.Get_group()
    wanted = group.Incl(members)
    created = comm.Create(wanted)
    wanted.Free()
    group.Free()
    return created


def _members(numbers: Sequence[int], size: int) -> list[int]:
    """Return the ranks that have the numbers below `size`, in the order of the numbers; none, if no rank has a number.
    `numbers`: the number of each rank."""
    having = {number: rank for rank, number in enumerate(numbers) if number >= 0}
    spares = (rank for rank, number in enumerate(numbers) if number == _SPARE)
    ranks = (having[number] if number in having else next(spares, None) for number in range(size))
    return [rank for rank in ranks if rank is not None] if having else []


class Pool:
    """The ranks of a job with spares.

    `comm` has all of them; the last `count` are spare. All of them make it together.
    """

    def __init__(self, comm: MPI.Intracomm, count: int) -> None:
        self._comm, self._ends = comm, comm.Dup()
        self._members = list(range(comm.size - count))
        self.current = _of_members(comm, self._members)
        """The communicator of the ranks that are not spare; COMM_NULL on spare ranks."""
        self.stepped_in = False
        """Whether this rank has been spare, and is not any more."""
        self._spare_as = _SPARE
        comm.Agree(1)  # all ranks have both: see private_comms.py
        if self.current == MPI.COMM_NULL:
            _core.write_job_file("spare", "")

    def meets(self, comm: MPI.Comm) -> bool:
        """Return whether ranks of a communicator wait here."""
        waiting = set(range(self._comm.size)) - set(self._members) - set(failures.dead(self._comm))
        return not waiting.isdisjoint(groups.ranks_within(comm, self._comm))

    def repair(self) -> tuple[MPI.Comm, int]:
        """Return the next communicator, and a name for it. All living ranks of `current` call this after a death."""
        private_comms.revoke(self._comm)
        with contextlib.suppress(MPI.Exception):  # a rank that still agrees on `current` learns that others have left
            self.current.Shrink().Free()
        return self._repair()

    def _repair(self) -> tuple[MPI.Comm, int]:
        number = self._spare_as if self.current == MPI.COMM_NULL else self.current.rank
        repaired = repair(self._comm, number, len(self._members), pool=True)
        self._comm, self._members, self.current = repaired.comm, repaired.members, repaired.repaired
        return repaired.repaired, repaired.name

    def wait(self) -> tuple[MPI.Comm, int]:
        """Wait until this spare has the number of a dead rank. Raise SystemExit if the program is over, or all others
        have died."""
        while True:
            MPI.COMM_SELF.Iprobe()  # lets MPI make progress
            if self._ends.Is_revoked() or set(self._members) <= set(failures.dead(self._comm)):
                raise SystemExit(0)
            if not self._comm.Is_revoked():
                time.sleep(_PAUSE_SECONDS)
                continue
            repaired, name = self._repair()
            if repaired != MPI.COMM_NULL:
                self.stepped_in = True
                rank, number = MPI.COMM_WORLD.Get_rank(), repaired.Get_rank()
                if not _core.write_job_file("spare", str(number)):
                    text = f"jaxmpi: rank {rank}, which was spare, is rank {number} of the default communicator"
                    print(text, file=sys.stderr)
                return repaired, name

    def end(self) -> None:
        """End this rank's part, at the end of the program. Spares end when all other ranks have called this."""
        if self.current == MPI.COMM_NULL:
            self._spare_as = _OVER
            with contextlib.suppress(SystemExit):
                self.wait()  # others need this rank in their repairs
            return
        with contextlib.suppress(MPI.Exception):  # a rank has died since the last operation
            self.current.Agree(1)
        with contextlib.suppress(MPI.Exception):
            self._ends.Revoke()

"""Ranks of one communicator as ranks of another."""

from mpi4py import MPI


def ranks_within(comm: MPI.Comm, other: MPI.Comm) -> list[int]:
    """Return what each rank of `comm` is in `other`; MPI.UNDEFINED where it is not part of that. Nothing is
    communicated."""
    ours, others = comm.Get_group(), other.Get_group()
    ranks = MPI.Group.Translate_ranks(ours, None, others)
    for group in (ours, others):
        group.Free()
    return ranks

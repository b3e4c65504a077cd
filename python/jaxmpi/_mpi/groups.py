"""Ranks of one communicator as ranks of another."""

from mpi4py import MPI


def ranks_within(comm: MPI.Comm, other: MPI.Comm) -> list[int]:
    """Return the number in `other` of each rank of `comm`; MPI.UNDEFINED where it has none. Nothing is communicated."""
    ours, others = comm.Get_group(), other.Get_group()
    ranks = MPI.Group.Translate_ranks(ours, None, others)
    for group in (ours, others):
        group.Free()
    return ranks

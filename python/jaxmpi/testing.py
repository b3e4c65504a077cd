"""Tests of programs that communicate: whether a gradient is that of the one function of all ranks."""

from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from jaxmpi._testing import checking
from jaxmpi._testing.problem import Problem
from jaxmpi._testing.together import Ranks

__all__ = ["check_grads"]


def check_grads(
    f: Callable[..., Any],
    args: Sequence[Any],
    *,
    invariant: int | str | Sequence[int | str] = (),
    invariant_out: Any = True,
    gradient: Callable[..., Any] | None = None,
    modes: Sequence[str] = ("fwd", "rev"),
    comm: MPI.Comm | None = None,
    atol: float | None = None,
    rtol: float | None = None,
    eps: float | None = None,
) -> None:
    """TODO"""
    if not set(modes) <= {"fwd", "rev"} or not modes:
        raise ValueError(f"check_grads: modes must be some of 'fwd' and 'rev', got {modes!r}.")
    forward, reverse = "fwd" in modes, "rev" in modes
    ranks = Ranks(comm, "check_grads")
    problem = ranks.together("take its arguments", lambda: Problem(f, args, invariant, invariant_out))
    problem.compare(ranks)
    traced = checking.traced(problem, ranks, forward, reverse and gradient is None)
    check = checking.Check(checking.evaluated(problem, ranks), forward, rtol, atol, eps)
    check.one_function()
    if forward:
        check.forward()
    if reverse and gradient is not None:
        check.gradient(gradient)
    elif reverse:
        check.reverse(traced)

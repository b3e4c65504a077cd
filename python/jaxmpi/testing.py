"""Tests of programs that communicate: is a gradient that of the one function of all ranks? docs/gradients.md has the
usual mistakes."""

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
    """Checks the derivatives of a function of all ranks, as `jax.test_util.check_grads` does those of one process.

    All ranks call it. They compare reverse mode with forward mode, and that with central differences, in a random
    direction of each array among `args`. The function is one, of the arrays of all ranks. Forward mode needs no
    `replicate` and no `invariant`, reverse mode depends on them: so if one is missing, or one too many, the two differ,
    on two ranks or more whose data differ. The error names the arguments whose derivatives differ, and by which factor
    if by a simple one. What takes longer than ten seconds is said on rank 0's stderr.

    Args:
      f: a function of arrays and pytrees, jitted or not, called as `f(*args)`. It is called about a dozen times, and
        differentiated once in reverse mode and once for each array in forward mode.
      args: a tuple of its arguments. The derivatives are with respect to all their floating-point and complex arrays;
        others are constants.
      invariant: positions or names of the arguments that are the same on all ranks, such as parameters of a model. Each
        is one variable. The arrays of other arguments are varying: each rank's is a variable of its own.
      invariant_out: whether the results are the same on all ranks, as a loss is: True, False, or a pytree of these that
        is a prefix of what `f` returns. The function that is checked is the sum of all results with random weights,
        one weight on all ranks for what is invariant, which counts once; a single real number has weight 1.
      gradient: a function that computes the gradient, if that is not reverse mode of `f`: called as `gradient(*args)`,
        returns a tuple with a pytree like each of `args`. Then `f` must return one real number.
      modes: "fwd", "rev" or both. Without "fwd", for functions that have no forward mode, reverse mode is compared
        with differences; they must be precise enough.
      comm: an intra-communicator, whose ranks all call it; a clone of COMM_WORLD where it is None.
      atol: what derivatives may be apart: ten times the rounding of the largest if it is None, and that of the result.
      rtol: the same, relative to the derivative: 1e-7 for float64, 1e-3 for float32, 0.03 for float16, 0.1 for
        bfloat16, by the least precise array among arguments and results.
      eps: the longest of several steps of differences, relative to the size of an array. The limit is extrapolated, and
        believed no further than the steps agree. 0.01 for float64, 0.05 for float32, 0.25 for shorter dtypes if it is
        None.

    Returns:
      Nothing.

    Raises:
      AssertionError: derivatives differ; or what must be the same on all ranks is not, such as the loss; or `f` is not
        finite, or has a kink at `args`; or differences are all there is, and too imprecise. On all ranks alike.
      ValueError, TypeError: wrong arguments, an invariant one that differs between ranks among them. On all ranks.
      Exception: what `f` raises on this rank. If that is while tracing, which comes first, the other ranks raise a
        RuntimeError that names this one; later they may wait for it, as in any other call of `f`.
    """
    if isinstance(modes, str) or not modes or not set(modes) <= {"fwd", "rev"}:
        raise ValueError(f"check_grads: modes must be a sequence of 'fwd' and 'rev', got {modes!r}.")
    forward, reverse = "fwd" in modes, "rev" in modes
    ranks = Ranks(comm, "check_grads")
    problem = ranks.together("take its arguments", lambda: Problem(f, args, invariant, invariant_out))
    problem.compare(ranks)
    function = checking.differentiable(problem, ranks, forward, reverse and gradient is None)
    check = checking.Check(checking.evaluated(problem, ranks), forward, rtol, atol, eps)
    check.one_function()
    if forward:
        check.forward()
    if reverse and gradient is not None:
        check.gradient(gradient)
    elif reverse:
        check.reverse(function)

"""Tests for programs that communicate: is a gradient the gradient of the one function of all ranks?

docs/gradients.md lists the usual mistakes.
"""

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
    """Check the derivatives of a function of all ranks, as `jax.test_util.check_grads` does for one process.

    All ranks call it. They compare reverse mode with forward mode, and forward mode with central differences, in a
    random direction of each array among `args`. The arrays of all ranks together are the arguments of one function.
    Forward mode needs no `replicate` and no `invariant`, but reverse mode depends on them. If one is missing or one is
    too many, the two modes differ, on two or more ranks whose data differ. The error names the arguments whose
    derivatives differ, and the factor between them if it is a simple one.

    Args:
      f: a function of arrays and pytrees, jitted or not, called as `f(*args)`. It is called about a dozen times, and
        differentiated once in reverse mode and once for each array in forward mode.
      args: a tuple of the arguments of `f`. The derivatives are with respect to all floating-point and complex arrays
        in it. Other arguments are constants.
      invariant: positions or names of the arguments that are the same on all ranks, for example the parameters of a
        model. Each of these is one variable. The arrays of other arguments are varying: the array of each rank is a
        variable of its own.
      invariant_out: whether the results are the same on all ranks, as a loss is: True, False, or a pytree of these that
        is a prefix of the result of `f`. The function that is checked is the sum of all results with random weights.
        An invariant result counts once, with one weight on all ranks. A single real number has weight 1.
      gradient: a function that computes the gradient, if reverse mode of `f` does not: called as `gradient(*args)`,
        returns a tuple with a pytree like each of `args`. Then `f` must return one real number.
      modes: "fwd", "rev" or both. Leave out "fwd" for functions that have no forward mode. Reverse mode is then
        compared with differences, which must be precise enough.
      comm: an intra-communicator. All ranks of it call this. None: a clone of COMM_WORLD.
      atol: the absolute difference that is allowed between derivatives. None: ten times the rounding of the largest
        derivative, plus the rounding of the result.
      rtol: the same, relative to the derivative: 1e-7 for float64, 1e-3 for float32, 0.03 for float16, 0.1 for
        bfloat16, by the least precise array among arguments and results.
      eps: the longest of several steps of the differences, relative to the size of an array. Their limit is
        extrapolated, and trusted only as far as the steps agree. None: 0.01 for float64, 0.05 for float32, 0.25 for
        shorter dtypes.

    Returns:
      Nothing.

    Raises:
      AssertionError: on all ranks. Derivatives differ, or something that must be the same on all ranks differs, for
        example the loss. Or `f` is not finite, or has a kink at `args`. Or there are only differences to compare with,
        and they are too imprecise.
      ValueError, TypeError: wrong arguments, or an invariant argument that differs between ranks. On all ranks.
      Exception: the error that `f` raises on this rank. If `f` raises while it is traced, which comes first, the other
        ranks raise a RuntimeError that names this one. Later they may wait for it, as in any other call of `f`.
    """
    if isinstance(modes, str) or not modes or not set(modes) <= {"fwd", "rev"}:
        raise ValueError(f"check_grads: modes must be a sequence of 'fwd' and 'rev', got {modes!r}.")
    forward, reverse = "fwd" in modes, "rev" in modes
    ranks = Ranks(comm, "check_grads")
    problem = ranks.together("take the arguments", lambda: Problem(f, args, invariant, invariant_out))
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

"""Identities whose transposes communicate: casts between values that are the same on all ranks and values that vary."""

from typing import Any

from mpi4py import MPI

from jaxmpi._mpi import communicators
from jaxmpi._operations.collectives import check_same
from jaxmpi._operations.common import CHECK, SUM, Arrays, Collective, common
from jaxmpi._operations.reductions import allreduce_p
from jaxmpi._primitive import arguments
from jaxmpi._primitive.params import COTANGENT, Common, Reducing


class Identity(Collective[Common]):
    """The identity; only the transpose communicates."""

    identity = True


class Replicate(Identity):
    def transpose(self, cotangents: Arrays, operands: Arrays, params: Common) -> list[Any]:
        return self.adjoint.apply_to_all(Reducing(params.comm, SUM, derivative=COTANGENT), cotangents)


replicate_p = Replicate("replicate", adjoint=allreduce_p)


def replicate(x: Any, *, comm: MPI.Comm | None = None) -> Any:
    """Return `x` itself; its cotangents are summed over all ranks. For values that are the same on all ranks.

    The partner of `allreduce`. Suppose that each rank uses a replicated parameter differently (with the rank's own
    data), and that the loss is made by `allreduce` of a sum. Then each rank's gradient is the gradient of the whole
    loss only if the parameter passes through `replicate` first. Identity forwards, allreduce of a sum backwards. All
    ranks must call it, in the same order as other operations.

    Args:
      x: array of any shape, or a pytree of arrays; the same on all ranks, which is not checked.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Returns:
      `x`, as arrays.

    Raises:
      TypeError, ValueError: an argument is of the wrong type, or a communicator has been freed; while tracing.
    """
    return replicate_p.apply_to_tree(common(communicators.resolve(comm, "replicate")), x, arguments.array)


class Invariant(Identity):
    """The cotangent of an invariant value is whole on each rank; the cotangent of a varying value is a share.

    `varying` marks the quotient as a share of this kind, so that the transpose of the division is the identity again.
    """

    def transpose(self, cotangents: Arrays, operands: Arrays, params: Common) -> list[Any]:
        shares = [ct / params.comm.size for ct in cotangents]
        return self.adjoint.apply_to_all(Common(params.comm, derivative=COTANGENT), shares)


invariant_p = Invariant("invariant")


class Varying(Identity):
    def transpose(self, cotangents: Arrays, operands: Arrays, params: Common) -> list[Any]:
        whole = self.adjoint.apply_to_all(Common(params.comm, derivative=COTANGENT), cotangents)
        return [ct * params.comm.size for ct in whole]


varying_p = Varying("varying", adjoint=invariant_p)


def invariant(x: Any, *, comm: MPI.Comm | None = None) -> Any:
    """Return `x` itself; its cotangents are divided by the number of ranks. For values that are the same on all ranks.

    The partner of `replicate`. If `allgather` or `bcast` has sent the same values to all ranks, and all ranks compute
    the same loss from them, the gradient is the gradient of the sum of all losses: N times too large. It is the
    gradient of one loss if the values pass through `invariant` first. Identity forwards, division backwards. The result
    of `allreduce` of a sum is invariant already. Communicates nothing, but in a differentiated function all ranks must
    call it, as they call other operations.

    Args:
      x: array of any shape, or a pytree of arrays; the same on all ranks, and used in the same way on all of them from
        here on. The values are compared only with `JAXMPI_CHECK=1`, at the cost of a `bcast` for each array and of the
        derivative of that. Integers and truth values have no cotangents.
      comm: an intra-communicator, whose size is the divisor; a clone of COMM_WORLD where it is None.

    Returns:
      `x`, as arrays of the same shapes and dtypes.

    Raises:
      As `replicate`.
      jax.errors.JaxRuntimeError: at run time, with `JAXMPI_CHECK=1`, on each rank whose values differ from the values
      of rank 0 by more than rounding; it names the line. Other ranks continue until they wait for a rank that raised.
    """
    params = common(communicators.resolve(comm, "invariant"))
    if CHECK:
        text = arguments.with_calling_line(
            "a value given to invariant differs from that of rank 0, though it must be the same on all ranks: "
            "gradients would be wrong. The invariant is at"
        )
        check_same(arguments.leaves(x, "invariant", "x")[0], None, params.comm, text)
    return invariant_p.apply_to_tree(params, x, arguments.array)

"""The envelope of a message: ranks and tags, each an integer while tracing, or traced and known at run time.

Among the parameters a traced rank or tag is TRACED. The value is one more operand, in the order of the names; the core
reads it on the host (`ends` in csrc/core/ops.def).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxmpi._jax import internals
from jaxmpi._mpi.library import CONSTANTS
from jaxmpi._mpi.tags import TRACED

_MOST = 2**31 - 1
ANY_OF_SEVERAL: int = CONSTANTS["ANY_OF_SEVERAL"]
TOO_LARGE: int = CONSTANTS["TOO_LARGE"]
"""Numbers that the core rejects as ranks and tags: in the place of ANY_SOURCE for messages that must have one source,
and of a value that does not fit in 32 bits."""


def at_run_time(value: Any, operation: str, argument: str) -> jax.Array | None:
    """Return a rank or tag that is traced, as the core reads it; None if it is not."""
    if not internals.is_tracer(value):
        return None
    if value.shape != () or not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(
            f"{operation}: {argument} must be an integer, got a traced value of dtype {value.dtype} and shape "
            f"{value.shape}."
        )
    if value.dtype.itemsize < 4 or value.dtype == jnp.int32:  # anything but a step of its own in the program
        return value.astype(jnp.int32)
    holds = value <= jnp.asarray(_MOST, value.dtype)
    if jnp.issubdtype(value.dtype, jnp.signedinteger):
        holds &= value > jnp.asarray(TOO_LARGE, value.dtype)
    return jnp.where(holds, value.astype(jnp.int32), jnp.int32(TOO_LARGE))


def split(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[jax.Array]]:
    """Return the parameters, and the operands for the ranks and tags that are known at run time."""
    traced = [values[name] for name in sorted(values) if not isinstance(values[name], int)]
    params = {name: value if isinstance(value, int) else TRACED for name, value in values.items()}
    return params, traced


def join(params: Any, operands: Any, *names: str) -> dict[str, Any]:
    """Return the ranks and tags with these names, from the parameters and the operands."""
    values = {name: getattr(params, name) for name in names}
    traced = [name for name in sorted(names) if values[name] == TRACED]
    return {**values, **{name: operands[i] for i, name in enumerate(traced)}}

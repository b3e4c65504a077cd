"""The primitives of JAX that the package knows, and what jaxprs are made of.

`jax.extend.core` has them too, but imports all of `jax.extend` and Pallas, which takes a third of the time of the
import of this package.
"""

from jax._src import core, custom_derivatives, pjit
from jax.lax import cond_p as cond_p
from jax.lax import linear_solve_p as linear_solve_p
from jax.lax import scan_p as scan_p
from jax.lax import while_p as while_p

Literal = core.Literal
Primitive = core.Primitive
call_p = core.call_p
closed_call_p = core.closed_call_p
custom_jvp_call_p = custom_derivatives.custom_jvp_call_p
custom_vjp_call_p = custom_derivatives.custom_vjp_call_p
jit_p = getattr(pjit, "jit_p", None) or getattr(pjit, "pjit_p")  # noqa: B009 (the name in JAX 0.6)

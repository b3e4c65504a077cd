"""Loops inside of compiled programs."""

import jax
import jax.numpy as jnp

import jaxmpi


def repeated(step, times):
    """Return a function that does a step so many times, in a loop."""
    return lambda x: jax.lax.fori_loop(0, times, lambda _, x: step(x), x)


def looped(step, times, *constants, jit=jaxmpi.jit):
    """Return x -> the result of so many steps, `step(x, once, *constants)`, in one compiled program.

    x is donated, so that new memory for the result is not part of the time. `once` is 1: see `multiply`.
    """

    def run(x, once, *constants):
        return repeated(lambda x: step(x, once, *constants), times)(x)

    compiled, given = jit(run, donate_argnums=0), [jnp.asarray(values) for values in constants]
    return lambda x: jax.block_until_ready(compiled(x, 1, *given))


def multiply(x, at, factor, once):
    """Return x with x[at] multiplied, in place, inside of a compiled function. `once` is an argument of that function.

    XLA for CPUs fuses reading, multiplying and writing, and executes that as a loop over all of x, which can take
    longer than what is measured, and leaves none of it in the cache. Over a loop of unknown length it does not fuse.
    """
    changed = jax.lax.fori_loop(0, once, lambda _, rows: rows * factor, x[at])
    return x.at[at].set(changed)

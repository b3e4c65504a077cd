"""A small change of a large array, which counts as what it is in a benchmark."""

import jax


def multiply(x, at, factor, once):
    """x with x[at] multiplied, in place, inside of a compiled function. `once` is 1, as an argument of that function.

    XLA for CPUs fuses reading, multiplying and writing, and executes that as a loop over all of x, which can take
    longer than what is measured, and leaves none of it in the cache. Over a loop of unknown length it does not fuse.
    """
    changed = jax.lax.fori_loop(0, once, lambda _, rows: rows * factor, x[at])
    return x.at[at].set(changed)

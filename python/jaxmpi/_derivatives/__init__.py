"""Makes JAX's differentiation include communication on every rank.

A derivative is communication, so all ranks must take part, also a rank on which an operation's operand depends on
nothing that is differentiated, or on which nothing depends on its result. JAX leaves such operations out of
derivatives. This package changes that at the few places of JAX through which every primitive passes, future ones
included:

1. A trace that differentiates records the values that it was started with. Whatever communicates gets an operand whose
   tangent is linear in all of them, so it is differentiated on every rank, and in the same pass on all of them.
2. A function with a derivative rule (`jax.custom_jvp`, `jax.custom_vjp`) that communicates gets such operands, so that
   its rule is called on every rank.
3. Where JAX divides a computation into a known and an unknown part, no equation that communicates is dropped.
4. Where JAX transposes, every cotangent depends on all cotangents that the transposition was started with.
5. Where JAX hoists loop-invariant computations, and where it transposes a function, nothing that communicates counts as
   known because its operands are.

`vmap` maps what depends on the mapped values, and ranks must map alike. A derivative may depend on them on one rank
only, so the dependences of 1. and 4., and what is communicated with them, are mapped by every `vmap` around them. If a
derivative is differentiated further they are mapped by every `vmap` except that of `jacfwd`, which maps tangents alone
(`inputs.make_value_depend`).

The higher-order primitives, which JAX differentiates by a rule for the computation inside, are in
`higher_order._HIGHER_ORDER`, with what the rule needs; anything else that communicates inside is refused. `_contract`
tests all these assumptions about JAX before the first derivative.
"""

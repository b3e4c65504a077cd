"""What JAX's differentiation is told of communication: where, and with what.

A derivative is communication, so all ranks must take part, also one on which an operation's operand depends on nothing
that is differentiated, or whose result nothing depends on. JAX leaves such operations out of derivatives. It is told
otherwise at the few places through which every primitive passes, also one that is not invented yet:

1. A trace that differentiates remembers the values that it was started with. What communicates gets an operand whose
   tangent is linear in all of them: so it is differentiated on every rank, and everywhere in the same pass.
2. A function with a derivative of its own (`jax.custom_jvp`, `jax.custom_vjp`) that communicates gets such operands, so
   that its rule is called on every rank.
3. Where JAX divides a computation into a known part and the rest, no equation that communicates is dropped.
4. Where it transposes, every cotangent depends on all that the transposition was started with.
5. Where it takes out of a loop what is the same in each step, and where it transposes a function, nothing that
   communicates is taken for known because its operands are.

`vmap` maps what depends on what it maps, and ranks must map alike. A derivative may depend on it on one rank alone, so
the links of 1. and 4. are mapped by every `vmap` around them, and what is communicated with them; where a derivative is
differentiated further, by every one but that of `jacfwd`, which maps tangents alone (`traces.link_value`).

What JAX opens by a rule of its own is in `opening._OPENED`, with what the rule needs; anything else that communicates
inside is refused. `_contract` holds JAX to all this before the first derivative.
"""

"""Makes JAX's differentiation include communication on every rank.

A derivative is communication, so all ranks must take part. On some rank the operand of an operation may depend on no
differentiated input, or nothing may depend on the result. JAX leaves such operations out of derivatives. This package
changes that at the few places of JAX through which every primitive passes, future primitives included:

1. A trace that differentiates records the differentiated inputs: the values with which it started. All communication
   gets an operand whose tangent is linear in all of them. So it is differentiated on every rank, in the same pass.
2. A function with a derivative rule (`jax.custom_jvp`, `jax.custom_vjp`) that communicates gets such operands, so that
   every rank calls the rule.
3. Where JAX divides a computation into a known and an unknown part, no equation that communicates is dropped.
4. Where JAX transposes, every cotangent depends on all cotangents with which the transposition started.
5. Where JAX hoists loop-invariant computations, and where it transposes a function, communication does not count as
   known because its operands are known.

`vmap` maps values that depend on the mapped values, and ranks must map alike. A derivative may depend on them on one
rank only. So every `vmap` around them maps the dependences of 1. and 4., and what is communicated with them. If a
derivative is differentiated further, every `vmap` maps them except that of `jacfwd`, which maps tangents alone
(`inputs.make_value_depend`).

JAX differentiates the higher-order primitives by a rule for the computation inside. `higher_order._HIGHER_ORDER` has
them, with what each rule needs. Any other primitive that communicates inside is refused. `_contract` tests all these
assumptions about JAX before the first derivative.
"""

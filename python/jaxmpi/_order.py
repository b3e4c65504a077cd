"""Program order: one ordered effect for all operations, and the token that is never needed.

XLA keeps computations with the same ordered effect in program order, in every kind of control flow, and drops none of
them. The token that the public functions take and return is therefore only a courtesy to programs that thread one
through: a pytree without leaves, so that it costs nothing and may still cross `jit`, `scan` and `cond`.
"""

import jax

from jaxmpi import _jax


class Communication(_jax.Effect):
    """The effect of talking to other ranks."""

    def __str__(self) -> str:
        return "MPI"


_jax.permit_effect(Communication)
EFFECT = Communication()


class Token:
    """Stands for "after everything before". Has no leaves; all tokens are equal.

    Any token is accepted as input: this one, None, a JAX token, an array. Order does not depend on it.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "Token()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Token)

    def __hash__(self) -> int:
        return hash(Token)


jax.tree_util.register_pytree_node(Token, lambda token: ((), None), lambda _, leaves: Token())
TOKEN = Token()

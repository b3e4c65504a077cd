"""What type checkers and editors are told of `jit`; at run time nothing of it is needed."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypedDict, TypeVar, overload

if TYPE_CHECKING:
    import jax

P = ParamSpec("P")
Rest = ParamSpec("Rest")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
First = TypeVar("First")
First_contra = TypeVar("First_contra", contravariant=True)


class JitOptions(TypedDict, total=False):
    """Those that `jax.jit` has, in any of its versions."""

    static_argnums: int | Sequence[int] | None
    static_argnames: str | Iterable[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Iterable[str] | None
    keep_unused: bool
    inline: bool
    compiler_options: dict[str, Any] | None
    in_shardings: Any
    out_shardings: Any
    device: Any
    backend: str | None
    abstracted_axes: Any


class _Unbound(Protocol[First_contra, P, R_co]):
    """A function with a first parameter; both checkers find its type here, but not in a `Concatenate`."""

    def __call__(self, first: First_contra, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class Jitted(Protocol[P, R_co]):
    """A function with the parameters and the result of the one that was compiled, and with what `jax.jit` adds."""

    __name__: str

    @property
    def __wrapped__(self) -> Callable[P, R_co]: ...

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    # In the place of an array these take a shape with a dtype, too: the types of the parameters do not hold.
    def lower(self, *args: Any, **kwargs: Any) -> "jax.stages.Lowered": ...
    def trace(self, *args: Any, **kwargs: Any) -> "jax.stages.Traced": ...
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any: ...
    def clear_cache(self) -> None: ...

    # In a class. Whether `staticmethod` or `classmethod` stands before it is hidden; what is bound to it shows only in
    # the type of the first parameter. One that takes a class has `classmethod` before it, or takes anything.
    @overload
    def __get__(self: "_Unbound[First, Rest, R_co]", instance: Any, owner: First, /) -> "Jitted[..., R_co]": ...
    @overload
    def __get__(self, instance: None, owner: Any, /) -> "Jitted[P, R_co]": ...
    @overload
    def __get__(self: "_Unbound[First, Rest, R_co]", instance: First, owner: Any, /) -> Callable[Rest, R_co]: ...
    @overload
    def __get__(self, instance: Any, owner: Any, /) -> "Jitted[P, R_co]": ...

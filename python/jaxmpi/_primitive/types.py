"""The types of `jit` for type checkers and editors; not needed at run time."""

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
    """The options of `jax.jit`, in any of its versions."""

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
    """A function with a first parameter: mypy and pyright infer the type from this, but not from `Concatenate`."""

    def __call__(self, first: First_contra, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class Jitted(Protocol[P, R_co]):
    """A function with the parameters and the result of the compiled one, and with the methods of `jax.jit`."""

    __name__: str

    @property
    def __wrapped__(self) -> Callable[P, R_co]: ...

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    # Instead of an array these also take a shape with a dtype, so the types of the parameters do not apply.
    def lower(self, *args: Any, **kwargs: Any) -> "jax.stages.Lowered": ...
    def trace(self, *args: Any, **kwargs: Any) -> "jax.stages.Traced": ...
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any: ...
    def clear_cache(self) -> None: ...

    # As an attribute of a class. `staticmethod` and `classmethod` around it are not visible here; only the type of the
    # first parameter shows what is bound. If it takes a class, the function is a classmethod, or takes anything.
    @overload
    def __get__(self: "_Unbound[First, Rest, R_co]", instance: Any, owner: First, /) -> "Jitted[..., R_co]": ...
    @overload
    def __get__(self, instance: None, owner: Any, /) -> "Jitted[P, R_co]": ...
    @overload
    def __get__(self: "_Unbound[First, Rest, R_co]", instance: First, owner: Any, /) -> Callable[Rest, R_co]: ...
    @overload
    def __get__(self, instance: Any, owner: Any, /) -> "Jitted[P, R_co]": ...

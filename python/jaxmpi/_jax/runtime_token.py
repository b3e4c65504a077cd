"""The runtime token: the array that one computation passes to the next, so that calls of compiled code stay in order.

Between two computations with an ordered effect JAX passes an empty array, one per thread, which the first returns and
the second takes as an operand. JAX names it the runtime token of the effect. Calls of eager operations and of functions
compiled by `jaxmpi.jit` pass it on in C; a later call of plain `jax.jit` takes the same array as an operand.
"""

import contextlib
import sys
import threading
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src import api_util, config, core, dispatch, xla_bridge
from jax._src.array import ArrayImpl

import jaxmpi._core as _core
from jaxmpi._jax.internals import Effect, replace

# The last runtime token of each thread. JAX's own record is per thread, so no thread sees the tokens of others there.
_tokens_of_threads: dict[int, Any] = {}
_tokens_of_ended_threads: list[Any] = []

REPEATED = (
    "jaxmpi: a result is NaN or infinite, which jax_debug_nans or jax_debug_infs forbids. To find out which operation "
    "made it JAX executes the function again, on this rank alone, so communication is not repeated. To see the "
    "operation run the program with jax.disable_jit() on all ranks."
)
_repeating = threading.local()


def _not_repeated() -> None:
    """Raise where JAX executes again on this rank a function that all ranks have executed."""
    if getattr(_repeating, "on", False):
        raise FloatingPointError(REPEATED)


def guard_repetitions(effect: Effect) -> None:
    """Make JAX's second execution of a function, after a NaN, raise before it communicates.

    Meanwhile this thread has no token for the effect, so all communication asks for a new one: eager operations and
    functions compiled by `jaxmpi.jit` through `_new_token`, other programs through `guard_calls_of_jax`.
    """
    owner = api_util if hasattr(api_util, "maybe_recursive_nan_check") else dispatch  # the latter in JAX 0.6

    def repeat(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tokens = dispatch.runtime_tokens.current_tokens
        token = tokens.pop(effect, None)
        outer, _repeating.on = getattr(_repeating, "on", False), True
        try:
            return own(*args, **kwargs)
        finally:
            _repeating.on = outer
            if token is not None:
                tokens[effect] = token

    replace(owner, "maybe_recursive_nan_check", "", repeat)


def guard_calls_of_jax(effect: Effect) -> None:
    """Make calls of plain `jax.jit` take no token for the effect while JAX repeats a function, and none that failed.

    JAX would pass the token of a failed computation to all computations that come after it, and execute none of them.
    """
    seen = threading.local()

    def get_token_input(own: Callable[..., Any], tokens: Any, eff: Any, *args: Any) -> Any:
        if eff is effect:
            _not_repeated()
            failures = _core.failures()
            token, failed = tokens.current_tokens.get(effect), failures != getattr(seen, "failures", 0)
            seen.failures = failures
            if token is not None and (failed or token._buf.is_ready()) and _failed(token.block_until_ready):
                tokens.current_tokens.pop(effect, None)
        return own(tokens, eff, *args)

    replace(type(dispatch.runtime_tokens), "get_token_input", "", get_token_input)


def repeats_backward_pass() -> bool:
    """Return whether JAX is about to execute a backward pass again, because the compiled one has made a NaN."""
    error = getattr(api_util, "InternalFloatingPointError", None)
    handled = sys.exc_info()[0]
    return error is not None and handled is not None and issubclass(handled, error)


def _first_array() -> Any:
    return jax.device_put(np.zeros(0, np.bool_))


def _new_token(effect: Effect) -> Any:
    """Make a runtime token for this thread whose array can be an operand of compiled code.

    A token that JAX makes holds an array too, but in some versions with the layout of an XLA token. So our tokens are
    marked by the attribute `pending`, in which the core keeps whether the computation can have failed since its call
    returned. This function waits for a token of JAX, so a call of ours waits for an earlier call of plain `jax.jit`.
    """
    _not_repeated()
    tokens, thread = dispatch.runtime_tokens.current_tokens, threading.get_ident()
    if effect in tokens:
        _failed(tokens[effect].block_until_ready)
    if _several_devices():
        _core.configure(several_devices=True)  # so that `_heal` gets arrays that are committed
    token: Any = core.Token(_first_array())
    token.pending = None
    if thread in _tokens_of_threads:  # an earlier token of this thread, or of an ended thread with the same number
        earlier = [*_tokens_of_ended_threads, _tokens_of_threads[thread]]
        _tokens_of_ended_threads[:] = [token for token in earlier if not token._buf.is_ready()]
    _tokens_of_threads[thread] = tokens[effect] = token
    return token


def _several_devices() -> bool:
    """Return whether this process has several devices, of one platform or, as with every GPU, of several."""
    return sum(backend.local_device_count() for backend in xla_bridge.backends().values()) > 1


def _heal(token: Any, failed: bool) -> None:
    """Replace a token's array if the computation has failed, or if the array is committed to a device.

    An array gets committed to a device if the operands of its computation were. JAX would refuse the next computation
    if that one's operands are committed to another device. So the next computation takes the same array, not committed,
    which JAX copies to another device without a wait.

    `failed`: an operation has failed since the computation was called, perhaps in another computation. Then this
    function waits for this computation, because JAX marks the results of a failed one one after the other.
    """
    array = token._buf
    if (failed or array.is_ready()) and _failed(token.block_until_ready):
        token._buf = _first_array()
    elif array._committed:
        token._buf = ArrayImpl(array.aval, array.sharding, [array], committed=False, _skip_checks=True)


_noting = threading.local()


def note_failures() -> None:
    """Record, from here on, errors of this thread's computations about which a later call only warns."""
    _noting.lists = [*getattr(_noting, "lists", ()), []]


def noted_failures() -> list[jax.errors.JaxRuntimeError]:
    """Return the errors recorded since this thread's last `note_failures`, and end the record."""
    *_noting.lists, noted = _noting.lists
    return list(noted)


def _failed(wait: Callable[[], Any]) -> bool:
    """Wait for a computation. Return whether it failed, with a warning; the results raise the error.

    JAX would make the next computation fail too, without executing it, while the other ranks wait for it.
    """
    try:
        wait()
    except jax.errors.JaxRuntimeError as error:
        warnings.warn(f"jaxmpi: an earlier computation failed: {error}", RuntimeWarning, stacklevel=4)
        for noted in getattr(_noting, "lists", ()):
            noted.append(error)
        # For each device JAX keeps another token, of the last computation there. It would raise at every barrier.
        of_devices = dispatch.runtime_tokens.output_runtime_tokens
        for device, of_device in list(of_devices.items()):
            try:
                of_device.block_until_ready()
            except jax.errors.JaxRuntimeError:
                del of_devices[device]
        return True
    return False


error_of_program: Callable[[jax.errors.JaxRuntimeError], Exception] = lambda error: error  # noqa: E731
"""Converts an error of XLA to the exception that a program sees: `_mpi.survival` recognizes a process that died."""


def _as_error(raised: BaseException, failed: bool) -> BaseException:
    """Return the exception that a call raises in place of `raised`. JAX's fastest way of calling a program raises
    ValueError instead of JAX's own error. `failed`: it is the error of an operation."""
    if failed and isinstance(raised, ValueError):
        raised = jax.errors.JaxRuntimeError(str(raised))
    return error_of_program(raised) if isinstance(raised, jax.errors.JaxRuntimeError) else raised


def wait_and_raise() -> None:
    """Wait for this thread's last computation. Raise the error of it."""
    for token in list(dispatch.runtime_tokens.current_tokens.values()):
        token.block_until_ready()
    jax.effects_barrier()


def heal_all_threads() -> None:
    """Wait for the last computation of each thread. No later computation raises the error of an earlier one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for token in [*_tokens_of_ended_threads, *_tokens_of_threads.values()]:
            if _failed(token.block_until_ready):
                token._buf = _first_array()
        tokens = dispatch.runtime_tokens.current_tokens
        for effect, token in list(tokens.items()):
            if not hasattr(token, "pending") and _failed(token.block_until_ready):
                del tokens[effect]
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.effects_barrier()
    for noted in getattr(_noting, "lists", ()):
        noted.clear()


@dataclass(frozen=True)
class Hooks:
    """What a call in the order of an effect needs of JAX and of this module: csrc/python/runtime_token.c."""

    effect: Effect
    renew: Callable[[], Any]
    """Make a runtime token for this thread."""
    heal: Callable[..., Any] = _heal
    """Replace the array of a token whose computation may have failed."""
    error: Callable[..., Any] = _as_error
    """Return the exception for users in the place of one of JAX."""
    wait: Callable[..., Any] = lambda results: _failed(lambda: jax.block_until_ready(results))
    clean: Callable[[], bool] = core.trace_state_clean
    disabled: Any = config.disable_jit
    tokens: Any = dispatch.runtime_tokens
    method: Callable[..., Any] = types.MethodType
    names: tuple[str, ...] = ("current_tokens", "_buf", "pending", "value", "_committed")
    """The attributes of the objects of JAX, in this order."""


def with_runtime_token(
    effect: Effect, compute: Callable[..., Any], otherwise: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return a function of the arguments alone that passes the runtime token of an effect from call to call.

    `compute`: `(array, *args, **kwargs) -> (array, result)`; the array is that of the token. The returned array may be
    None if all communication is over when the call returns, but not if `array` comes in a tuple. It is an empty tuple
    if nothing is communicated. `otherwise`: called instead inside a trace and with `jax.disable_jit`.
    """
    return _core.make_call(compute, otherwise, Hooks(effect, renew=lambda: _new_token(effect)))


def wait_for_all_threads() -> None:
    """Wait for the last computation of each thread. The results raise an error, this function does not."""
    for token in [*_tokens_of_ended_threads, *_tokens_of_threads.values()]:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            token.block_until_ready()

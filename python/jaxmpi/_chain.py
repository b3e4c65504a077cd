"""The order of calls of compiled code: the link that one computation hands to the next.

Between two computations with an ordered effect JAX keeps an empty array, one per thread, that the first returns and the
second takes as an operand. The same is done here, in csrc/python/link.c; a computation of JAX's own kind after one of
ours is linked by the array.
"""

import contextlib
import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import config, core, dispatch

import jaxmpi._core as _core
from jaxmpi._jax import Effect

# The last link of each thread that has made one: JAX knows only those of the thread that asks.
_of_threads: dict[int, Any] = {}
_of_ended_threads: list[Any] = []


def _first_array() -> Any:
    return jax.device_put(np.zeros(0, np.bool_))


def _new_link(effect: Effect) -> Any:
    """Makes the runtime token of this thread one whose array can be an operand of compiled code.

    A token that JAX makes holds an array too, but on some versions with the layout of an XLA token; so ours are marked,
    by the attribute in which link.c keeps whether the computation can have failed since its call returned. After a
    computation of JAX's own kind the next one of ours waits for it, therefore.
    """
    tokens, thread = dispatch.runtime_tokens.current_tokens, threading.get_ident()
    if effect in tokens:
        _failed(tokens[effect])
    if _several_devices():
        _core.set_several_devices()
    link: Any = core.Token(_first_array())
    link.pending = None
    if thread in _of_threads:  # of an ended thread with the same number, if it still runs
        before = [*_of_ended_threads, _of_threads[thread]]
        _of_ended_threads[:] = [token for token in before if not token._buf.is_ready()]
    _of_threads[thread] = tokens[effect] = link
    return link


def _several_devices() -> bool:
    return jax.local_device_count() > 1 or jax.default_backend() != "cpu"


def _heal(token: Any, failed: bool) -> None:
    """Gives a token whose computation has failed a link that has not.

    `failed` says that an operation has failed since the computation was called, though perhaps not its own: then it is
    waited for, as JAX marks the results of a failed computation one after the other. A link that is bound to one of
    several devices, as the operands of its computation were, is replaced too, after waiting: it would bind the next
    computation to the same device.
    """
    bound = _several_devices() and token._buf._committed and not _only_device(token._buf)
    if (failed or bound or token._buf.is_ready()) and (_failed(token) or bound):
        token._buf = _first_array()


def _only_device(array: Any) -> bool:
    """Whether an array lies where JAX would put it by itself, as there is one device of the default kind."""
    devices = jax.local_devices()
    return len(devices) == 1 and array.devices() == set(devices)


def _failed(token: Any) -> bool:
    """Waits for what a token stands for; whether it failed, which is a warning here: its results are what raises.

    JAX would let what comes next fail too, unexecuted, while the other ranks wait for it.
    """
    try:
        token.block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        warnings.warn(f"jaxmpi: an earlier computation failed: {error}", RuntimeWarning, stacklevel=4)
        # Of the last computation on each device JAX keeps another token, which would raise at every barrier.
        of_devices = dispatch.runtime_tokens.output_runtime_tokens
        for device, of_device in list(of_devices.items()):
            try:
                of_device.block_until_ready()
            except jax.errors.JaxRuntimeError:
                del of_devices[device]
        return True
    return False


def linked(
    effect: Effect, compute: Callable[..., Any], otherwise: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """`compute(link, *args, **kwargs) -> (link, result)` as a function of the arguments, in the order of an effect.

    Between two computations with an ordered effect JAX keeps an empty array, one per thread, that the first returns
    and the second takes as an operand. The same is done here (in link.c); a computation of JAX's own kind after this
    one is linked by the array. Where there is an `otherwise`, it is called instead inside a trace and with
    `jax.disable_jit`.
    """
    names = ("current_tokens", "_buf", "pending", "is_ready", "_committed")
    run = _core.linker(compute, dispatch.runtime_tokens, effect, lambda: _new_link(effect), _heal, names)
    if otherwise is None:
        return run
    clean, disabled = core.trace_state_clean, config.disable_jit

    def call(*args, **kwargs):
        if not clean() or disabled.value:
            return otherwise(*args, **kwargs)
        return run(*args, **kwargs)

    return call


def wait_for_all_threads() -> None:
    """Waits for the computations that were linked in any thread; errors are those of their results."""
    for token in [*_of_ended_threads, *_of_threads.values()]:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            token.block_until_ready()

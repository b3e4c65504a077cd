"""What the import of the package does, in order, and what the end of the program does.

All ranks import the package: what they agree on is agreed on here. The modules that `start` imports use what the lines
before them have made.
"""

import atexit
import contextlib
import platform
import sys
from importlib import import_module

from jaxmpi_launch import before_jax, sharded_state, versions

_bound = _started = False
"""Whether the core knows MPI, from when on other ranks take part in the import; and whether all is done."""


def start() -> None:
    """Readies JAX and the C core, once. Raises ImportError, RuntimeError or ValueError, which say what to do."""
    global _started
    if _started:
        return
    if _bound:
        raise ImportError(
            "jaxmpi: the import has failed before in this process, and is not tried again, as other ranks take part "
            "in it once. The first error says why: start the program again without its cause"
        )
    try:
        _start()
    except (ImportError, AttributeError) as error:  # of a name that an older version lacks
        if said := versions.unmet():
            raise ImportError(said) from error
        raise
    _started = True


def _start() -> None:
    global _bound
    _load_core()
    sharded_state.offer()  # jaxlib finds the core as it looks for MPI: before jax is imported

    from jaxmpi._mpi import settings  # noqa: F401 (before MPI is initialized)

    # isort: split
    from jaxmpi._mpi import library

    library.bind()  # the core to MPI and XLA; the watch begins
    _bound = True
    atexit.register(_end)

    from jaxmpi._mpi import communicators, launch_check, survival
    from jaxmpi._primitive import effect

    launch_check.warn()  # if the launcher and MPI do not know each other
    effect.install()  # JAX keeps what communicates in program order
    communicators.agree()  # on settings, with the other ranks; the default communicator; the timeline begins
    communicators.know()  # those that every run has
    survival.install()  # the error of a rank that has died

    from jaxmpi import _contract
    from jaxmpi._operations import table  # noqa: F401 (all operations)

    _contract.install()  # the hooks of derivatives
    sharded_state.taken()
    before_jax.register()  # for jax.distributed.initialize()


def _load_core() -> None:
    """Loads the C core. Raises ImportError where it is not for this Python or machine."""
    try:
        import_module("jaxmpi._core")
    except ImportError as error:
        python = f"Python {platform.python_version()}"
        if "t" in sys.abiflags:
            raise ImportError(
                f"jaxmpi: this {python} is a free-threaded build, without the stable ABI for which the core of jaxmpi "
                f"is compiled: use the other build of this version, such as python3.{sys.version_info[1]} without t"
            ) from error
        raise ImportError(
            f"jaxmpi: no core for {python} on {platform.system()} ({platform.machine()}): {error}. Install the wheel "
            "for this machine, or compile the core: 'pip install' the sources"
        ) from error
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise ImportError(
            "jaxmpi: Python runs without its global lock, which the core of jaxmpi needs: do not set PYTHON_GIL=0 or "
            "-X gil=0"
        )


def finish() -> None:
    """Waits for running computations, so that no message to a peer is lost when MPI is finalized. Raises RuntimeError
    if the failure of an operation has not been reported yet. Does nothing if the core has not been bound."""
    if not _bound:
        return
    from jaxmpi._core import close_timeline
    from jaxmpi._mpi import library

    with contextlib.ExitStack() as steps:  # the last comes first; each is taken, though one before it has raised
        steps.callback(library.raise_failure)
        steps.callback(close_timeline)
        steps.callback(library.release)
        library.wait_for_computations()


def _end() -> None:
    """Runs before JAX releases its backends (exit handlers run last in, first out) and before MPI is finalized."""
    from jaxmpi._mpi import communicators, library

    with contextlib.ExitStack() as steps:  # the last comes first; each is taken, though one before it has raised
        steps.callback(library.finalize_if_others_are_late)
        steps.callback(communicators.end)
        finish()

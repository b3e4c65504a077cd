"""Jobs that survive the death of a rank: the error, and how a communicator of the living ranks is made.

MPI reports a death by the error of an operation (ULFM: MPIX_ERR_PROC_FAILED). The core then revokes the communicator,
so that no rank waits for a rank that has left an operation by this error: core/failure.c. Nothing here costs a call
that succeeds.
"""

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar

import jax
from mpi4py import MPI

import jaxmpi._core as _core
from jaxmpi._jax import internals, runtime_token
from jaxmpi._mpi import communicators, failures, groups, private_comms
from jaxmpi._mpi.library import FAILURES, LIBRARY
from jaxmpi._mpi.watch import waiting


class ProcessFailed(jax.errors.JaxRuntimeError):
    """A rank has died, and an operation of this rank failed because of it, or another rank has noticed the death.

    The job goes on if it has been started by `python -m jaxmpi.run --survive`: see `jaxmpi.survive.recover`.

    Attributes:
      ranks: the ranks of `comm` that are known to have died, on this rank by now. Empty if another rank has reported
        the failure, and MPI has not reported the death here yet.
      comm: the communicator of the operation; None if it is not known, or has been freed or recovered.
      operation: the name of the operation, `allreduce`; empty if it is not an operation of this package.
    """

    def __init__(self, text: str, ranks: tuple[int, ...] = (), comm: MPI.Comm | None = None, operation: str = ""):
        super().__init__(text)
        self.ranks, self.comm, self.operation = ranks, comm, operation

    def __reduce__(self) -> Any:
        return ProcessFailed, (str(self), self.ranks, None, self.operation)


_DEATH_IN_TEXT = re.compile(
    r"jaxmpi(?:\.|, )([\w. ]+?) on rank \d+ of \d+: (?:(?!jaxmpi[.,]).)*?\[a process has failed, communicator (\d+)\]",
    re.DOTALL,
)


def process_failure(error: BaseException) -> ProcessFailed | None:
    """Return the `ProcessFailed` for an error, or None if the error has another cause.

    An operation raises `ProcessFailed` itself when it is called, eagerly or in a function under `jaxmpi.jit`. Other
    errors are instances of `jax.errors.JaxRuntimeError`: errors of functions under plain `jax.jit`, which JAX raises
    itself, and errors that come out when a program waits for a result (`block_until_ready`, `numpy.asarray`). Only
    their text says what happened; this function reads it. It takes errors of mpi4py as well.

    The result is None for an error of a communicator that `recover` has replaced: nobody else would recover from it
    once more. It comes out of an array whose computation had failed before, and which is lost.

    Args:
      error: any exception.
    """
    if isinstance(error, ProcessFailed):
        return error
    if isinstance(error, MPI.Exception):
        return ProcessFailed(str(error)) if error.Get_error_class() in failures.classes() else None
    if not isinstance(error, (jax.errors.JaxRuntimeError, ValueError)):
        return None
    text = str(error)
    if (match := _DEATH_IN_TEXT.search(text)) is None or communicators.was_given_up(int(match[2])):
        return None
    known = communicators.of_number_in_text(int(match[2]))
    comm = known.mpi if known is not None and known.mpi != MPI.COMM_NULL else None
    return ProcessFailed(text, failures.dead(comm) if comm is not None else (), comm, match[1])


def failure_in(error: BaseException, comm: MPI.Comm, operation: str) -> ProcessFailed | None:
    """Return the `ProcessFailed` for an error in a function where ranks communicate by mpi4py on a clone of `comm`.
    Return None if the error has another cause. Revoke both communicators, so that no rank waits there for this one."""
    failure = process_failure(error)
    if isinstance(error, MPI.Exception) and (failure is not None or failures.is_broken(comm)):
        failure = ProcessFailed(f"{operation}: {error}", failures.dead(comm), comm, operation)
    if failure is not None:
        private_comms.revoke(comm)
    return failure


@contextlib.contextmanager
def failing(comm: MPI.Comm, operation: str) -> Iterator[None]:
    """A context for code in which the ranks of `comm` communicate by mpi4py. An error that reports a death becomes a
    ProcessFailed, and other ranks learn of the death by their own operations."""
    try:
        yield
    except (MPI.Exception, jax.errors.JaxRuntimeError) as error:
        failure = failure_in(error, comm, operation)
        if failure is None or failure is error:
            raise
        raise failure from error


def _of_lost_array(error: BaseException) -> RuntimeError | None:
    """Return the error for an array whose computation failed before `recover`."""
    if (match := _DEATH_IN_TEXT.search(str(error))) is None or not communicators.was_given_up(int(match[2])):
        return None
    return RuntimeError(
        "jaxmpi: an operand or a result is an array whose computation failed before jaxmpi.survive.recover, so there "
        "is nothing in it. Take the value from before that step: of a variable that the step has not assigned, a "
        f"jaxmpi.survive.Replica or a file. It had failed by: {error}"
    )


def install() -> None:
    """Make calls raise ProcessFailed."""
    runtime_token.error_of_program = lambda error: process_failure(error) or _of_lost_array(error) or error


def _check_type(comm: MPI.Comm, caller: str, name: str = "comm") -> None:
    """Raise TypeError or ValueError if `comm` is not an intra-communicator, or freed."""
    if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL:
        raise ValueError(f"{caller}: {name} is MPI.COMM_NULL: it has been freed. Pass a live communicator.")
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"{caller}: {name} must be an intra-communicator of mpi4py, got {comm!r}.")


def _check(comm: MPI.Comm, caller: str) -> None:
    """Raise RuntimeError where MPI cannot go on without a rank."""
    _check_type(comm, caller)
    if not FAILURES["failed"]:  # MPI's calls for it may hang
        name = LIBRARY.version.splitlines()[0].partition(",")[0]
        raise RuntimeError(
            f"{caller}: this job cannot go on without a rank: {name} has no calls for it, "
            "or was started without them. Start it by python -m jaxmpi.run --survive, with Open MPI 5 or later."
        )


_Function = TypeVar("_Function", bound=Callable[..., Any])
_CALLED_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


class deaths(contextlib.ContextDecorator):
    """Turns errors that report the death of a rank into `ProcessFailed`, whoever raises them, and at once.

    Use it as `with jaxmpi.survive.deaths(comm):` around a step of a program. The end waits for the computations that
    the step has started. So a step that ends without an error is done on this rank. With `uniform=True` the ranks agree
    at the end: all living ranks leave it without an error, or all of them raise. Without it, a rank may have a result
    from a collective in which another rank has noticed a death.

    Use it outside of compiled functions: inside, it is executed while JAX traces, and not in the calls.

    It is a decorator, too: `allreduce = jaxmpi.survive.deaths(uniform=True)(jaxmpi.allreduce)` is an operation whose
    result either all ranks have, or none.

    Args:
      comm: the communicator whose ranks agree; the default one if left out.
      uniform: whether they agree, which costs a message to and from each rank. All ranks of `comm` then pass it alike.

    Raises:
      ProcessFailed: a rank has died. With `uniform=True` also where another rank has left the block by any exception.
      TypeError, ValueError: `comm` is not an intra-communicator, or freed; the decorated object is not a function.
    """

    def __init__(self, comm: MPI.Comm | None = None, *, uniform: bool = False) -> None:
        if callable(comm):
            raise TypeError("survive.deaths: call it before it decorates a function: @jaxmpi.survive.deaths().")
        if comm is not None:
            _check_type(comm, "survive.deaths")
        if not isinstance(uniform, bool):
            raise TypeError(f"survive.deaths: uniform must be True or False, got {uniform!r:.80}.")
        self._comm, self._uniform = comm, uniform

    def __call__(self, func: _Function) -> _Function:
        if not callable(func) or inspect.isclass(func):
            raise TypeError(f"survive.deaths: it decorates functions, got {func!r:.80}.")
        if any(kind(func) for kind in _CALLED_LATER):
            raise TypeError(
                f"survive.deaths: {func!r:.80} is a generator or asynchronous, and does nothing yet at its call. "
                "Use `with jaxmpi.survive.deaths():` in it."
            )
        return super().__call__(func)

    def __enter__(self) -> None:
        if self._uniform:
            _check(self._communicator(), "survive.deaths")
        runtime_token.note_failures()

    def _communicator(self) -> MPI.Comm:
        return communicators.default_mpi() if self._comm is None else self._comm

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        error = raised
        try:
            if raised is None:
                runtime_token.wait_and_raise()
        except jax.errors.JaxRuntimeError as late:
            error = late
        finally:
            noted = runtime_token.noted_failures()
        if raised is None:  # a later call has only warned about the first failure
            error = next((first for first in noted if _DEATH_IN_TEXT.search(str(first))), error)
        failure = None if error is None else process_failure(error) or _of_lost_array(error)
        all_done = error is None
        if self._uniform:
            with waiting(None, "survive.deaths"):
                all_done = private_comms.agree(self._communicator(), all_done)
        if failure is not None and failure is not raised:
            raise failure.with_traceback(error.__traceback__ if error is not None else None) from error
        if error is not None and error is not raised:
            raise error
        if error is None and not all_done:
            comm = self._communicator()
            raise ProcessFailed(
                "jaxmpi.survive.deaths: a rank has died, or has left the block by an exception: what was done in it is "
                "not done on all ranks",
                failures.dead(comm),
                comm,
            )


def recover(*comms: MPI.Comm | None) -> Any:
    """Go on without the dead ranks: make a communicator of the living ranks in the place of each communicator passed.

    All living ranks call it, with the same communicators in the same order, after a `ProcessFailed`. It does this:

    1. It revokes the communicators, so that operations of ranks that do not know of the death yet raise there.
    2. It waits for this rank's computations.
    3. It gives up the requests in flight on the communicators: a later wait raises, and nothing is reported at the end.
    4. It forgets errors that have not been raised.

    The ranks keep their order. If more ranks die meanwhile, the result is without them. In a job with spare ranks
    (`python -m jaxmpi.run --survive --spare N`) a spare takes the number of each rank of the default communicator that
    has died, as long as there are spares: see `jaxmpi.get_default`.

    Objects made for the old communicator cannot be used any more: calls on it raise. Compiled functions are traced anew
    at the next call, so a function that reads `comm` from a variable gets the value at that time. Make a `Grid`, an
    `IndexMap` and communicators of the program's own (`comm.Split()`, `comm.Dup()`) again. If the default communicator
    is replaced, the new one becomes the default.

    Args:
      *comms: the communicators; the default one if left out, or None.

    Returns:
      The new communicator, or a tuple if several were passed. Which ranks died: `jaxmpi.survive.lost(old, new)`.

    Raises:
      RuntimeError: this MPI, or this job, cannot go on without a rank; start it by `python -m jaxmpi.run --survive`.
      TypeError, ValueError: not intra-communicators, or freed; COMM_SELF, or one that has spare ranks, which wait and
        do not call this; called in a function that JAX traces.
    """
    internals.check_outside("recover")
    old_comms = [communicators.default_mpi() if comm is None else comm for comm in comms or (None,)]
    for comm in old_comms:
        _check(comm, "recover")
        _check_recoverable(comm)
    for comm in old_comms:
        private_comms.revoke(comm)
    runtime_token.heal_all_threads()
    for comm in old_comms:
        communicators.give_up(comm)
    _core.take_failure()
    with waiting(None, "recover"):
        new_comms = tuple(_repaired(comm) for comm in old_comms)
    for old, new in zip(old_comms, new_comms, strict=True):
        if communicators.is_default(old):
            communicators.replace_default(new)
    jax.clear_caches()
    _publish_deaths(old_comms[0], new_comms[0])
    return new_comms if len(comms) > 1 else new_comms[0]


def _check_recoverable(comm: MPI.Comm) -> None:
    """Raise ValueError for communicators that the package needs itself, and where `recover` would wait for ever."""
    if comm == MPI.COMM_SELF:
        raise ValueError("recover: comm is MPI.COMM_SELF, which cannot lose a rank: leave it out.")
    if communicators.has_spares(comm):
        raise ValueError(
            "recover: comm has spare ranks, which wait and do not call recover. Pass the default communicator "
            "(jaxmpi.get_default), or those that are made of it."
        )


def _repaired(comm: MPI.Comm) -> MPI.Comm:
    repaired, name = communicators.repair(comm)
    communicators.resolve(repaired, "recover", name)
    return repaired


def lost(old: MPI.Comm, new: MPI.Comm) -> tuple[int, ...]:
    """Return the ranks of `old` that are not in `new`, which `recover` has made from it. Nothing is communicated.

    Raises:
      TypeError, ValueError: not intra-communicators, or freed.
    """
    for comm, name in ((old, "old"), (new, "new")):
        _check_type(comm, "lost", name)
    return tuple(rank for rank, number in enumerate(groups.ranks_within(old, new)) if number == MPI.UNDEFINED)


def _publish_deaths(old: MPI.Comm, new: MPI.Comm) -> None:
    """Publish all deaths, on the first rank that was in the old communicator: other ranks may be spares that stepped
    in. The report goes to the launcher, or to stderr if this rank is not on the launcher's machine."""
    dead, gone = failures.dead(MPI.COMM_WORLD), lost(old, new)
    first = next(rank for rank in range(old.size) if rank not in gone)
    if dead and old.rank == first and not _core.write_job_file("deaths", " ".join(map(str, dead))):
        have = "ranks {} have" if len(dead) > 1 else "rank {} has"
        print(f"jaxmpi: {have.format(', '.join(map(str, dead)))} died, and the job goes on", file=sys.stderr)


def get_default() -> MPI.Comm:
    """Return the communicator of calls without `comm=`.

    On a spare rank (`python -m jaxmpi.run --survive --spare N`) this waits, as all calls do that need the default
    communicator. The wait ends when `jaxmpi.survive.recover` on the others gives it the number of a dead rank. Then
    this returns the communicator that `recover` returns there. If the program ends on all others, it raises SystemExit.

    On other ranks nothing is communicated. The program must not free the communicator.
    """
    return communicators.default_mpi()


def set_default(comm: MPI.Comm) -> None:
    """Make `comm` the communicator of calls without `comm=`.

    Compiled functions are traced anew at the next call. All ranks of `comm` call this at the same place of their
    programs; nothing is communicated.

    Args:
      comm: an intra-communicator of mpi4py that the program does not free. It is not duplicated.

    Raises:
      TypeError, ValueError: not an intra-communicator, or freed.
    """
    _check_type(comm, "set_default")
    communicators.resolve(comm, "set_default")
    communicators.replace_default(comm)
    jax.clear_caches()

"""One rank of `python -m jaxmpi.run`: run the program, and end the whole job if it fails.

Without this a rank that raises waits for the others in MPI_Finalize, and they wait for messages of the rank.
"""

import atexit
import builtins
import contextlib
import fcntl
import importlib.machinery
import io
import os
import runpy
import signal
import stat
import sys
import termios
import threading
import time
import traceback
import types
import zipfile
from typing import Any, NoReturn

from jaxmpi_launch import accelerators, before_jax, sharded_state, stand_ins, stdin
from jaxmpi_launch.folder import VARIABLE, Folder


def _formatted(error: BaseException) -> list[str]:
    """Return the lines of an exception and its causes, from the program's first frame on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return traceback.format_exception(type(error), error, trace)


_process = os.getpid()
"""The process of the rank. Only it may end the job, and no process that the program forks."""

_rank = next((os.environ[n] for n in ("PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK") if n in os.environ), None)
"""The number of this rank, which mpiexec sets before MPI is initialized."""

_GRACE_SECONDS = 1.0

_exit = os._exit
_survives = False
"""Whether the job goes on without this rank, if it fails: `python -m jaxmpi.run --survive`."""

_folder: Folder | None = None
"""The folder in which the launcher learns what the ranks of its machine do; None on another machine."""


def _mpi_if_running() -> Any:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None


def _tell(text: str) -> None:
    """Write to stderr at once, because the ranks share it; also if the program has closed or replaced it."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except Exception:
        with contextlib.suppress(OSError):
            os.write(2, text.encode(errors="replace"))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _wait_for_launcher() -> None:
    """Wait until mpiexec has read the output of this rank, and passed it on: an abort may lose the output."""
    end = time.monotonic() + 5
    for output in (1, 2):
        with contextlib.suppress(OSError):  # it is closed
            is_pipe = stat.S_ISFIFO(os.fstat(output).st_mode)
            while is_pipe and any(fcntl.ioctl(output, termios.FIONREAD, bytes(4))) and time.monotonic() < end:
                time.sleep(0.01)
    time.sleep(0.3)


_MOST_OF_REASON = 1000


def _end(code: int, reason: str) -> NoReturn:
    """End all ranks if MPI is running, else this one; where the job survives it, this one. Whatever fails on the
    way does not keep it from ending.

    The launcher gets the first line of the reason. On another machine the rank writes this line itself."""
    reason = reason.strip().partition("\n")[0][:_MOST_OF_REASON]
    _flush()
    if os.getpid() == _process:
        if _folder is None:
            does = "failed" if _survives else "ended the job"
            _tell(f"jaxmpi.run: rank {_number()} {does} with code {code}: {reason}\n")
        _wait_for_launcher()
        if _survives and "mpi4py.MPI" in sys.modules:
            _end_alone(code, reason)
        _say("aborts", f"{code}\n{reason}")
        with contextlib.suppress(Exception):
            if (mpi := _mpi_if_running()) is not None:
                mpi.COMM_WORLD.Abort(code)
            elif "mpi4py.MPI" not in sys.modules:
                _abort_before_mpi(code)
    _exit(code)


def _end_alone(code: int, reason: str) -> NoReturn:
    """End this rank alone, by a signal: Open MPI reports a signal to the others, and no exit status but 0."""
    _say("lost", f"{code}\n{reason}")
    if _mpi_if_running() is None:
        _exit(code)
    while True:
        os.kill(os.getpid(), signal.SIGKILL)


def _leave() -> None:
    """End a rank of a job that survives deaths. MPI_Finalize may then wait for ever. Wait for the ranks that live:
    they still need messages of this rank."""
    if os.getpid() != _process:
        return
    _flush()
    _say("left")
    with contextlib.suppress(Exception):
        if (mpi := _mpi_if_running()) is not None:
            mpi.COMM_WORLD.Agree(1)
    _exit(0)


def _die_at_exit() -> None:
    """Let a rank that a library ends by C's `exit` end by a signal, which MPI reports to the others: `_end_alone`."""
    import ctypes

    with contextlib.suppress(Exception):  # a C library that has no such function
        libc = ctypes.CDLL(None)
        die = ctypes.cast(libc["raise"], ctypes.c_void_p)
        libc["__cxa_atexit"](die, ctypes.c_void_p(signal.SIGKILL), None)


def _abort_before_mpi(code: int) -> None:
    """Send mpiexec of MPICH the message of MPI_Abort. Otherwise ranks wait in MPI_Init for one that has ended."""
    connection = int(os.environ["PMI_FD"])
    if stat.S_ISSOCK(os.fstat(connection).st_mode):
        os.write(connection, f"cmd=abort exitcode={code}\n".encode())
        time.sleep(_GRACE_SECONDS)  # to be ended with the others, and not to be taken for a rank that has crashed


def _fail(error: BaseException, where: str = "") -> NoReturn:
    """Report an exception that the program has not caught, and end the job."""
    name, lines, untold = " in a process that a rank has forked", [f"{type(error).__name__}\n"], ""
    with contextlib.suppress(Exception):
        lines = _formatted(error)
    if os.getpid() == _process:
        name = "" if (number := _number()) is None else f" on rank {number}"
        with contextlib.suppress(Exception):
            untold = _untold()
    _tell(f"jaxmpi.run: uncaught exception{name}{where}:\n{''.join(lines)}{untold}")
    _end(1, untold or _said_by(error))


def _said_by(error: BaseException) -> str:
    """Return the line that names an error. The last line of a traceback may be a rule of an exception group, or a note,
    such as JAX's about tracebacks."""
    with contextlib.suppress(Exception):
        lines = traceback.format_exception_only(type(error), error)
        return lines[-1 if isinstance(error, SyntaxError) else 0]  # it begins with the place
    return type(error).__name__


def _fail_in_thread(args: threading.ExceptHookArgs) -> None:
    """End the job when a thread fails: nobody else would, and other ranks may wait for messages of the thread."""
    if args.exc_type is SystemExit or args.exc_value is None or sys.is_finalizing() or os.getpid() != _process:
        threading.__excepthook__(args)
        return
    _fail(args.exc_value, f" in thread {args.thread.name}" if args.thread is not None else " in a thread")


def _exit_at_once(status: int) -> NoReturn:
    """Replace os._exit, by which a rank would leave without a word to MPI, and others would wait for it."""
    if os.getpid() == _process:
        with contextlib.suppress(Exception):
            if (mpi := _mpi_if_running()) is not None:
                ends = "it is lost" if _survives else "the job ends"
                text = f"rank {mpi.COMM_WORLD.rank} calls os._exit({status}) without MPI.Finalize(): {ends}"
                _tell(f"jaxmpi.run: {text}\n")
                _end(_status(status) or 1, f"jaxmpi.run: {text}")
            _say("ended")
            _say("left")
    _exit(status)


# The name of the original, so that pickle finds it: a program may pass it to a process.
_exit_at_once.__module__, _exit_at_once.__name__, _exit_at_once.__qualname__ = "os", "_exit", "_exit"


def _status(code: object) -> int:
    """Return the exit status for the argument of `sys.exit`. Systems keep 8 bits, which must not be 0 for an error."""
    if code is None or isinstance(code, int):
        return ((code or 0) & 255) or (1 if code else 0)
    return 1


class _Interrupts:
    """Ends a rank by Ctrl-C that is in a compiled computation, where Python runs no handlers.

    A thread reads the number of the signal from a file descriptor at once.
    """

    def __init__(self) -> None:
        self.seen = False
        self._reads, writes = os.pipe()
        os.set_blocking(writes, False)
        signal.signal(signal.SIGINT, self._handle)
        signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="jaxmpi.run: interrupts", daemon=True).start()

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        self.seen = True
        raise KeyboardInterrupt

    def _watch(self) -> None:
        while number := os.read(self._reads, 1):
            if number[0] != signal.SIGINT or signal.getsignal(signal.SIGINT) != self._handle:
                continue
            time.sleep(_GRACE_SECONDS)
            if not self.seen:
                text = "jaxmpi.run: interrupted in a compiled computation or another call: the job ends"
                _tell(f"{text}\n")
                _end(128 + signal.SIGINT, text)


def _replace(name: str) -> None:
    from jaxmpi.compat._install import install

    install(name)


def _ready_jax(devices: str, collectives: str) -> None:
    """Ready JAX as the program imports it: the rank takes a device, the user's choice or its own, and JAX gets what
    carries JAX's collectives, if the user has chosen it."""

    def before() -> None:
        if collectives == "mpi":
            sharded_state.offer()

    def after(jax: types.ModuleType) -> None:
        accelerators.take(jax.config, devices == "rank")
        if collectives:
            sharded_state.taken()
            before_jax.prepare(collectives)

    sys.meta_path.insert(0, stand_ins.AtImport("jax", after, before))


def _find_folder() -> Folder | None:
    """Return the job's folder; None if there is none, or it is another machine's, and the rank reports on stderr."""
    if (path := os.environ.get(VARIABLE)) is None:
        return None
    with contextlib.suppress(OSError):
        if (folder := Folder(path)).is_here():
            return folder
    del os.environ[VARIABLE]
    return None


def _run_as_main(program: str) -> None:
    """Run a script, or a zip file or folder with a `__main__.py`, in the module `__main__`."""
    if not os.path.isdir(program) and not zipfile.is_zipfile(program):
        sys.path[0] = os.path.dirname(os.path.abspath(program))
        main = sys.modules["__main__"]
        main.__file__ = program
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", program)
        with open(program, "rb") as file:
            code = compile(file.read(), program, "exec")
        exec(code, main.__dict__)
        return
    sys.path[0] = program
    _run_module("__main__", alter_argv=False)


_run_module = getattr(runpy, "_run_module_as_main")  # noqa: B009 (what `python -m` itself calls)
_own_module = sys.modules["__main__"]  # kept: its functions are those that run


def _run(arguments: list[str]) -> None:
    chosen = {"--devices": "rank", "--collectives": ""}
    while arguments[0] in ("--as", *chosen):
        option, value, *arguments = arguments
        if option == "--as":
            stand_ins.Finder(value, _replace).install()
        else:
            chosen[option] = value
    _ready_jax(*chosen.values())
    # The program's definitions stay in `__main__`, for pickling, threads and exit handlers.
    sys.modules["__main__"] = types.ModuleType("__main__")
    vars(sys.modules["__main__"])["__builtins__"] = builtins
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path[0] = os.getcwd()
            _run_module(arguments[1])
        elif arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            sys.path[0] = ""
            exec(compile(arguments[1], "<string>", "exec"), vars(sys.modules["__main__"]))
        else:
            sys.argv = arguments
            _run_as_main(arguments[0])
    except SystemExit as stop:
        if not stop.code:
            _finish()
        raise
    _finish()


def _finish() -> None:
    """Wait for running computations: their errors belong to the program."""
    if os.getpid() != _process:
        _end(0, "")  # not by way of MPI_Finalize, which is the rank's
    if "jaxmpi._start" in sys.modules:
        sys.modules["jaxmpi._start"].finish()
    _say("ended")


def _number() -> int | str | None:
    """Return the number of this rank, from mpiexec or from MPI. An MPI library of another mpiexec takes each rank for
    the only one."""
    with contextlib.suppress(Exception):
        if _rank is None and (mpi := _mpi_if_running()) is not None:
            return mpi.COMM_WORLD.rank
    return _rank


def _say(kind: str, content: str = "") -> None:
    """Leave a file for the launcher: monitor.py lists the kinds."""
    with contextlib.suppress(Exception):
        if _folder is not None and (number := _number()) is not None:
            _folder.write(f"{number}.{kind}", content)


def _untold() -> str:
    """Return an error of an operation that has not been reported: it may be the cause of a later one."""
    core = sys.modules.get("jaxmpi._core")
    failure = core.take_failure() if core is not None else None
    return f"jaxmpi.run: before that an operation had failed: {failure}\n" if failure else ""


def main() -> None:
    global _survives, _folder
    arguments = sys.argv[1:]
    if arguments[0] == "--survive":
        _survives, arguments = True, arguments[1:]
        atexit.register(_leave)  # the last that Python does
        _die_at_exit()
    _folder = _find_folder()
    if _folder is not None:
        _folder.tie()
        if _survives:
            # The launcher sees the end of this process, and whether that comes before MPI is initialized, for which
            # the others would then wait for ever.
            _say("pid", str(os.getpid()))
            sys.meta_path.insert(0, stand_ins.AtImport("mpi4py.MPI", lambda _: _say("joined")))
        _say("began")
    stdin.take(_rank, _folder)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The ranks share the output: each line is written at once and whole.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else ignored, as in the background of a shell
        _Interrupts()
    threading.excepthook = _fail_in_thread
    os._exit = _exit_at_once
    try:
        _run(arguments)
    except SystemExit as stop:
        if not _status(stop.code):
            raise
        if not isinstance(stop.code, int):
            _tell(f"{stop.code}\n")
        _tell(untold := _untold())
        _end(_status(stop.code), untold or (f"sys.exit({stop.code})" if isinstance(stop.code, int) else str(stop.code)))
    except BaseException as error:
        _fail(error)


if __name__ == "__main__":
    main()

"""One rank of `python -m jaxmpi.run`: runs the program, and ends the whole job if it fails.

Without this a rank that raises waits for the others in MPI_Finalize, and they wait for its messages.
"""

import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
import time
import traceback
import types
import zipfile


def _own_frames(trace):
    """The traceback from the program's first frame on."""
    own = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    return trace


def _formatted(error: BaseException) -> list[str]:
    """The lines of an exception and its causes, from the program's first frame on."""
    seen: list[BaseException | None] = [error]
    while (last := seen[-1]) is not None and last not in seen[:-1]:
        seen.append(last.with_traceback(_own_frames(last.__traceback__)).__cause__ or last.__context__)
    return traceback.format_exception(type(error), error, error.__traceback__)


def _end(code: int) -> None:
    """Ends all ranks if MPI is running, else this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.3)  # launchers may lose output that is written right before an abort
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(code)
    os._exit(code)


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Replaces a package by jaxmpi only when the program imports it, which can thus configure mpi4py before."""

    def __init__(self, name: str):
        self.name, self.package = name, name.partition("-")[0]

    def find_spec(self, fullname, path=None, target=None):
        if fullname == self.package:
            return importlib.machinery.ModuleSpec(fullname, self, origin="jaxmpi.compat", is_package=True)
        return None

    def create_module(self, spec):
        from jaxmpi.compat._install import INSTALLERS

        INSTALLERS[self.name]()
        return sys.modules[self.package]

    def exec_module(self, module):
        pass


def _take_a_device(assign: bool) -> None:
    """Makes this rank take a device when the program imports jax: the user's choice or, with `assign`, its own."""
    file = os.path.join(os.path.dirname(__file__), "placement.py")
    spec = importlib.util.spec_from_file_location("jaxmpi._launcher.placement", file)
    assert spec is not None
    assert spec.loader is not None
    placement = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(placement)
    sys.meta_path.insert(0, placement.AtImport(assign))


def _run_as_main(program: str) -> None:
    """Runs a script, or a zip file or folder with a `__main__.py`, in the module `__main__`."""
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
    while arguments[0] in ("--as", "--devices"):
        option, value, *arguments = arguments
        if option == "--as":
            sys.meta_path.insert(0, _StandIn(value))
        else:
            _take_a_device(value == "rank")
    # The program's definitions stay in `__main__`, for pickling, threads and exit handlers.
    sys.modules["__main__"] = types.ModuleType("__main__")
    vars(sys.modules["__main__"])["__builtins__"] = builtins
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path[0] = os.getcwd()
            _run_module(arguments[1])
        else:
            sys.argv = arguments
            _run_as_main(arguments[0])
    except SystemExit as stop:
        if not stop.code:
            _finish()
        raise
    _finish()


def _finish() -> None:
    """Waits for running computations: their errors belong to the program."""
    native = sys.modules.get("jaxmpi._native")
    if native is not None:
        native.finish()


def _untold() -> str:
    """The error of an operation that has not been reported: it may be the cause of a later one."""
    core = sys.modules.get("jaxmpi._core")
    failure = core.take_failure() if core is not None else None
    return f"jaxmpi.run: before that an operation had failed: {failure}\n" if failure else ""


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The ranks share the output: each line is written at once and whole.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    try:
        _run(sys.argv[1:])
    except SystemExit as stop:
        if stop.code is None or stop.code == 0:
            raise
        if not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
        sys.stderr.write(_untold())
        _end(stop.code if isinstance(stop.code, int) else 1)
    except BaseException as error:
        mpi = sys.modules.get("mpi4py.MPI")
        rank = f" on rank {mpi.COMM_WORLD.rank}" if mpi is not None and mpi.Is_initialized() else ""
        text = f"jaxmpi.run: uncaught exception{rank}:\n{''.join(_formatted(error))}"
        if isinstance(error, ModuleNotFoundError) and error.name in ("mpi4jax", "jpi"):
            text += f"jaxmpi.run: with jaxmpi in its place: --as {error.name}, before the program\n"
        sys.stderr.write(text + _untold())  # one write: the ranks share stderr
        _end(1)


if __name__ == "__main__":
    main()

"""One rank of `python -m jaxmpi.run`: runs the program, and ends the whole job if it fails.

Without this a rank that raises waits for the others in MPI's finalization, and they wait for its messages.
"""

import importlib.abc
import importlib.machinery
import io
import os
import runpy
import sys
import time
import traceback


def _own_frames(trace):
    """The traceback from the program's first frame on."""
    own = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    return trace


def _end(code: int) -> None:
    """Ends all ranks if MPI is running, else this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.3)  # launchers pass on what was written before, but not what comes together with an abort
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(code)
    os._exit(code)


class _StandIn(importlib.abc.MetaPathFinder):
    """Puts jaxmpi in the place of a package as the program first imports it, so that the program may set up mpi4py."""

    def __init__(self, name: str):
        self.name = name

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name.partition("-")[0]:
            return None
        sys.meta_path.remove(self)
        from jaxmpi.compat._install import INSTALLERS

        INSTALLERS[self.name]()
        return importlib.machinery.ModuleSpec(fullname, _Made(sys.modules.pop(fullname)), is_package=True)


class _Made(importlib.abc.Loader):
    """Hands over a module that is there already."""

    def __init__(self, module):
        self.module = module

    def create_module(self, spec):
        return self.module

    def exec_module(self, module):
        pass


def _run(arguments: list[str]) -> None:
    while arguments[0] == "--as":
        sys.meta_path.insert(0, _StandIn(arguments[1]))
        arguments = arguments[2:]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")
    jax = sys.modules.get("jax")
    if jax is not None:
        jax.effects_barrier()  # an error of what is still running belongs to the program


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # lines come out at once, and whole: the ranks share the output
    try:
        _run(sys.argv[1:])
    except SystemExit as stop:
        if stop.code is None or stop.code == 0:
            raise
        if not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
        _end(stop.code if isinstance(stop.code, int) else 1)
    except BaseException as error:
        mpi = sys.modules.get("mpi4py.MPI")
        rank = f" on rank {mpi.COMM_WORLD.rank}" if mpi is not None and mpi.Is_initialized() else ""
        lines = traceback.format_exception(type(error), error, _own_frames(error.__traceback__))
        # In one piece: the ranks share what they write to.
        sys.stderr.write(f"jaxmpi.run: uncaught exception{rank}:\n{''.join(lines)}")
        _end(1)


if __name__ == "__main__":
    main()

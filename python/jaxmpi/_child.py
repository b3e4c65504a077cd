"""One rank of `python -m jaxmpi.run`: runs the program, and ends the whole job if it fails.

Without this a rank that raises waits for the others in MPI's finalization, and they wait for its messages.
"""

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


def _run(arguments: list[str]) -> None:
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

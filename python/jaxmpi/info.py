"""The versions and devices in use, and the problems: `python -m jaxmpi.info`, alone or under mpiexec."""

import os
import platform
import sys
from collections.abc import Iterator

from jaxmpi import _start
from jaxmpi._mpi import import_errors
from jaxmpi_launch import mpiexec as launch
from jaxmpi_launch import sharded_state, versions


def facts() -> Iterator[tuple[str, str]]:
    """Yield pairs of name and value. Raise the same errors as an import of the package."""
    yield "jaxmpi", versions.shown("jaxmpi")
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "JAX", f"{versions.shown('jax')}, jaxlib {versions.shown('jaxlib')}"
    yield "mpi4py", versions.shown("mpi4py")
    _start.start()
    from jaxmpi import _core
    from jaxmpi._mpi import library
    from jaxmpi._mpi.library import MPI
    from jaxmpi._primitive import operation

    levels = {getattr(MPI, f"THREAD_{name.upper()}"): name for name in ("single", "funneled", "serialized", "multiple")}
    yield "MPI", " ".join(library.LIBRARY.version.split())
    yield "MPI library", library.LIBRARY.path
    yield "ABI copy", f"{library.LIBRARY.abi} (in {_core.__file__})"
    yield "thread level", levels[MPI.Query_thread()]
    yield "rank", f"{MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size} on {MPI.Get_processor_name()}"
    yield "mpiexec", launch.find_mpiexec() or "none"
    yield "cores", f"{launch.physical_cores()} for this process"
    import jax

    yield "devices", ", ".join(str(device) for device in jax.devices())
    choice = library.DEVICES
    yield "communicates on", ", ".join(choice.communicated)
    for name in choice.platforms:
        yield f"{name} devices", str(_core.device_count(name))
    for name, why_not in choice.drivers.items():
        if why_not is not None:
            yield f"no {name}", why_not
    if choice.platforms:
        yield (
            "device memory",
            "handed to MPI as it is" if choice.aware else f"copied for MPI, transport: {choice.transport}",
        )
        yield "because", choice.because
    if choice.nccl.asked:
        from jaxmpi._mpi.communicators import nccl_refusal

        parts = choice.nccl.version // 10000, choice.nccl.version // 100 % 100, choice.nccl.version % 100
        version = ".".join(str(part) for part in parts)
        why = nccl_refusal()
        yield "NCCL", f"not used: {why}" if why else f"{version} carries collectives (docs/gpu.md)"
    from jaxmpi.sharded import why_not_mpi

    reason = why_not_mpi()
    possible = f"--collectives gloo; not mpi: {reason}" if reason else "--collectives mpi or gloo"
    yield (
        "sharded programs",
        f"by {sharded_state.state.kind}" if sharded_state.state.kind is not None else f"not asked for ({possible})",
    )
    yield "eager programs", f"{operation.eager_programs()} kept, 4096 at most for each communicator"


def problems() -> Iterator[str]:
    """Yield problems and reasons for low speed, each with advice."""
    import jax
    from mpi4py import MPI

    from jaxmpi._mpi import launch_check, library

    if problem := versions.unmet():
        yield problem
    abi, path = library.LIBRARY.abi, library.LIBRARY.path
    mpiexec = launch.find_mpiexec()
    problem = launch_check.text(MPI.COMM_WORLD.size, abi, path, os.environ)
    if not problem and mpiexec is not None and MPI.COMM_WORLD.size == 1:
        problem = launch_check.of_another(mpiexec, launch.flavour(mpiexec), abi, path)
    if problem:
        yield problem
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        yield (
            "MPI is below MPI_THREAD_MULTIPLE: operations run one at a time, and mpi4py must not be used while one "
            "runs. Leave mpi4py.rc.thread_level at 'multiple'."
        )
    if mpiexec is None:
        how = import_errors.how_to_install(import_errors.packages())
        yield f"no mpiexec found in this environment or on PATH: {how}."
    elif len(packages := import_errors.packages()) > 1:
        yield f"{import_errors.how_to_install(packages)}."
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    threads = int(os.environ.get("PJRT_NPROC") or len(launch.usable_cpus()))
    if threads > 1 and node.size > 1 and threads * node.size > (os.cpu_count() or 1):
        yield (
            f"{node.size} ranks on this machine share its cores, and each has XLA threads for all cores that it may "
            "use. Launch with 'python -m jaxmpi.run -n N'."
        )
    node.Free()
    platforms = {device.platform for device in jax.devices()} | {jax.default_backend()}
    aliases = {"gpu": {"cuda", "rocm", "oneapi"}}
    if not any(aliases.get(name, {name}).intersection(library.DEVICES.communicated) for name in platforms):
        backend = jax.default_backend()
        yield f"the default backend is {backend}, whose arrays cannot be communicated. Set JAX_PLATFORMS=cpu."


def main() -> int:
    try:
        for name, value in facts():
            print(f"{name:16} {value}", flush=True)
        listed = list(problems())
    except Exception as error:  # the package cannot be loaded, or JAX cannot open its backend
        known = isinstance(error, (ImportError, RuntimeError, ValueError))
        listed = [str(error) if known else f"{type(error).__name__}: {error}"]
    for problem in listed:
        print(f"{'problem':16} {problem}")
    if not listed:
        print(f"{'problems':16} none found")
    return 1 if listed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # `| head`. Otherwise the flush at the end of Python would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

"""The same suite on any number of ranks: `pytest`, or `python -m jaxmpi.run -n N -m pytest`.

Every rank runs every test. Rank 0 reports; another rank writes to a buffer that is shown if one of its tests fails.
A test that takes too long prints all stacks and ends the job and what it has started (support/limits.py), so a deadlock
fails instead of hanging.
"""

import io
import os
import sys
import tempfile
import textwrap
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support import drawing, durations, limits, quick, rows, simulated

simulated.begin()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_ENABLE_X64", "1")
# Most of the time is XLA's, and most of it for programs that another rank, test or suite has compiled before; what is
# left is JAX's on its way to XLA, a tenth of it for the lines that an operation comes from.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).resolve().parent.parent / ".build" / "compiled"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# JAX does not write an entry at once: a rank of a job that reads what another one is writing warns, and compiles.
_shared = ("Error reading persistent compilation cache", "Error writing persistent compilation cache")
os.environ.setdefault("PYTHONWARNINGS", ",".join(f"ignore:{text}" for text in _shared))
quick.begin()

import jax  # noqa: E402 (what is set above counts from here on)
import pytest  # noqa: E402
from mpi4py import MPI  # noqa: E402

import jaxmpi  # noqa: E402
from jaxmpi._mpi.library import DEVICES  # noqa: E402
from jaxmpi._mpi.settings import SETTINGS  # noqa: E402
from support import selection  # noqa: E402

if os.environ.get("JAXMPI_TEST_SYNCHRONOUS"):  # JAX reads no variable for that
    jax.config.update("jax_cpu_enable_async_dispatch", False)
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
if SETTINGS.device_transport == "nccl":  # NCCL refuses ranks that share a device, unless they seem to be on other hosts
    os.environ.setdefault("NCCL_HOSTID", f"rank-{RANK}")
if SIZE == 1:  # otherwise the launcher ends all ranks
    limits.begin()
else:  # in one folder the ranks would remove each other's old files at the same time
    own = Path(tempfile.gettempdir()) / f"jaxmpi-tests-of-rank-{RANK}"
    own.mkdir(exist_ok=True)
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(own))
_hidden = io.StringIO()
_device = simulated.Device() if simulated.TRANSPORT else None


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    drawing.brief = config.getoption("brief")
    rows.apart = bool(config.getoption("keyword"))
    if jax.default_backend() != "cpu" or simulated.TRANSPORT:
        # There computations fail after their calls have returned, and the next one warns.
        config.addinivalue_line("filterwarnings", "ignore:jaxmpi. an earlier computation failed")
    if RANK > 0:
        config.pluginmanager.getplugin("terminalreporter")._tw._file = _hidden


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    marker = item.get_closest_marker("seconds")
    limits.start(marker.args[0] if marker else limits.SECONDS)
    begun = durations.record(item, RANK, SIZE)
    result = yield
    durations.record(item, RANK, SIZE, begun)
    limits.stop()
    return result


@pytest.fixture(autouse=True)
def _rules():
    """No test may break a rule of the simulated device's driver."""
    yield
    if _device is not None:
        _device.check()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """JAX 0.6 has no derivatives of communication; what it refuses on all ranks alike is not tested there."""
    try:
        return (yield)
    except NotImplementedError as error:
        if "derivatives of communication need JAX 0.7" in str(error):
            pytest.skip("this JAX has no derivatives of communication")
        raise


def pytest_sessionfinish(session, exitstatus):
    if exitstatus == 0 and jax.default_backend() != "cpu":  # an error that the last test expects is not the program's
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            jaxmpi.barrier()
    if _device is not None:
        _device.end()
    session.config.failed = exitstatus not in (0, 5)


def pytest_unconfigure(config):
    """Shows what another rank has to say, and lets all reports come out before a failure ends the job."""
    if RANK > 0 and getattr(config, "failed", True):
        print(f"--- rank {RANK} ---\n{_hidden.getvalue()}", file=sys.__stderr__)
    sys.stdout.flush()
    sys.__stderr__.flush()
    everyone = MPI.COMM_WORLD.Ibarrier()
    deadline = time.monotonic() + 20
    while not everyone.Test() and time.monotonic() < deadline:
        time.sleep(0.01)


def pytest_addoption(parser):
    parser.addoption(
        "--brief",
        action="store_true",
        help="leave out tests marked nightly, and all but the first and the last case of those marked sampled; draw "
        "fewer random cases",
    )


def pytest_collection_modifyitems(config, items):
    if config.getoption("brief"):
        items[:], others = selection.shortened(items, SIZE)
        config.hook.pytest_deselected(items=others)
    for item in items:
        if why := selection.left_out(item, SIZE):
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture
def own_errors():
    """Operations raise errors of MPI themselves: those left to a device's stream do not, a later one does."""
    if jax.default_backend() != "cpu" and not DEVICES.aware and DEVICES.transport in ("callback", "flags"):
        pytest.skip("operations are left to the device's stream, and a later one raises their errors")


@pytest.fixture
def comm():
    return MPI.COMM_WORLD


@pytest.fixture
def rank():
    return RANK


@pytest.fixture
def size():
    return SIZE


@pytest.fixture
def two_threads(comm):
    """Runs `work(communicator, i)` in two threads at once, each on its own communicator; their errors are raised."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("MPI without threads")
    if simulated.BY_NCCL:
        pytest.skip("with NCCL one thread communicates: tests/mpi/test_nccl.py")
    parts = [comm.Dup(), comm.Dup()]

    def run(work):
        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(work, part, i) for i, part in enumerate(parts)]:
                future.result()

    yield run
    for part in parts:
        part.Free()


@pytest.fixture(autouse=True)
def _together():
    """All ranks begin a test together, so that no message of the next one is taken for one of this one."""
    MPI.COMM_WORLD.Barrier()


@pytest.fixture
def script(tmp_path):
    """Writes a program, with what nearly all begin with in front, and returns its path."""

    def write(text):
        path = tmp_path / "program.py"
        path.write_text(
            "import jax, jax.numpy as jnp\nfrom mpi4py import MPI\nimport jaxmpi\n"
            "rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size\n" + textwrap.dedent(text)
        )
        return path

    return write

"""Arrays in a device's memory: detection and choice; on a simulated device chunks, deferred errors, the report.

The other suites test the operations, run on a simulated device: `make test-device`. tests/device/test_device.c tests
failures of the driver.
"""

import os
import warnings
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import jaxmpi
from jaxmpi._mpi import devices
from jaxmpi._mpi.settings import Settings
from jaxmpi_launch import accelerators
from support import simulated
from support.launch import launch, written
from support.rows import each

on_device = pytest.mark.skipif(not simulated.TRANSPORT, reason="needs the simulated device: make test-device")
OPEN_MPI, MPICH = "Open MPI v5.0.11", "MPICH Version: 5.0.0"
INTEL = "Intel(R) MPI Library 2021.15"
CRAY, MVAPICH = "MPI VERSION : CRAY MPICH version 8.1.29", "MVAPICH Version : 3.0"
CUDA, GPU = "MPIX_Query_cuda_support", "MPIX_GPU_query_support"


@pytest.mark.parametrize(
    ("platform", "version", "answers", "environment", "expected", "said"),
    [
        ("CUDA", OPEN_MPI, {CUDA: True}, {}, True, "MPIX_Query_cuda_support says yes"),
        ("CUDA", OPEN_MPI, {CUDA: False}, {}, False, "MPIX_Query_cuda_support says no"),
        ("ROCM", OPEN_MPI, {CUDA: True, "MPIX_Query_rocm_support": False}, {}, False, "rocm_support says no"),
        ("CUDA", MPICH, {(GPU, 0): True}, {}, True, "says yes to cuda"),
        ("ROCM", MPICH, {(GPU, 0): True, (GPU, 2): False}, {}, False, "says no to rocm"),
        ("ROCM", MPICH, {(GPU, 2): True}, {}, True, "says yes to rocm"),
        ("CUDA", MPICH, {(GPU, 0): True}, {"MPIR_CVAR_ENABLE_GPU": "0"}, False, "MPIR_CVAR_ENABLE_GPU is 0"),
        ("CUDA", CRAY, {(GPU, 0): True}, {}, False, "MPICH_GPU_SUPPORT_ENABLED is 0"),
        ("ROCM", CRAY, {}, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, True, "MPICH_GPU_SUPPORT_ENABLED is 1"),
        ("CUDA", MVAPICH, {}, {"MV2_USE_CUDA": "1"}, True, "MV2_USE_CUDA is 1"),
        ("CUDA", MVAPICH, {}, {"MV2_USE_ROCM": "1"}, False, "neither MVP_USE_CUDA nor MV2_USE_CUDA is 1"),
        ("CUDA", INTEL, {}, {"I_MPI_OFFLOAD": "1"}, False, "I_MPI_OFFLOAD is 1"),
        ("CUDA", INTEL, {}, {"I_MPI_OFFLOAD": "1", "I_MPI_OFFLOAD_MODE": "cuda"}, True, "I_MPI_OFFLOAD_MODE is cuda"),
        ("CUDA", INTEL, {}, {"I_MPI_OFFLOAD_MODE": "cuda"}, False, "I_MPI_OFFLOAD is 0"),
        ("ROCM", INTEL, {}, {"I_MPI_OFFLOAD": "1"}, False, "I_MPI_OFFLOAD is 1"),
        ("ONEAPI", INTEL, {}, {"I_MPI_OFFLOAD": "1"}, True, "I_MPI_OFFLOAD is 1"),
        (
            "ONEAPI",
            INTEL,
            {},
            {"I_MPI_OFFLOAD": "1", "I_MPI_OFFLOAD_MODE": "cuda"},
            False,
            "I_MPI_OFFLOAD_MODE is cuda",
        ),
        ("ONEAPI", INTEL, {}, {}, False, "I_MPI_OFFLOAD is 0"),
        ("ONEAPI", INTEL, {}, {"I_MPI_OFFLOAD": "off"}, False, "I_MPI_OFFLOAD is off"),
        ("ONEAPI", "Intel(R) MPI Library 2021.9", {}, {"I_MPI_OFFLOAD": "1"}, False, "I_MPI_OFFLOAD is 1"),
        ("ONEAPI", "Intel(R) MPI Library 2021.9", {}, {"I_MPI_OFFLOAD": "2"}, True, "I_MPI_OFFLOAD is 2"),
        ("ONEAPI", MPICH, {(GPU, 0): True, (GPU, 1): False}, {}, False, "says no to ze"),
        ("ONEAPI", MPICH, {(GPU, 1): True}, {}, True, "says yes to ze"),
        ("ONEAPI", CRAY, {}, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, True, "MPICH_GPU_SUPPORT_ENABLED is 1"),
        ("ONEAPI", OPEN_MPI, {CUDA: True}, {}, False, "no way to ask"),
    ],
)
def test_detected(monkeypatch, platform, version, answers, environment, expected, said):
    def ask(name, kind=None):
        return answers.get(name if kind is None else (name, kind))

    monkeypatch.setattr(devices._core, "ask_mpi", ask)
    no_kinds = SimpleNamespace(COMM_WORLD=SimpleNamespace(Get_info=MPI.Info.Create))  # MPICH's has some
    monkeypatch.setattr(devices, "MPI", no_kinds)
    answer, text = devices.detected(platform, version, environment)
    assert answer is expected
    assert said in text


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"JAXMPI_DEVICE_MPI": "auto"}, None),
        ({"JAXMPI_DEVICE_MPI": ""}, None),
        ({"JAXMPI_DEVICE_MPI": "on"}, True),
        ({"JAXMPI_DEVICE_MPI": " Off "}, False),
        ({"MPI4JAX_USE_CUDA_MPI": "1"}, True),
        ({"MPI4JAX_USE_CUDA_MPI": "0"}, False),
        ({"MPI4JAX_USE_SYCL_MPI": "1"}, None),
        ({"JAXMPI_DEVICE_MPI": "off", "MPI4JAX_USE_CUDA_MPI": "1"}, False),
        ({"JAXMPI_DEVICE_MPI": "auto", "MPI4JAX_USE_CUDA_MPI": "1"}, True),
    ],
)
def test_switch(environment, expected):
    settings = Settings.from_environment(environment)
    assert devices._switch(settings, ["CUDA"])[0] is expected
    if "MPI4JAX_USE_SYCL_MPI" in environment:
        assert devices._switch(settings, ["ONEAPI"]) == (True, "MPI4JAX_USE_SYCL_MPI=on")


@pytest.mark.parametrize(
    ("environment", "aware", "calls_driver", "survives", "expected"),
    [
        ({}, False, False, False, "callback"),
        ({}, False, True, False, "wait"),
        ({}, True, False, False, "wait"),
        ({}, False, False, True, "wait"),
        ({"JAXMPI_DEVICE_TRANSPORT": "wait"}, False, False, False, "wait"),
        ({"JAXMPI_DEVICE_TRANSPORT": "callback"}, True, True, True, "callback"),
        ({"JAXMPI_DEVICE_TRANSPORT": "flags"}, True, True, True, "flags"),
        ({"JAXMPI_DEVICE_TRANSPORT": "AUTO"}, False, False, False, "callback"),
    ],
)
def test_transport(environment, aware, calls_driver, survives, expected):
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        expected = "wait"
    wish = Settings.from_environment(environment).device_transport
    assert devices._transport(wish, True, aware, calls_driver, survives)[0] == expected


NCCL = {"JAXMPI_DEVICE_TRANSPORT": "nccl"}
FLAGS, CHUNK = {"JAXMPI_DEVICE_TRANSPORT": "flags"}, {"JAXMPI_DEVICE_CHUNK": " 8192 "}
ONE, BOTH = {"CUDA": None, "ROCM": "no driver"}, {"CUDA": None, "ROCM": None}
INTELS = {"CUDA": "no driver", "ROCM": "no driver", "ONEAPI": None}
AWARE = {"CUDA": (True, "CUDA: yes"), "ROCM": (False, "ROCM: no")}
CHOICES = [
    # the driver of a platform that decides has flags, or has none
    (FLAGS, "cuda", BOTH, {"flags": {"CUDA": True, "ROCM": False}}, {"transport": "flags", "flags_asked": True}),
    ({}, "cuda", BOTH, {"flags": {"CUDA": True, "ROCM": True}}, {"transport": "callback", "flags_asked": False}),
    (
        FLAGS,
        "cuda",
        BOTH,
        {"flags": {"CUDA": False, "ROCM": True}},
        "the driver of CUDA has no.*leave the variable out",
    ),
    ({"JAXMPI_DEVICE_TRANSPORT": "wait"}, "cuda", BOTH, {"flags": {}}, {"transport": "wait"}),
    # a program that runs on CPUs too may ask for them
    (FLAGS, None, {"CUDA": "no driver"}, {}, {"platforms": []}),
    # Intel's devices: with JAX's plugin; their streams take no calls
    ({}, None, INTELS, {}, {"platforms": ["ONEAPI"], "transport": "wait", "chunk": devices.CHUNK}),
    ({"JAXMPI_DEVICE_TRANSPORT": "callback"}, "oneapi,cpu", INTELS, {}, {"transport": "wait"}),
    (
        FLAGS,
        None,
        INTELS,
        {"flags": {"ONEAPI": False}},
        "the driver of ONEAPI has no.*wait for them: leave the variable",
    ),
    (NCCL, None, INTELS, {}, {"transport": "wait", "nccl": devices.Nccl(1)}),
    ({}, None, {"CUDA": None, "ONEAPI": None}, {"counts": {"CUDA": 1, "ONEAPI": 1}}, {"transport": "callback"}),
    ({}, "cuda", {"CUDA": None, "ONEAPI": None}, {}, {"transport": "callback", "platforms": ["CUDA", "ONEAPI"]}),
    ({}, None, {**INTELS, "plugin": False}, {}, {"platforms": [], "transport": "callback", "chunk": 0}),
    ({}, None, {"CUDA": None, "ONEAPI": None, "plugin": False}, AWARE, {"aware": True, "platforms": ["CUDA"]}),
    # chunks
    ({}, None, ONE, {}, {"chunk": devices.CHUNK, "everywhere": False}),
    ({}, "cuda,cpu", ONE, {}, {"chunk": devices.CHUNK}),
    ({}, "gpu", ONE, {}, {"chunk": devices.CHUNK}),
    ({}, "cpu", ONE, {}, {"chunk": 0}),
    ({}, "rocm", ONE, {}, {"chunk": 0}),
    ({}, None, ONE, AWARE, {"chunk": 0}),
    ({}, None, {"CUDA": "no driver"}, {}, {"chunk": 0}),
    (CHUNK, "cpu", {"CUDA": "no driver"}, {}, {"chunk": 8192, "everywhere": True}),
    ({"JAXMPI_DEVICE_CHUNK": "0"}, None, ONE, {}, {"chunk": 0, "everywhere": True}),
    # a driver without devices does not decide: the MPI library reaches the memory of CUDA's alone
    ({}, None, BOTH, {**AWARE, "counts": {"CUDA": 1, "ROCM": 0}}, {"aware": True, "because": "CUDA: yes"}),
    ({}, None, BOTH, {**AWARE, "counts": {"CUDA": 0, "ROCM": 2}}, {"aware": False, "because": "ROCM: no"}),
    ({}, None, BOTH, {**AWARE, "counts": {"CUDA": 1, "ROCM": 1}}, {"aware": False, "because": "CUDA: yes; ROCM: no"}),
    ({}, None, BOTH, {**AWARE, "counts": {"CUDA": 0, "ROCM": 0}}, {"aware": False, "because": "CUDA: yes; ROCM: no"}),
    ({}, "cuda,cpu", BOTH, AWARE, {"aware": True, "because": "CUDA: yes", "platforms": ["CUDA", "ROCM"]}),
    ({}, "rocm", BOTH, AWARE, {"aware": False, "because": "ROCM: no"}),
    ({}, "cpu", BOTH, AWARE, {"aware": False, "because": "CUDA: yes; ROCM: no"}),
    # NCCL
    ({}, "cuda", ONE, {}, {"nccl": devices.Nccl()}),
    (NCCL, "cuda", ONE, {"nccl": 22809}, {"transport": "callback", "nccl": devices.Nccl(0, 22809)}),
    (NCCL, "rocm,cpu", BOTH, {"nccl": 22809}, {"nccl": devices.Nccl(0, 22809, rccl=True)}),
    (NCCL, "cuda", ONE, {"nccl": "why not"}, {"nccl": devices.Nccl(2, why="why not")}),
    (NCCL, "cpu", ONE, {}, {"nccl": devices.Nccl(1)}),
    (NCCL, "cuda,rocm", BOTH, {"counts": {"CUDA": 1, "ROCM": 1}}, {"nccl": devices.Nccl(1)}),
    (NCCL, "cuda", ONE, AWARE, {"transport": "wait", "nccl": devices.Nccl(3)}),
    (NCCL, "cuda", {"CUDA": "no driver"}, {}, {"platforms": [], "nccl": devices.Nccl(1)}),
]
"""Settings, JAX's platforms, drivers (and whether JAX has the plugin for Intel's devices), the answers of drivers and
libraries, and members of the choice, or an error."""


def test_choice_of_devices(monkeypatch):
    def check(row):
        environment, platforms, drivers, answers, expected = row
        has_plugin = drivers.get("plugin", True)
        drivers = {name: why_not for name, why_not in drivers.items() if name != "plugin"}
        monkeypatch.setattr(accelerators, "has_plugin", lambda platform: platform != "ONEAPI" or has_plugin)
        monkeypatch.setattr(devices, "has_plugin", accelerators.has_plugin)
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE and ("flags" in answers or environment == NCCL):
            return
        monkeypatch.setattr(devices._core, "drivers", lambda: drivers)
        monkeypatch.setattr(devices._core, "driver_loaded", lambda: False)
        monkeypatch.setattr(devices._core, "flags", lambda: answers["flags"])
        monkeypatch.setattr(devices._core, "open_nccl", lambda platform, device, path: answers["nccl"])
        monkeypatch.setattr(devices.MPI, "Get_library_version", lambda: MPICH)
        monkeypatch.setattr(devices, "_libraries", lambda platform: ["library"])
        count = lambda platform: answers["counts"][platform]  # noqa: E731 ; a KeyError if no driver may be asked
        monkeypatch.setattr(devices._core, "device_count", count)
        monkeypatch.setattr(devices, "detected", lambda platform, *_: answers.get(platform, (False, "")))
        settings = Settings.from_environment(environment)
        if isinstance(expected, str):
            with pytest.raises(ValueError, match=expected):
                devices.choose(settings, {}, platforms)
            return
        choice = devices.choose(settings, environment, platforms)
        chosen = {name: getattr(choice, name) for name in expected}
        chosen["because"] = choice.because.partition("; the MPI library")[0]
        assert chosen == {"because": chosen["because"], **expected}

    each(CHOICES, check)


def test_first_device(monkeypatch):
    """The first device that JAX uses, by the driver's number: the launcher gives each rank another one."""
    for visible, first in (("all", 0), ("2", 2), ("1,0", 1), (" 3, 1", 3)):
        monkeypatch.setattr(devices.jax.config, "read", {"jax_rocm_visible_devices": visible}.get)
        assert devices._first_device("ROCM") == first


def test_a_second_mpi(monkeypatch):
    """JAX's plugin for Intel's devices loads an MPI library, so that a job with Open MPI has two."""
    monkeypatch.setattr(devices._core, "drivers", lambda: dict(INTELS))
    monkeypatch.setattr(devices, "has_plugin", lambda platform: True)
    monkeypatch.setattr(accelerators, "has_plugin", lambda platform: True)
    for version, platforms, warned in [(OPEN_MPI, None, True), (OPEN_MPI, "cpu", False), (MPICH, None, False)]:
        monkeypatch.setattr(devices.MPI, "Get_library_version", lambda version=version: version)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            devices.choose(Settings.from_environment({}), {}, platforms)
        texts = [str(warning.message) for warning in caught]
        assert len(texts) == (warned and MPI.COMM_WORLD.rank == 0), texts
        assert all("two MPI libraries in one process" in text for text in texts)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("JAXMPI_DEVICE_MPI", "maybe"),
        ("MPI4JAX_USE_CUDA_MPI", "2"),
        ("MPI4JAX_USE_SYCL_MPI", "yes please"),
        ("JAXMPI_DEVICE_TRANSPORT", "short"),
        *(("JAXMPI_DEVICE_CHUNK", value) for value in ("100", "4 MiB", "²", "9" * 30)),
    ],
)
def test_wrong_values(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}: it is "):
        Settings.from_environment({name: value})


# --- on the simulated device, whose chunks have 4096 bytes ---------------------------------------------------------


@on_device
@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 1024, 5000])
@pytest.mark.parametrize("own", [False, True], ids=["default", "own"])
def test_chunks(count, own, rank, size):
    """Large arrays go in more chunks than can be under way at one time. `count`: the elements of an array."""
    comm = MPI.COMM_WORLD if own else None
    xs = [np.random.default_rng([count, r]).integers(0, 9, count).astype(np.float64) for r in range(size)]
    x = jnp.asarray(xs[rank])
    for root in range(size):
        np.testing.assert_array_equal(jaxmpi.bcast(x, root, comm=comm), xs[root])
        expected = sum(xs) if rank == root else xs[rank]
        np.testing.assert_array_equal(jaxmpi.reduce(x, MPI.SUM, root, comm=comm), expected)
        gathered = np.stack(xs) if rank == root else xs[rank]
        np.testing.assert_array_equal(jaxmpi.gather(x, root, comm=comm), gathered)
        parts = np.arange(size * count).reshape(size, count) + root
        part = jaxmpi.scatter(jnp.asarray(parts if rank == root else parts[0]), root, comm=comm)
        np.testing.assert_array_equal(part, parts[rank])
    y = sum(xs)
    np.testing.assert_array_equal(jaxmpi.allreduce(x, MPI.SUM, comm=comm), y)
    np.testing.assert_array_equal(jaxmpi.scan(x, MPI.SUM, comm=comm), sum(xs[: rank + 1]))
    np.testing.assert_array_equal(jaxmpi.allgather(x, comm=comm), np.stack(xs))
    sent = jnp.stack([x * (r + 1) for r in range(size)])
    np.testing.assert_array_equal(jaxmpi.alltoall(sent, comm=comm), np.stack(xs) * (rank + 1))
    halves = [z.astype(jnp.bfloat16) for z in xs]
    np.testing.assert_array_equal(
        jaxmpi.allreduce(jnp.asarray(halves[rank]), MPI.MAX, comm=comm), np.max(halves, axis=0)
    )
    loop = jax.jit(lambda v: jax.lax.fori_loop(0, 3, lambda i, w: jaxmpi.allreduce(w, MPI.SUM, comm=comm) / size, v))
    np.testing.assert_allclose(loop(x), y / size, rtol=1e-12)


def program(tmp_path, *texts):
    """Write a program on the simulated device. The bridge leaves deferred errors to the next operation, as XLA does."""
    head = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from support import simulated
        simulated.begin()
        import jax, jax.numpy as jnp, jaxmpi
        from jaxmpi import _core
        from mpi4py import MPI
        rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        device = simulated.Device(deferring=True)
        x = jnp.arange(6.0)
    """
    return written(tmp_path, head, *texts)


def in_jobs(test):
    return on_device(pytest.mark.alone(pytest.mark.sampled(pytest.mark.seconds(200)(test))))


leaves = pytest.mark.skipif(not simulated.LEAVES, reason="the operation itself raises errors of MPI")
TOO_LONG = """
    def exchange():
        if rank == 0:
            jaxmpi.send(x, 1)
        else:
            return jaxmpi.recv(x[:2], 0)
"""


@in_jobs
@leaves
@pytest.mark.parametrize("kind", ["jaxmpi.jit", "jax.jit", "eager"])
def test_the_next_operation_says(tmp_path, kind):
    """MPI fails after the call has returned: the result is NaN, the next operation raises, the one after it works."""
    if kind == "jax.jit" and simulated.BY_NCCL:
        pytest.skip("a thread of the simulation executes what NCCL carries, and not the thread that defers errors")
    more = f"""
    result = exchange()
    f = lambda v: jaxmpi.allreduce(v, MPI.SUM, comm=MPI.COMM_SELF)
    f = {{"jaxmpi.jit": jaxmpi.jit, "jax.jit": jax.jit, "eager": lambda f: f}}[{kind!r}](f)
    said = ""
    try:
        f(x).block_until_ready()
    except RuntimeError as error:
        said = str(error)
    if rank == 1:
        assert jnp.isnan(result).all(), result
        assert "an operation before it has failed" in said and "would be truncated" in said, said
    else:
        assert not said, said
    assert (f(x) == x).all()
    print("said;", flush=True)
    """
    assert launch(2, program(tmp_path, TOO_LONG, more)).stdout.count("said;") == 2


@in_jobs
@leaves
@pytest.mark.parametrize("end", ["", "sys.exit(0)", "sys.exit(3)", "raise ValueError('it diverges')"])
def test_the_end_says(tmp_path, end):
    """No operation follows one that has failed: however the program ends, the job ends with the error."""
    done = launch(2, program(tmp_path, TOO_LONG, f"exchange()\nif rank == 1:\n    {end or 'pass'}\n"), check=False)
    assert done.returncode != 0
    assert done.stderr.count("would be truncated") in (1, 2)  # by the rank, and in the launcher's last line
    assert ("it diverges" in done.stderr) == ("diverges" in end)


@in_jobs
@pytest.mark.parametrize("value", ["on", "off", "auto"])
def test_forced(tmp_path, value):
    """The job has one warning if device pointers are forced on a library that is not known to take them."""
    program = "import jaxmpi; print('aware', jaxmpi._mpi.library.DEVICES.aware, flush=True)"
    clean = {name: "" for name in ("LD_PRELOAD", "JAXMPI_DEVICE_TRANSPORT") if name in os.environ}
    done = launch(2, "-c", program, JAXMPI_DEVICE_MPI=value, JAX_PLATFORMS="cuda,cpu", **clean)
    assert done.stdout.count(f"aware {value == 'on'}") == 2
    assert done.stderr.count("RuntimeWarning: jaxmpi: JAXMPI_DEVICE_MPI=on hands") == (value == "on")
    assert ("says no" in done.stderr) == (value == "on")


@in_jobs
def test_report():
    done = launch(1, "-m", "jaxmpi.info")
    aware = simulated.TRANSPORT == "aware"
    more = ", oneapi" if simulated.TRANSPORT == "sycl" else ""
    assert f"communicates on  cpu, cuda, rocm{more}\n" in done.stdout
    transport = {"nccl": "callback", "mixed": "callback", "sycl": "wait"}.get(simulated.TRANSPORT, simulated.TRANSPORT)
    assert ("handed to MPI as it is" if aware else f"copied for MPI, transport: {transport}") in done.stdout
    assert ("says yes" if aware else "says no") in done.stdout


@on_device
def test_lowering(comm):
    """A program lowered for a GPU calls the same target. For another platform, lowering is refused."""
    f = jax.jit(lambda x: jaxmpi.allreduce(x, MPI.SUM, comm=comm))
    assert "@jaxmpi_allreduce" in f.trace(jnp.ones(3)).lower(lowering_platforms=("cuda",)).as_text()
    assert "@jaxmpi_allreduce" in f.trace(jnp.ones(3)).lower(lowering_platforms=("rocm",)).as_text()
    if simulated.TRANSPORT == "sycl":
        assert "@jaxmpi_allreduce" in f.trace(jnp.ones(3)).lower(lowering_platforms=("oneapi",)).as_text()
    with pytest.raises(NotImplementedError, match="allreduce: arrays on tpu cannot be communicated"):
        f.trace(jnp.ones(3)).lower(lowering_platforms=("tpu",))


@pytest.mark.skipif(bool(simulated.TRANSPORT), reason="there is a driver")
def test_lowering_without_driver(comm):
    f = jax.jit(lambda x: jaxmpi.allreduce(x, MPI.SUM, comm=comm))
    reasons = {"cuda": r"libcuda\.so\.1"} if devices.count("CUDA") == 0 else {}
    if "oneapi" in jax._src.xla_bridge.known_platforms():
        reasons["oneapi"] = "jax-oneapi-plugin, is not installed"
    for platform, reason in reasons.items():
        with pytest.raises(NotImplementedError, match=f"{reason}.*JAX_PLATFORMS=cpu"):
            f.trace(jnp.ones(3)).lower(lowering_platforms=(platform,))

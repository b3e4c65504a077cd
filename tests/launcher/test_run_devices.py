"""The device that each rank takes under the launcher: the choice as a table, its way to JAX, whole runs."""

import os
import textwrap
from types import SimpleNamespace

import pytest

from jaxmpi_launch import accelerators, command
from support.launch import launch
from support.rows import one_each_time

pytestmark = [pytest.mark.alone, pytest.mark.sampled]
FAKES = os.environ.get("JAXMPI_FAKE_DRIVERS")  # the folder of tests/device/fake_driver.c as libcuda.so.1
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def ranked(rank, size, **more):
    return {"OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": str(size), **more}


def cuda(device, fraction=None):
    return {"JAX_CUDA_VISIBLE_DEVICES": device, **({FRACTION: fraction} if fraction else {})}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, (1, 4)),
        ({"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}, (1, 4)),
        ({"PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4"}, (1, 4)),
        ({"MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_LOCAL_SIZE": "4"}, (1, 4)),
        ({"JSM_NAMESPACE_LOCAL_RANK": "1", "JSM_NAMESPACE_LOCAL_SIZE": "4"}, (1, 4)),
        ({"FLUX_TASK_LOCAL_ID": "1"}, (1, None)),
        ({"SLURM_LOCALID": "1"}, (1, None)),
        ({"SLURM_LOCALID": "1", "SLURM_TASKS_PER_NODE": "4"}, (1, 4)),
        ({"SLURM_LOCALID": "1", "SLURM_TASKS_PER_NODE": "4(x2)"}, (1, None)),
        ({"SLURM_LOCALID": "1", "SLURM_TASKS_PER_NODE": "four"}, (1, None)),
        ({"SLURM_LOCALID": "one"}, None),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, (2, None)),
        # mpiexec inside a job of the scheduler: every rank inherits the first task's number
        (ranked(3, 4, SLURM_LOCALID="0", SLURM_TASKS_PER_NODE="1", SLURM_NODEID="0"), (3, 4)),
    ],
)
def test_launchers(environment, place):
    assert accelerators.local_rank(environment) == place


@pytest.mark.parametrize(
    ("counts", "environment", "chosen"),
    [
        ({"CUDA": 4}, ranked(2, 4), cuda("2")),
        ({"ROCM": 8}, ranked(7, 8), {"JAX_ROCM_VISIBLE_DEVICES": "7"}),
        (
            {"ONEAPI": 6},
            ranked(7, 12, ZE_AFFINITY_MASK="0,1,2,3,4,5"),
            {"JAX_ONEAPI_VISIBLE_DEVICES": "1", FRACTION: "0.37"},
        ),
        ({"ONEAPI": 1}, ranked(7, 12, ZE_AFFINITY_MASK="3"), {}),
        ({"ONEAPI": 4}, ranked(3, 4, ONEAPI_DEVICE_SELECTOR="level_zero:2"), {}),
        ({"ONEAPI": 4}, ranked(3, 4, I_MPI_OFFLOAD="1"), {}),
        ({"ONEAPI": 4}, ranked(3, 4, I_MPI_OFFLOAD="0"), {"JAX_ONEAPI_VISIBLE_DEVICES": "3"}),
        ({"CUDA": 4}, {"FLUX_TASK_LOCAL_ID": "6"}, cuda("2")),
        ({"CUDA": 4}, {}, {}),
        ({}, ranked(1, 2), {}),
        ({"CUDA": 0}, ranked(1, 2), {}),
        ({"CUDA": 1}, ranked(0, 1), {}),
        # ranks that share
        ({"CUDA": 4}, ranked(5, 8), cuda("1", "0.37")),
        ({"CUDA": 3}, ranked(3, 8), cuda("0", "0.25")),
        ({"CUDA": 4}, ranked(4, 5), cuda("0", "0.37")),
        ({"CUDA": 1}, ranked(1, 2), {FRACTION: "0.37"}),
        ({"CUDA": 1}, ranked(1, 100), {FRACTION: "0.01"}),
        ({"CUDA": 1}, ranked(0, 4, CUDA_VISIBLE_DEVICES="2"), {}),
        ({"CUDA": 2}, ranked(3, 4, CUDA_VISIBLE_DEVICES="2,3"), cuda("1", "0.37")),
        ({"CUDA": 1}, ranked(0, 2, XLA_PYTHON_CLIENT_MEM_FRACTION="0.2"), {}),
        ({"CUDA": 1}, ranked(0, 2, XLA_CLIENT_MEM_FRACTION="0.2"), {}),
        ({"CUDA": 1}, ranked(0, 2, XLA_PYTHON_CLIENT_PREALLOCATE="false"), {}),
        ({"CUDA": 1}, ranked(0, 2, XLA_PYTHON_CLIENT_PREALLOCATE="true"), {FRACTION: "0.37"}),
        ({"CUDA": 2}, ranked(3, 4, XLA_PYTHON_CLIENT_PREALLOCATE="false"), cuda("1")),
        # somebody has chosen
        ({"CUDA": 4}, ranked(2, 8, JAX_CUDA_VISIBLE_DEVICES="0,1"), {}),
        ({"CUDA": 4}, ranked(2, 4, JAX_CUDA_VISIBLE_DEVICES="all"), {}),
        ({"CUDA": 4}, ranked(2, 4, JAX_ROCM_VISIBLE_DEVICES="0"), cuda("2")),
        ({"CUDA": 4}, ranked(2, 4, JAX_PLATFORMS="cpu"), {}),
        ({"CUDA": 4}, ranked(2, 4, JAX_PLATFORMS="rocm,cpu"), {}),
        ({"CUDA": 4}, ranked(2, 4, JAX_PLATFORMS="cuda,cpu"), cuda("2")),
        ({"CUDA": 4}, ranked(2, 4, JAX_PLATFORMS="gpu"), cuda("2")),
        ({"CUDA": 4}, ranked(2, 4, JAX_PLATFORMS=""), cuda("2")),
    ],
)
def test_choice(counts, environment, chosen, monkeypatch):
    monkeypatch.setattr(accelerators, "has_plugin", lambda platform: platform != "ONEAPI" or platform in counts)
    assert accelerators.assign(counts, environment) == chosen


def test_devices_that_jax_has_no_plugin_for():
    """Graphics of Intel's beside four of NVIDIA's GPUs are no devices of JAX."""
    assert accelerators.assign({"CUDA": 4, "ONEAPI": 2}, ranked(2, 4)) == cuda("2")


def test_drivers_are_asked_only_for_a_choice(monkeypatch):
    asked = []
    monkeypatch.setattr(accelerators, "device_counts", lambda platforms: asked.append("asked") or {"CUDA": 4})
    for environment, times, options in [
        ({}, 0, {}),
        (ranked(1, 2, JAX_PLATFORMS="cpu"), 0, {}),
        (ranked(1, 2, JAX_CUDA_VISIBLE_DEVICES="3", JAX_ROCM_VISIBLE_DEVICES="2"), 0, {"cuda": "3", "rocm": "2"}),
        (ranked(1, 2), 1, {"cuda": "1"}),
    ]:
        monkeypatch.setattr(accelerators.os, "environ", dict(environment))
        asked.clear()
        config = {}
        accelerators.take(SimpleNamespace(update=config.__setitem__))
        assert len(asked) == times
        assert config == {f"jax_{name}_visible_devices": value for name, value in options.items()}


def test_no_driver_no_counts(monkeypatch):
    monkeypatch.setattr(accelerators.sys, "executable", "/nowhere/python")
    assert accelerators.device_counts(["CUDA"]) == {}


def test_switch(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("")
    assert command.parse(["-n", "2", str(program)]).devices == "rank"
    assert command.parse(["-n", "2", "--devices", "all", str(program)]).devices == "all"
    for options, shown in [([], "--devices rank"), (["--devices", "all"], "--devices all")]:
        done = launch(2, *options, "--dry-run", program)
        assert f"jaxmpi_launch.child {shown} {program}" in done.stdout


@pytest.fixture
def program(tmp_path):
    def write(before="", after=""):
        path = tmp_path / "program.py"
        path.write_text(
            f"import os\n{before}\nimport jax\n{textwrap.dedent(after)}\n"
            f"found = [os.environ.get(name) for name in ('JAX_CUDA_VISIBLE_DEVICES', '{FRACTION}')]\n"
            "print('devices', jax.config.values['jax_cuda_visible_devices'], *found, end=';\\n')\n"
        )
        return path

    return write


def found(done):
    return sorted(line for line in done.stdout.splitlines() if line.startswith("devices"))


def test_the_users_choice(program):
    """A variable that is set goes to JAX; what the program asks of JAX itself comes later, so it counts."""
    assert found(launch(2, program(), JAX_CUDA_VISIBLE_DEVICES="3")) == ["devices 3 3 None;"] * 2
    after = "jax.config.update('jax_cuda_visible_devices', '2')"
    assert found(launch(1, program(after=after), JAX_CUDA_VISIBLE_DEVICES="3")) == ["devices 2 3 None;"]
    rocm = "assert jax.config.values['jax_rocm_visible_devices'] == '1'"
    assert found(launch(1, program(after=rocm), JAX_ROCM_VISIBLE_DEVICES="1")) == ["devices all None None;"]
    probed = "import importlib.util\nassert importlib.util.find_spec('jax').name == 'jax'"
    assert found(launch(1, program(before=probed), JAX_CUDA_VISIBLE_DEVICES="3")) == ["devices 3 3 None;"]


UNSET = "os.environ.pop('JAX_PLATFORMS')"


TAKEN = {
    "each": (2, 4, [], UNSET, ["devices 0 0 None;", "devices 1 1 None;"]),
    "shared": (3, 2, [], UNSET, ["devices 0 0 0.37;", "devices 0 0 0.37;", "devices 1 1 None;"]),
    "one": (2, 1, [], UNSET, ["devices all None 0.37;"] * 2),
    "all": (2, 4, ["--devices", "all"], UNSET, ["devices all None None;"] * 2),
    "cpu": (2, 4, [], "", ["devices all None None;"] * 2),
    "narrowed": (2, 4, [], f"{UNSET}; os.environ['CUDA_VISIBLE_DEVICES'] = '3'", ["devices all None None;"] * 2),
}
"""Ranks, devices, options, what the program does first, and what it finds."""


@pytest.mark.skipif(FAKES is None, reason="needs the folder of a fake driver in JAXMPI_FAKE_DRIVERS")
@pytest.mark.parametrize("which", one_each_time(TAKEN, "shared", "narrowed"))
def test_ranks_take_their_devices(program, which):
    """The driver is asked, but not loaded where the program runs."""
    ranks, devices, options, before, lines = TAKEN[which]
    loaded = "assert 'libcuda' not in open('/proc/self/maps').read()"
    path = os.pathsep.join(filter(None, [FAKES, os.environ.get("LD_LIBRARY_PATH")]))
    script = program(before=before, after=loaded)
    done = launch(ranks, *options, script, LD_LIBRARY_PATH=path, FAKE_DEVICES=str(devices))
    assert found(done) == lines

"""What is installed: developers run the sources as they lie, users a wheel."""

import base64
import compileall
import dataclasses
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import mach_o
import wheels

pytestmark = pytest.mark.alone
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
import jax.numpy as jnp
import jaxmpi
from jaxmpi import info
from jaxmpi_launch import command, mpiexec
from jaxmpi_launch import accelerators, child
from mpi4py import MPI
assert jaxmpi.__file__.startswith(sys.argv[1]), jaxmpi.__file__
assert accelerators.core_file() == jaxmpi._core.__file__, accelerators.core_file()
print("sum", jaxmpi.allreduce(jnp.float32(3), MPI.SUM, comm=MPI.COMM_SELF))
"""


def check_tag(wheel):
    """It is for the oldest Python whose limited API is used, also inside; RECORD has what is in it."""
    (limited,) = re.findall(r"limited_api: '3\.(\d+)'", (ROOT / "meson.build").read_text())
    assert f'requires-python = ">=3.{limited}"' in (ROOT / "pyproject.toml").read_text()
    name, version, *tag = wheel.stem.split("-")
    assert tag[:2] == [f"cp3{limited}", "abi3"], f"built by Python {sys.version}"
    with zipfile.ZipFile(wheel) as archive:
        folder = f"{name}-{version}.dist-info"
        assert f"Tag: {'-'.join(tag)}" in archive.read(f"{folder}/WHEEL").decode().splitlines()
        lines = archive.read(f"{folder}/RECORD").decode().splitlines()
        recorded = {path: (digest, size) for path, digest, size in (line.rsplit(",", 2) for line in lines)}
        assert recorded.pop(f"{folder}/RECORD") == ("", "")
        assert set(recorded) == set(archive.namelist()) - {f"{folder}/RECORD"}
        for path, (digest, size) in recorded.items():
            data = archive.read(path)
            found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            assert (digest, size) == (f"sha256={found}", str(len(data))), path


@pytest.mark.nightly
@pytest.mark.seconds(300)
def test_wheel_is_complete(tmp_path):
    pytest.importorskip("mesonpy")
    assert compileall.compile_dir(ROOT / "python", quiet=1), "whose results do not belong into the wheel"
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [*build, "--wheel-dir", tmp_path, ROOT]
    done = subprocess.run(command, env=tools, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    check_tag(wheel)
    sources = {
        str(path.relative_to(ROOT / "python"))
        for path in (ROOT / "python").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(tmp_path / "installed")
    assert packed - sources == {"jaxmpi/_core.abi3.so"}
    assert sources <= packed
    if shutil.which("readelf"):  # those of a release are linked with the C library alone, and other symbols are missing
        core = tmp_path / "installed/jaxmpi/_core.abi3.so"
        dynamic = subprocess.run(["readelf", "--dynamic", core], capture_output=True, text=True, check=True).stdout
        needed = set(re.findall(r"\(NEEDED\).*\[(\w+)", dynamic))
        assert needed - {"ld"} <= {"libc", "libm", "libdl", "libpthread"}, needed
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "installed")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("sum 3.0"), done.stdout + done.stderr


def test_editable_install_without_its_tools(tmp_path):
    """In an environment that pip removes after the build: refused, as the next import would fail."""
    mesonpy = pytest.importorskip("mesonpy")
    (tmp_path / "mesonpy").symlink_to(Path(mesonpy.__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT / "tools")))}
    command = [sys.executable, "-c", f"import backend; backend.build_editable({str(tmp_path)!r})"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "'pip install --no-build-isolation --editable .'" in done.stderr


@pytest.mark.parametrize("setting", [None, {"setup-args": "-Dpython.allow_limited_api=false"}])
def test_build_for_a_free_threaded_python(setting):
    """It is refused, since there is no stable ABI there, unless the builder does without that."""
    pytest.importorskip("mesonpy")
    program = (
        "import sys, mesonpy; mesonpy.build_wheel = lambda *_: 'made-cp313-cp313t-linux.whl'; sys.abiflags += 't'; "
        f"import backend; print(backend.build_wheel('.', {setting!r}))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tools")}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if setting is None:
        assert done.returncode == 1
        assert "is a free-threaded build" in done.stderr
        assert "Traceback" not in done.stderr
    else:
        assert done.stdout == "made-cp313-cp313t-linux.whl\n", done.stderr


def test_tags():
    """Of the wheels of a release: pip installs each of them where its core runs, and no other."""
    tags = pytest.importorskip("pip._vendor.packaging.tags")
    accepted = {
        "manylinux_2_27_x86_64": [f"manylinux_2_{minor}_x86_64" for minor in range(5, 37)],
        "manylinux_2_27_aarch64": [f"manylinux_2_{minor}_aarch64" for minor in range(17, 37)],
        "macosx_11_0_arm64": list(tags.mac_platforms((14, 0), "arm64")),
    }
    assert [target.tag for target in wheels.TARGETS] == list(accepted)
    for tag, platforms in accepted.items():
        assert [other for other in accepted if other in platforms] == [tag]
        assert f"cp310-abi3-{tag}" in map(str, tags.cpython_tags((3, 14), ["cp314"], platforms))
    assert "macosx_11_0_arm64" not in tags.mac_platforms((10, 15), "x86_64")
    assert [target.python for target in wheels.TARGETS] == ["linux-x86_64", "linux-aarch64", "macosx-11.0-arm64"]


GOOD = mach_o.Core("ARM64", "11.0", frozenset(mach_o.LIBRARIES), frozenset({"_PyLong_FromLong", "__Py_Dealloc"}), True)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, None),
        ({"processor": "X86_64"}, "it is for X86_64"),
        ({"oldest": "13.0"}, "it needs macOS 13.0"),
        ({"libraries": frozenset({"@rpath/libmpi.dylib", *mach_o.LIBRARIES})}, "it needs @rpath/libmpi.dylib"),
        ({"left": frozenset({"_memfd_create", "_PyList_New"})}, "macOS lacks _memfd_create"),
        ({"signed": False}, "it is not signed"),
    ],
)
def test_core_for_macos(changed, told):
    found = list(mach_o.problems(dataclasses.replace(GOOD, **changed), "11.0"))
    assert [problem.startswith(told) for problem in found] == [True] if told else found == []


@pytest.mark.parametrize("url", ["", "https://forge.example/us/jaxmpi"])
def test_description_has_no_dead_links(url):
    """A package index shows the README, but has no files beside it."""
    readme = (ROOT / "README.md").read_text()
    text = wheels.for_an_index(readme, url)
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert all(link.startswith("https://") for link in links)
    assert wheels.LINK.search(readme)
    if url:
        paths = [re.sub(f"{url}/(blob|raw)/main/|#.*", "", link) for link in links if link.startswith(url)]
        assert "docs/gallery/shallow_water.png" in paths  # a picture that is a link
        assert "docs/gallery.md" in paths
        assert all((ROOT / path).exists() for path in paths)

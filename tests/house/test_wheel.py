"""What is installed: developers run the sources as they lie, users a wheel."""

import compileall
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from programs import wheels

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
import jax.numpy as jnp
import jaxmpi
from jaxmpi import info, notoken, run
from jaxmpi._launcher import accelerators, child
from mpi4py import MPI
assert jaxmpi.__file__.startswith(sys.argv[1]), jaxmpi.__file__
print("sum", notoken.allreduce(jnp.float32(3), MPI.SUM, comm=MPI.COMM_SELF))
"""


@pytest.mark.one_rank
@pytest.mark.seconds(300)
def test_wheel_is_complete(tmp_path):
    if importlib.util.find_spec("mesonpy") is None:
        pytest.skip("meson-python is not installed, the wheel cannot be built")
    assert compileall.compile_dir(ROOT / "python", quiet=1), "whose results do not belong into the wheel"
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [*build, "--wheel-dir", tmp_path, ROOT]
    done = subprocess.run(command, env=tools, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
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
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "installed")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("sum 3.0"), done.stdout + done.stderr


@pytest.mark.one_rank
def test_editable_install_without_its_tools(tmp_path):
    """In an environment that pip removes after the build: refused, as the next import would fail."""
    if (mesonpy := importlib.util.find_spec("mesonpy")) is None:
        pytest.skip("meson-python is not installed")
    (tmp_path / "mesonpy").symlink_to(Path(mesonpy.origin).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT / "tools")))}
    command = [sys.executable, "-c", f"import backend; backend.build_editable({str(tmp_path)!r})"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "'pip install --no-build-isolation --editable .'" in done.stderr


@pytest.mark.one_rank
@pytest.mark.parametrize("url", ["", "https://forge.example/us/jaxmpi"])
def test_description_has_no_dead_links(url):
    """A package index shows the README, but has no files beside it."""
    readme = (ROOT / "README.md").read_text()
    text = wheels.for_an_index(readme, url)
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert all(link.startswith("https://") for link in links)
    assert wheels.LINK.search(readme)
    if url:
        paths = [link.removeprefix(f"{url}/blob/main/").partition("#")[0] for link in links if link.startswith(url)]
        assert paths
        assert all((ROOT / path).exists() for path in paths)

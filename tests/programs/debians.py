"""A Debian for another kind of processor, whose commands this machine emulates: for `make wheel-test`.

It is made by debootstrap, which takes minutes, and kept in a folder. Its commands see this machine's devices and
processes. Only root can make and enter it.
"""

import os
import shutil
from pathlib import Path

NAMES = {"aarch64": "arm64"}
"""Kinds of processors as the kernel names them, and as Debian does."""
RELEASE = "bookworm"
PYTHON = "3.11"
"""Of that release."""
ENTER = (
    'for name in proc sys dev; do mount --rbind "/$name" "$0/$name" || exit; done; '
    'exec chroot "$0" env -i HOME=/root PATH=/usr/bin:/bin JAX_PLATFORMS=cpu "$@"'
)


def missing(machine):
    """What keeps this machine from emulating that kind of processor, in words; or nothing."""
    if os.geteuid() != 0:
        return "needs root"
    for program, package in ((f"qemu-{machine}-static", "qemu-user-static"), ("debootstrap", "debootstrap")):
        if shutil.which(program) is None:
            return f"needs {program} (on Debian: apt install {package})"
    if not Path(f"/proc/sys/fs/binfmt_misc/qemu-{machine}").exists():
        return (
            "needs binfmt_misc: mount -t binfmt_misc none /proc/sys/fs/binfmt_misc; "
            f"update-binfmts --enable qemu-{machine}"
        )
    return ""


def make(machine, folder, run):
    """Makes the system in `folder`, unless it is there. `run` runs a command."""
    if (folder / "usr/bin/python3").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    packages = "--include=python3,python3-venv,ca-certificates"
    architecture = f"--arch={NAMES[machine]}"
    run("debootstrap", architecture, "--variant=minbase", packages, RELEASE, unfinished, timeout=3600)
    unfinished.rename(folder)


def inside(folder, *command):
    """The command that runs another in the system in `folder`, whose mounts end with it."""
    return ("unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, folder, *command)


def wheels_for(machine, folder, run, pip, *packages):
    """Downloads the wheels of packages and of what they need for the system's Python, since here pip is faster."""
    tags = [f"--platform=manylinux{version}_{machine}" for version in ("_2_28", "_2_27", "_2_26", "_2_17", "2014")]
    python = (f"--python-version={PYTHON}", "--implementation=cp", "--only-binary=:all:")
    abis = [f"--abi={abi}" for abi in (f"cp{PYTHON.replace('.', '')}", "abi3", "none")]
    run(*pip, "download", "--quiet", *python, *abis, *tags, "--dest", folder, *packages)

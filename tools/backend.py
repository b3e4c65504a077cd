"""meson-python as it is, but for four things that it does not do by itself.

- A build for a free-threaded Python is refused, unless it does without the limited API.
- A wheel is tagged for the oldest Python whose limited API the core is compiled with, whichever Python has built it.
- In an editable install type checkers see the sources. They do not execute what finds them at run time, but they do
  read the folders that a .pth file names.
- An editable install that would not survive its own installation is refused. An editable package is compiled again by
  the import that follows a change, with the tools that built it first. pip makes an environment for a build and removes
  it after the build, unless it is told not to.
"""

import base64
import hashlib
import sys
import sysconfig
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import mesonpy
from mesonpy import *  # noqa: F403 (the hooks of PEP 517)

OLDEST = "cp310"
"""The Python whose limited API meson.build names."""
SOURCES = Path(__file__).resolve().parents[1] / "python"


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _refuse_free_threading(config_settings)
    name = mesonpy.build_wheel(wheel_directory, config_settings, metadata_directory)
    *project, python, abi, platform = name.removesuffix(".whl").split("-")
    if abi != "abi3":  # a Python without the stable ABI, or a build that does without it
        return name
    tag = f"-{abi}-{platform}"
    tagged = "-".join([*project, OLDEST]) + f"{tag}.whl"
    changed = {"WHEEL": lambda text: text.replace(f"Tag: {python}{tag}", f"Tag: {OLDEST}{tag}")}
    _rewrite(Path(wheel_directory, name), Path(wheel_directory, tagged), changed, {})
    return tagged


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    _refuse_free_threading(config_settings)
    places = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    passing = Path(mesonpy.__file__).parent.parent not in places or "builds-v0" in sys.prefix  # of pip; of uv
    if passing:
        sys.exit(
            "jaxmpi: an editable install needs its tools later as well: 'pip install meson-python meson ninja' and "
            "then 'pip install --no-build-isolation --editable .', or 'make setup', which does that"
        )
    name = mesonpy.build_editable(wheel_directory, config_settings, metadata_directory)
    wheel = Path(wheel_directory, name)
    _rewrite(wheel, wheel, {}, {"jaxmpi-sources.pth": f"{SOURCES}\n"})
    return name


def _refuse_free_threading(config_settings):
    if "t" in sys.abiflags and "allow_limited_api=false" not in str(config_settings):
        sys.exit(
            f"jaxmpi: this Python {sys.version.split()[0]} is a free-threaded build, without the stable ABI for which "
            f"jaxmpi is compiled: use the other build of this version, such as python3.{sys.version_info[1]} without t"
        )


def _rewrite(old, new, changed, added):
    """Makes the wheel `new` of `old`: functions change texts in .dist-info, files are added, and RECORD tells so."""
    with ZipFile(old) as archive:
        files = [(item, archive.read(item)) for item in archive.infolist()]
    files += [(ZipInfo(name), text.encode()) for name, text in added.items()]
    old.unlink()
    lines = []
    with ZipFile(new, "w", ZIP_DEFLATED) as archive:
        for item, data in files:
            path = item.filename
            folder, _, name = path.rpartition("/")
            if folder.endswith(".dist-info") and name in changed:
                data = changed[name](data.decode()).encode()
            if folder.endswith(".dist-info") and name == "RECORD":
                record = path
                continue
            archive.writestr(item, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            lines.append(f"{path},sha256={digest},{len(data)}\n")
        archive.writestr(record, "".join([*lines, f"{record},,\n"]))

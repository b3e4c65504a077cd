"""meson-python as it is, but for an editable install that would not survive its own installation.

An editable package is compiled again by the import that follows a change, with the tools that built it first. pip makes
an environment for a build and removes it after the build, unless it is told not to.
"""

import sys
import sysconfig
from pathlib import Path

import mesonpy
from mesonpy import *  # noqa: F403 (the hooks of PEP 517)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    places = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    passing = Path(mesonpy.__file__).parent.parent not in places or "builds-v0" in sys.prefix  # of pip; of uv
    if passing:
        sys.exit(
            "jaxmpi: an editable install needs its tools later as well: 'pip install meson-python meson ninja' and "
            "then 'pip install --no-build-isolation --editable .', or 'make setup', which does that"
        )
    return mesonpy.build_editable(wheel_directory, config_settings, metadata_directory)

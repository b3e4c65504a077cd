"""Start a JAX program on several ranks: `python -m jaxmpi.run -n 4 script.py [arguments]`."""

import sys

from jaxmpi_launch.command import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())

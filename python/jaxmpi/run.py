"""Start a JAX program on several ranks: `python -m jaxmpi.run -n 4 script.py [arguments]`."""

from jaxmpi_launch.command import main

__all__ = ["main"]

if __name__ == "__main__":
    from jaxmpi_launch.command import run_and_exit

    run_and_exit()

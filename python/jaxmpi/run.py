"""Start a JAX program on several ranks: `python -m jaxmpi.run -n 4 script.py [arguments]`."""

from jaxmpi_launch.command import main, run_and_exit

__all__ = ["main"]

if __name__ == "__main__":
    run_and_exit()

"""Jobs that survive the death of a rank: `python -m jaxmpi.run --survive`. The page is docs/survive.md."""

from jaxmpi._mpi.survival import ProcessFailed, deaths, lost, process_failure, recover
from jaxmpi._replica import Replica

__all__ = ["ProcessFailed", "Replica", "deaths", "lost", "process_failure", "recover"]

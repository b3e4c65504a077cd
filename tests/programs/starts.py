"""Starts a small job of JAX's sharded arrays many times. None may hang, fail or give a wrong sum.

`python tests/programs/starts.py --jobs 1000 --ranks 2 --beside 2`
"""

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

PROGRAM = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
n = jax.process_count()
import jax.numpy as jnp
x = jax.make_array_from_callback((n,), NamedSharding(jax.make_mesh((n,), ("p",)), P("p")), lambda i: np.arange(n)[i])
assert int(jax.jit(jnp.sum)(x)) == n * (n - 1) // 2
print("right;", flush=True)
"""
SECONDS = 120


def start(command: list[str], ranks: int) -> str:
    """What was wrong with a job."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired as late:
        return f"not done after {SECONDS} s: {(late.stderr or b'')[-2000:]!r}"
    right = done.returncode == 0 and done.stdout.count("right;") == ranks
    return "" if right else f"exit status {done.returncode}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--beside", type=int, default=1, help="so many jobs at once")
    options = parser.parse_args()
    command = [sys.executable, "-m", "jaxmpi.run", "-n", str(options.ranks), "--collectives", "mpi", "-c", PROGRAM]
    with ThreadPoolExecutor(options.beside) as pool:
        failures = 0
        for number, wrong in enumerate(pool.map(start, [command] * options.jobs, [options.ranks] * options.jobs), 1):
            failures += bool(wrong)
            if wrong or number % 100 == 0:
                print(f"{number} jobs, {failures} failed {wrong}", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()

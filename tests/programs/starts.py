"""Starts a small job of JAX's sharded arrays many times: `make starts`. None may hang, fail or give a wrong sum.

`python tests/programs/starts.py --jobs 1000 --ranks 2 --beside 2`
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


def start(program: Path, ranks: int, collectives: str) -> tuple[float, str]:
    """The seconds that a job took, and what was wrong with it."""
    command = [sys.executable, "-m", "jaxmpi.run", "-n", str(ranks), "--collectives", collectives, str(program)]
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired as late:
        return SECONDS, f"not done after {SECONDS} s: {(late.stderr or b'')[-2000:]!r}"
    right = done.returncode == 0 and done.stdout.count("right;") == ranks
    wrong = "" if right else f"exit status {done.returncode}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
    return time.monotonic() - began, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--beside", type=int, default=1, help="so many jobs at once")
    parser.add_argument("--collectives", default="mpi", choices=("mpi", "gloo"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.beside) as pool:
        program = Path(folder) / "program.py"
        program.write_text(PROGRAM)
        seconds, failures = [], 0
        jobs = [pool.submit(start, program, options.ranks, options.collectives) for _ in range(options.jobs)]
        for number, job in enumerate(jobs, 1):
            took, wrong = job.result()
            seconds.append(took)
            failures += bool(wrong)
            if wrong:
                print(f"job {number}: {wrong}", flush=True)
            if number % 100 == 0:
                print(f"{number} jobs, {failures} failed, {statistics.median(seconds):.1f} s each", flush=True)
    print(
        f"{options.jobs} jobs on {options.ranks} ranks, {options.beside} at once: {failures} failed; "
        f"median {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s"
    )
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()

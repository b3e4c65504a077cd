"""Jobs that benchmarks start, with ranks of their own."""

import dataclasses
import json
import os
import subprocess
import sys
import time

from jaxmpi._bench.report import say
from jaxmpi._bench.timing import Sample

UNBOUND = {
    "PJRT_NPROC": str(len(os.sched_getaffinity(0))),
    "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=true",
}
"""With these each process may use all cores."""


def run(*words, python=sys.executable, **environment):
    """Run `python -m` with these words. Return the seconds from start to end, and what the program has printed."""
    command = [str(word) for word in (python, "-m", *words)]
    begin = time.perf_counter()
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=900, check=False
    )
    seconds = time.perf_counter() - begin
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return seconds, done.stdout


def result(said):
    """Return what rank 0 of a job has printed as the last line of JSON. Libraries may print other lines."""
    return json.loads(next(line for line in reversed(said.splitlines()) if line.startswith("{")))


def tell(samples):
    """Print samples of this job, for `take_turns`."""
    say(json.dumps({name: dataclasses.asdict(sample) for name, sample in samples.items()}))


def take_turns(kinds, rounds):
    """Start jobs of each kind in turn. kinds: name -> the words of a job, and variables of the environment.

    A job tells samples. Return (kind, name there) -> the sample of all jobs.
    """
    seconds, wrong = {}, {}
    for turn in range(rounds):
        for kind, (words, environment) in list(kinds.items())[:: -1 if turn % 2 else 1]:
            for name, told in result(run("jaxmpi.run", *words, **environment)[1]).items():
                seconds.setdefault((kind, name), []).extend(told["seconds"])
                wrong[kind, name] = wrong.get((kind, name), 0) + told["wrong"]
    return {key: Sample(values, wrong[key]) for key, values in seconds.items()}


def sharded(kind, program, *words, unbound=False):
    """Return the words and variables of a job of two processes whose sharded programs communicate by gloo or MPI.

    gloo has threads of its own, and is several times slower on a rank that is bound to one core.
    """
    unbound = unbound or kind == "gloo"
    binding = ["--mpiexec-args=--bind-to none"] if unbound else []
    return ["-n", 2, "--collectives", kind, *binding, program, "--job", *words], UNBOUND if unbound else {}

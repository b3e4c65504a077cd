"""Random programs on several ranks, each against a witness: python tests/programs/fuzz.py --programs 100 --ranks 2.

Each rank runs the same random program with the operations of jaxmpi, transformed in some way, and one process's plain
computation of all ranks says what is right (tests/fuzzing). Programs follow one another in one job. Where a job hangs,
crashes or is wrong, that is recorded, and the next seed begins a new one. The exit status is 1 then. With
JAXMPI_TEST_DEVICE the ranks have a simulated device (tests/support/simulated.py).
"""

import argparse
import contextlib
import faulthandler
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import fields, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of what the tests share
from support import simulated

if "--worker" in sys.argv:
    simulated.begin()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_ENABLE_X64", "1")

from fuzzing import programs


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--order", type=int, default=1, choices=[1, 2], help="of derivatives")
    parser.add_argument("--checks", type=int, default=3, help="of each program; 0: all, which takes minutes")
    parser.add_argument("--only", action="append", choices=programs.KINDS, help="kinds of structure; may be repeated")
    parser.add_argument(
        "--operation", action="append", choices=programs.OPERATIONS, help="one of a few; may be repeated"
    )
    parser.add_argument("--none", action="store_true", help="no structure at all")
    parser.add_argument("--differ", type=float, default=0.25, help="how likely ranks differ in a statement")
    parser.add_argument("--started", type=float, default=0.5, help="how likely an operation is waited for later")
    parser.add_argument("--forgotten", type=float, default=0, help="how likely ranks never wait for something")
    parser.add_argument("--used", action="store_true", help="every result is used on every rank, as JAX 0.6 needs")
    parser.add_argument("--documented", action="store_true", help="leave out what docs/autodiff.md excludes")
    parser.add_argument("--seconds", type=float, default=300, help="after which a program without progress hangs")
    parser.add_argument("--show", action="store_true", help="print the programs, run nothing")
    parser.add_argument("--shrink", type=int, metavar="SEED", help="find a smaller program that fails as this one")
    parser.add_argument("--file", help="run the program and check in this file, which --shrink writes")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def options(chosen):
    kinds = () if chosen.none else tuple(chosen.only or programs.KINDS)
    operations = tuple(chosen.operation or programs.OPERATIONS)
    return programs.Options(
        kinds, chosen.differ, chosen.used, chosen.documented, chosen.started, chosen.forgotten, operations
    )


# --- on each rank ----------------------------------------------------------------------------------------------------


def checks_of(program, chosen):
    from fuzzing import checks

    generator = random.Random(f"{program.seed} checks")
    return list(dict.fromkeys(checks.choose(program, chosen.order, chosen.checks, generator)))


def worker(chosen):
    """Programs one after the other; rank 0 tells of each that begins and ends. The last is the first that is wrong, or
    that leaves something in flight."""
    from mpi4py import MPI

    from fuzzing import checks

    judge, device = checks.Judge(), simulated.Device() if simulated.TRANSPORT else None
    tell = print if MPI.COMM_WORLD.rank == 0 else lambda *args, **kwargs: None
    if chosen.file:
        work = eval(Path(chosen.file).read_text(), {**vars(programs), **vars(checks)})
    else:
        seeds = range(chosen.seed, chosen.seed + chosen.programs)
        made = (programs.generate(seed, MPI.COMM_WORLD.size, options(chosen)) for seed in seeds)
        work = ((program, checks_of(program, chosen)) for program in made)
    for program, wanted in work:
        for check in wanted:
            faulthandler.dump_traceback_later(chosen.seconds, exit=True)
            tell(f"@begin {program.seed} {check}", flush=True)
            verdict, why = judge(program, check)
            tell(f"@end {program.seed} {verdict} {check} | {why!r}", flush=True)
            if device is not None:
                device.check()
            if verdict == "wrong":
                return
        if programs.forgets(program.body):
            return
    faulthandler.cancel_dump_traceback_later()


# --- the runner ------------------------------------------------------------------------------------------------------

REFUSALS = ("must be waited for in the order in which they were started", "is not waited for there: gradients would")
"""In the errors of programs that could have wrong gradients: at run time, where their jobs end."""


class Tally:
    def __init__(self):
        self.seeds, self.begun, self.right = set(), 0, 0
        self.refused, self.failed = defaultdict(Counter), defaultdict(list)

    def end(self, seed, verdict, check, why):
        if verdict == "right":
            self.right += 1
        elif verdict == "refused":
            self.refused[re.sub(r"\d+", "#", why.splitlines()[0])[:150]][seed] += 1
        else:
            self.fail(verdict, seed, check, why)

    def fail(self, kind, seed, check, why):
        self.failed[kind].append(seed)
        print(f"{kind.upper()} seed {seed} ({check})\n  " + why.strip().replace("\n", "\n  "), flush=True)

    def table(self, seconds):
        checks = self.right + sum(sum(seeds.values()) for seeds in self.refused.values())
        print(f"\n{len(self.seeds)} programs in {seconds:.0f} s: {checks} checks, of which {self.right} were right")
        for reason, seeds in sorted(self.refused.items(), key=lambda item: -sum(item[1].values())):
            some = ", ".join(map(str, list(seeds)[:5]))
            print(f"  refused {sum(seeds.values()):4} ({some}{', ...' if len(seeds) > 5 else ''}): {reason}")
        for kind, seeds in self.failed.items():
            print(f"  {kind} {len(seeds):4}: {', '.join(map(str, seeds))}")


def job(ranks, *worker_arguments):
    """Starts a job of workers in a session of its own, with its errors in a file."""
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read and closed where the job has ended)
    command = [sys.executable, "-m", "jaxmpi.run", "-n", str(ranks), __file__, "--worker", *worker_arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
    return process, errors


def end(process, errors):
    """Makes sure that a job is over; what it has written to its errors, and whether it had to be killed."""
    killed = False
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        killed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    errors.seek(0)
    text = errors.read()
    errors.close()
    return text, killed


def follow(process, errors, tally):
    """Reads what a job tells; the seed of the program with which it ended before its time, or None."""
    begun, ended = None, False
    for line in process.stdout:
        word, _, rest = line.partition(" ")
        if word == "@begin":
            seed, _, check = rest.strip().partition(" ")
            begun, ended = (int(seed), check), False
            tally.seeds.add(int(seed))
            tally.begun += 1
        elif word == "@end":
            seed, verdict, rest = rest.split(" ", 2)
            check, _, why = rest.partition(" | ")
            tally.end(int(seed), verdict, check, eval(why))
            ended = True
    text, killed = end(process, errors)
    if begun is None:
        sys.exit(f"no program was begun:\n{text}")
    if not ended:
        seed, check = begun
        if why := next((why for why in REFUSALS if why in text), None):
            tally.end(seed, "refused", check, why)
        else:
            tally.fail("hanging" if "Timeout (" in text else "crashed", seed, check, summary(text))
    elif killed:
        tally.fail("hanging", *begun, "as its job ended")
    return begun[0]


def summary(text):
    """The telling lines of an error output: the last exception, or where a rank waits."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"\w+(\.\w+)*(Error|Exception)\b", line)]
    ours = [line.strip() for line in lines if "/fuzzing/" in line]
    return "\n".join(dict.fromkeys(errors[:3] or ours[:4] or lines[-5:]))


def run(chosen):
    tally, seed, last, begun = Tally(), chosen.seed, chosen.seed + chosen.programs, time.monotonic()
    while seed < last:
        seed = follow(*job(chosen.ranks, *sys.argv[1:], f"--seed={seed}", f"--programs={last - seed}"), tally) + 1
    tally.table(time.monotonic() - begun)
    return 1 if tally.failed else 0


# --- making a failing program smaller --------------------------------------------------------------------------------


def smaller_statements(statement):
    """Simpler statements with one value each, the simplest first."""
    operands = getattr(statement, "operands", None) or (getattr(statement, "operand", 0),)
    if statement != programs.Local("copy", operands) and getattr(statement, "kind", "") != "constant":
        yield programs.Local("copy", operands)
    if isinstance(statement, programs.Local):
        return
    if isinstance(statement, programs.Wait):
        yield replace(statement, after=-1)
        return
    if isinstance(statement, programs.Call) and statement.given:
        yield programs.Wait(statement.given)
    if isinstance(statement, programs.Call) and statement.kind in programs.FUNCTIONS + programs.RULES[:1]:
        yield replace(statement, kind="call")
    for field in fields(statement):
        value = getattr(statement, field.name)
        if (
            field.name in ("operands", "kind", "name", "bodies", "closed", "operand", "given", "starts")
            or value == field.default
        ):
            continue
        yield replace(statement, **{field.name: field.default})
    for i, body in enumerate(getattr(statement, "bodies", ())):
        for smaller in smaller_bodies(body, programs.parameters(statement)):
            yield replace(statement, bodies=(*statement.bodies[:i], smaller, *statement.bodies[i + 1 :]))


def smaller_bodies(body, known=programs.INPUTS):
    """Smaller bodies on `known` values, also some in which what is in flight is not waited for once."""
    if body.everything:
        yield replace(body, everything=False)
    for i, statement in enumerate(body.statements):
        for smaller in smaller_statements(statement):
            yield replace(body, statements=(*body.statements[:i], smaller, *body.statements[i + 1 :]))
        if isinstance(statement, programs.Wait):
            yield from without_waiting(body, i, known)


def without_waiting(body, at, known):
    """What is waited for there is not started, or done at once."""
    keys = body.statements[at].starts
    for key in keys:
        left = tuple(other for other in keys if other != key)
        rest = list(body.statements)
        rest[at] = programs.Wait(left) if left else programs.Local("copy", (0,))
        start = rest[key - known] if known <= key < known + at else None
        if isinstance(start, programs.Comm):
            for smaller in (programs.Local("copy", (start.operand,)), replace(start, starts=False)):
                yield replace(body, statements=(*rest[: key - known], smaller, *rest[key - known + 1 :]))


def first_failure(candidates, chosen, path):
    """Which of the pairs of a program and a check fails first, and how; they run in one job."""
    path.write_text(repr([(program, [check]) for program, check in candidates]))
    tally = Tally()
    with contextlib.redirect_stdout(None):
        follow(*job(chosen.ranks, f"--file={path}", f"--seconds={chosen.seconds}"), tally)
    kind = next(iter(tally.failed), None)
    return (tally.begun - 1, kind == "wrong") if kind else None


def alike(candidates, wrong, chosen, path):
    """The first candidate that fails in the same way: with a wrong result, or without one."""
    while candidates:
        if (found := first_failure(candidates, chosen, path)) is None:
            return None
        if found[1] == wrong:
            return candidates[found[0]]
        candidates = candidates[found[0] + 1 :]
    return None


def shrink(chosen):
    from fuzzing import checks

    program = programs.generate(chosen.shrink, chosen.ranks, options(chosen))
    path = Path(tempfile.gettempdir()) / f"fuzz-{chosen.shrink}-{chosen.ranks}.txt"
    every = [(program, check) for check in checks_of(program, chosen)]
    if (first := first_failure(every, chosen, path)) is None:
        sys.exit("none of its checks fails")
    (program, check), wrong = every[first[0]], first[1]
    simpler = [checks.Check(check.mode), replace(check, route="plain"), replace(check, batch="")]
    found = alike([(program, check) for check in simpler], wrong, chosen, path) or (program, check)
    while found:
        program, check = found
        print(".", end="", flush=True)
        smaller = [
            (replace(program, body=body), check) for body in smaller_bodies(program.body) if programs.sound(body)
        ]
        found = alike(smaller, wrong, chosen, path)
    path.write_text(repr([(program, [check])]))
    print(f"\n{'wrong' if wrong else 'hanging or crashed'}: {check}", *programs.show(program.body), sep="\n")
    print(f"in {path}, for --file")


def main():
    chosen = arguments()
    if chosen.show:
        for seed in range(chosen.seed, chosen.seed + chosen.programs):
            program = programs.generate(seed, chosen.ranks, options(chosen))
            print(f"seed {seed}:", *programs.show(program.body, indent="  "), sep="\n")
            print(*(f"  check {check}" for check in checks_of(program, chosen)), sep="\n")
        return 0
    if chosen.worker:
        return worker(chosen)
    if chosen.shrink is not None:
        return shrink(chosen)
    return run(chosen)


if __name__ == "__main__":
    sys.exit(main())

"""Measure what the tests find: change one line of the package at a time, and run what `make test` runs.

    python tools/mutants.py --count 40 --seed 0 csrc python

The package universalmutator makes the changes. Each is tried in a clone of the repository, in .build/mutants, with an
environment of its own. A change that the compiler refuses, or that changes no object code and no syntax tree, is
replaced by another one. The tests run in the order in which they most likely find the change, up to the first failure;
a run past its time limit is a failure, too. The program prints each change that no test has found, and writes all of
them to output/mutants.jsonl. `--again FILE` tries the changes in a file that were not found, with the tests of
`--commit`: so two states of the tests are compared. `--resume` goes on with the file of an earlier run that was ended.
"""

import argparse
import ast
import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from universalmutator import mutator

ROOT = Path(__file__).resolve().parents[1]
CLONE = ROOT / ".build" / "mutants"
RULES = {
    "csrc": ["universal.rules", "c_like.rules", "c.rules"],
    "python": ["universal.rules", "python.rules"],
}
SOURCES = {"csrc": "csrc/*/*.c", "python": "python/**/*.py"}
FOLDERS = {
    "_bench": "doors",
    "_derivatives": "derivatives",
    "_files": "files",
    "_grid": "grid",
    "_jax": "primitive",
    "jaxmpi_launch": "launcher",
    "_mpi": "mpi",
    "_operations": "operations",
    "_primitive": "primitive",
    "_sharded": "sharded",
    "_testing": "doors",
    "_trace": "doors",
    "_unstructured": "unstructured",
    "requests": "operations",
    "execute": "operations",
    "python": "primitive",
    "devices": "mpi",
    "sharded": "sharded",
}
"""The tests that most likely find a change in a folder; of other folders, tests/operations and tests/doors."""
LIMIT = 2700
"""Seconds for a step, ten times what `make test` takes: the tests have time limits of their own."""
BRIEF = ["-m", "pytest", "--color=no", "--quiet", "-x", "--brief"]


@dataclass
class Mutant:
    file: str
    line: int
    before: str
    after: str
    found: str = ""
    """The step that failed; empty if none did."""
    output: str = ""
    """The last lines of that step, which say whether it failed because of the change."""
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, int, str]:
        return self.file, self.line, self.after

    def apply(self) -> str | None:
        """Change the file in the clone and return the text that it had; None where it has no such line."""
        path = CLONE / self.file
        if not path.exists():
            return None
        text = path.read_text()
        lines = text.splitlines(keepends=True)
        places = [i for i, line in enumerate(lines) if line == self.before]
        if not places:
            return None
        lines[min(places, key=lambda i: abs(i - self.line + 1))] = self.after
        path.write_text("".join(lines))
        return text


def run(words: list[str], limit: float) -> bool:
    """Whether a command in the clone succeeds within `limit` seconds. Its whole process group ends with it."""
    environment = {**os.environ, "PATH": f"{CLONE / '.venv' / 'bin'}:{os.environ['PATH']}"}
    for name in ("VIRTUAL_ENV", "PYTEST_ADDOPTS", "MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        environment.pop(name, None)
    with (CLONE / "output.txt").open("w") as output:
        process = subprocess.Popen(
            words, cwd=CLONE, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL, process_group=0
        )
        try:
            return process.wait(limit) in (0, 5)  # pytest's status if no test is chosen
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()


def is_idle(node: ast.AST) -> bool:
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def shape(text: str) -> str | None:
    """A Python program without docstrings and `pass`; None if it is none."""
    try:
        compile(text, "", "exec")
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if isinstance(getattr(node, "body", None), list):
            node.body = [n for n in node.body if not is_idle(n)]
    return ast.dump(tree)


def build() -> bytes | None:
    """The object code of the core; None if it cannot be built."""
    if not run(["make", ".venv/.built"], 600):
        return None
    return next(CLONE.glob(".build/develop/_core*.so")).read_bytes()


def candidates(part: str, generator: random.Random):
    """Changes of lines that are drawn uniformly, without end."""
    files = sorted(CLONE.glob(SOURCES[part]))
    texts = {file: file.read_text().splitlines(keepends=True) for file in files}
    places = [(file, i) for file in files for i in range(len(texts[file]))]
    made: dict[Path, dict[int, list[str]]] = {}
    while True:
        file, i = generator.choice(places)
        if file not in made:
            made[file] = {}
            with contextlib.redirect_stdout(io.StringIO()):
                changes = mutator.mutants_regexp(
                    texts[file], ruleFiles=RULES[part], ignorePatterns=[], ignoreStringOnly=True
                )
            for change in changes:
                made[file].setdefault(change[0], []).append(change[1])
        if changes := made[file].get(i + 1):
            after = generator.choice(sorted(changes))
            yield Mutant(str(file.relative_to(CLONE)), i + 1, texts[file][i], after)


def steps(mutant: Mutant) -> list[list[str]]:
    """What `make test` runs, in the order in which it most likely finds the change."""
    python = ".venv/bin/python"
    part, *folders = Path(mutant.file).parts
    name = next((word for word in folders if word in FOLDERS), "")
    tests = [f"tests/{FOLDERS.get(name, 'operations')}"] if name in FOLDERS else ["tests/operations", "tests/doors"]
    likely = [
        [python, "-m", "jaxmpi.run", "-n", "2", *BRIEF, *tests],
        [python, *BRIEF, "-n", "3", "-m", "alone", *tests],
    ]
    c = [["make", "test-c"]]
    return [*(c if part == "csrc" else []), *likely, ["make", "test"]]


found_by: set[tuple[str, ...]] = set()
"""The steps that have failed: at the end each must succeed without a change."""


def tested(mutant: Mutant, original: bytes) -> bool:
    """Try a change; False if it is none."""
    text = mutant.apply()
    if text is None:
        return False
    path = CLONE / mutant.file
    try:
        if mutant.file.endswith(".py"):
            if shape(path.read_text()) in (None, shape(text)):
                return False
        elif (code := build()) is None or code == original:
            return False
        begun = time.monotonic()
        for step in steps(mutant):
            if not run(step, LIMIT):
                mutant.found = " ".join(step)
                mutant.output = "\n".join((CLONE / "output.txt").read_text(errors="replace").splitlines()[-200:])
                found_by.add(tuple(step))
                break
        mutant.seconds = round(time.monotonic() - begun, 1)
        return True
    finally:
        path.write_text(text)


def prepare(commit: str) -> bytes:
    """Make the clone and its environment, and return the object code of the core."""
    if not CLONE.exists():
        subprocess.run(["git", "clone", "--quiet", "--no-checkout", str(ROOT), str(CLONE)], check=True)
    else:
        subprocess.run(["git", "-C", str(CLONE), "fetch", "--quiet", str(ROOT), "HEAD"], check=True)
    subprocess.run(["git", "-C", str(CLONE), "checkout", "--quiet", "--force", "--detach", commit], check=True)
    if not run(["make", "setup"], 1200) or (code := build()) is None:
        raise SystemExit(f"the clone cannot be built: {CLONE / 'output.txt'}")
    return code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=list(RULES), metavar="PART", help="csrc, python (both)")
    parser.add_argument("--count", type=int, default=40, metavar="N", help="changes of each part (40)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="HEAD", help="whose package and tests are tried (HEAD)")
    parser.add_argument("--again", metavar="FILE", help="try the changes in this file that were not found")
    parser.add_argument("--resume", action="store_true", help="keep what the output file has of an earlier run")
    parser.add_argument("--output", default=str(ROOT / "output" / "mutants.jsonl"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # by way of what puts the file back
    commit = subprocess.check_output(["git", "-C", str(ROOT), "rev-parse", options.commit], text=True).strip()
    original = prepare(commit)
    output = Path(options.output)
    output.parent.mkdir(exist_ok=True)
    tried: list[Mutant] = []

    def take(mutant: Mutant) -> None:
        tried.append(mutant)
        with output.open("a") as file:
            print(json.dumps(asdict(mutant)), file=file)
        how = f"found by {mutant.found}" if mutant.found else "NOT FOUND"
        print(f"{len(tried)}: {mutant.file}:{mutant.line} {how}, {mutant.seconds:.0f} s", flush=True)

    if options.again:
        lines = [json.loads(line) for line in Path(options.again).read_text().splitlines()]
        output.unlink(missing_ok=True)
        for line in lines:
            mutant = Mutant(**{**line, "found": ""})
            if not line["found"] and tested(mutant, original):
                take(mutant)
    else:
        earlier = [json.loads(line) for line in output.read_text().splitlines()] if options.resume else []
        known = {mutant.key: mutant for mutant in (Mutant(**line) for line in earlier)}
        output.unlink(missing_ok=True)
        for part in options.parts:
            drawn = candidates(part, random.Random(f"{options.seed} {part}"))
            for _ in range(options.count):
                while (mutant := known.get((drew := next(drawn)).key, drew)) is drew and not tested(drew, original):
                    pass
                take(mutant)
    for step in found_by:
        if not run(list(step), LIMIT):
            raise SystemExit(f"fails without a change, so the figures mean nothing: {' '.join(step)}")
    missed = [mutant for mutant in tried if not mutant.found]
    for mutant in missed:
        print(f"\n{mutant.file}:{mutant.line}\n- {mutant.before.rstrip()}\n+ {mutant.after.rstrip()}")
    print(f"\n{len(tried) - len(missed)} of {len(tried)} changes were found")


if __name__ == "__main__":
    sys.exit(main())

"""Find out from the syntax tree of a script whether it is written for the other API of mpi4jax than the chosen one.

Up to 0.7 mpi4jax's functions return the result and a token (`--as mpi4jax-token`), from 0.8 on the result alone (`--as
mpi4jax`): then `y, _ = allgather(x)` on two ranks takes the rows of an array apart, in silence.
"""

import ast
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

FUNCTIONS = tuple(
    "allgather allreduce alltoall barrier bcast gather recv reduce scan scatter send sendrecv".split()  # noqa: SIM905
)
"""The functions of mpi4jax."""
_LIKE_A_TOKEN = re.compile(r"\b_|token|(\b|_)to?kn?\d*(_|\b)", re.IGNORECASE)
"""The pattern of names of tokens and of unused values."""


class Sign(NamedTuple):
    """A line that shows for which API the script is written: the one with tokens, or the other one."""

    certain: bool
    line: int
    tokens: bool
    text: str


def _written(node: ast.expr) -> str:
    """Return the text of `a` or `a.b`, and another text for any other expression."""
    return f"{_written(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _signs(tree: ast.Module) -> Iterator[Sign]:
    nodes = list(ast.walk(tree))
    named: dict[str, str] = {}  # the functions of mpi4jax, as the script's imports name them
    for node in nodes:
        if isinstance(node, ast.Import):
            packages = [alias.asname or "mpi4jax" for alias in node.names if alias.name.split(".")[0] == "mpi4jax"]
            named |= {f"{package}.{function}": function for package in packages for function in FUNCTIONS}
        elif isinstance(node, ast.ImportFrom) and node.module == "mpi4jax":
            named |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name in FUNCTIONS}
    called = {node: named.get(_written(node.func)) for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.Call) and called[node] and any(given.arg == "token" for given in node.keywords):
            yield Sign(True, node.lineno, True, f"passes token= to mpi4jax.{called[node]}")
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and (name := called[node.value]):
            target = node.targets[0]
            if isinstance(target, ast.Tuple | ast.List) and len(target.elts) == 2:
                certain = _LIKE_A_TOKEN.search(ast.unparse(target.elts[1])) is not None
                what = "a result and a token" if certain else "two values"
                yield Sign(certain, node.lineno, True, f"takes {what} from mpi4jax.{name}")
            elif name not in ("barrier", "send"):
                yield Sign(False, node.lineno, False, f"takes the result of mpi4jax.{name} alone")


def check(chosen: list[str], tree: ast.Module, file: str) -> None:
    """End this process if the program is certainly written for the other API of mpi4jax than the chosen one. Print a
    warning if it looks like it. Where tokens are chosen, one call with a token is enough."""
    signs = sorted(_signs(tree), key=lambda sign: (not sign.certain, sign.line))
    for tokens in {name == "mpi4jax-token" for name in chosen if name.startswith("mpi4jax")}:
        wrong = [sign for sign in signs if sign.tokens != tokens]
        if not wrong or (tokens and len(wrong) < len(signs)):
            continue
        other, releases = ("mpi4jax-token", "up to 0.7") if wrong[0].tokens else ("mpi4jax", "from 0.8 on")
        said = f"jaxmpi.run: {file}:{wrong[0].line} {wrong[0].text}, as programs for mpi4jax {releases} do"
        if wrong[0].certain:
            sys.exit(f"{said}: run it by --as {other}")
        print(f"{said}: if it is one, run it by --as {other}", file=sys.stderr)

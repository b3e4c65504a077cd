"""Finds for which API of mpi4jax a source text is written, by what it does with the results of its calls.

Up to 0.7 mpi4jax's functions return the result and a token (API "token"), from 0.8 on the result alone ("notoken"). A
program for one of them may run under the other and compute something else: `y, _ = allgather(x)` on two ranks takes the
rows of an array apart. Only the standard library is used: the launcher reads the program before it starts.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

FUNCTIONS = frozenset(
    "allgather allreduce alltoall barrier bcast gather recv reduce scan scatter send sendrecv".split()  # noqa: SIM905
)
_WITHOUT_RESULT = ("barrier", "send")
"""They return a token or nothing."""

OPTIONS = {"token": "mpi4jax-token", "notoken": "mpi4jax"}
"""What `python -m jaxmpi.run --as` is to be given for each API."""

RELEASES = {"token": "mpi4jax up to 0.7", "notoken": "mpi4jax from 0.8 on"}
_RETURNS = {"token": "return the result and a token", "notoken": "return the result alone"}
_OTHER = {"token": "notoken", "notoken": "token"}

SWITCH = "JAXMPI_COMPAT_CHECK"
"""Variable of the environment: 0 for programs that are right although they look wrong."""

_MODULES_OF_TOKENS = ("experimental", "notoken")
"""They exist up to 0.7 only."""

_PACKAGE = "mpi4jax"
_TOKEN = re.compile(r"token|(^|_)(tok|tk|tkn)\d*(_|$)", re.IGNORECASE)
_SCOPES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_KEEPING = ("partial", "jit", "vmap", "checkpoint", "remat")
"""Functions that return what their argument returns."""
_OF_ARRAYS = re.compile(r"(jnp|np|onp|numpy|jax\.numpy)\.|(float|int|complex|abs|round)$")
_OF_ANYTHING = ("block_until_ready", "isinstance", "len", "print", "repr", "tree_map", "map", "tuple", "type")
"""Functions that take pairs of a result and a token as well."""
_ASKING = ("hasattr", "getattr", "signature")

Names = dict[str, str]


@dataclass(frozen=True)
class Sign:
    """What one line says about the API. One that is `sure` is wrong or without sense in the other API."""

    api: str
    sure: bool
    line: int
    text: str


@dataclass(frozen=True)
class Verdict:
    """The first sign of the API that a text is written for, and whether that is certain or only likely."""

    sign: Sign
    certain: bool


@dataclass(frozen=True)
class Reading:
    """What a source text says."""

    signs: tuple[Sign, ...] = ()
    asks: bool = False
    """It finds out which API there is, so its calls are for both."""
    lines: frozenset[int] = frozenset()
    """Where it calls functions of mpi4jax."""

    def sure_of(self, api: str) -> bool:
        return any(sign.sure and sign.api == api for sign in self.signs)

    @property
    def verdict(self) -> Verdict | None:
        """The API for which the text is written; None if that is open: it speaks of none, or of both.

        Only signs that are sure count if there are any. It is certain if no other sign contradicts them.
        """
        counting = [sign for sign in self.signs if sign.sure] or self.signs
        if self.asks or len({sign.api for sign in counting}) != 1:
            return None
        first = counting[0]
        return Verdict(first, first.sure and all(sign.api == first.api for sign in self.signs))


def checks(environment: Mapping[str, str]) -> bool:
    """Whether programs are to be checked."""
    return environment.get(SWITCH, "").strip().lower() not in ("0", "off", "false", "no")


def complaint(sign: Sign, file: str) -> str:
    """What is wrong with a line under the other API, and which option helps."""
    other = _OTHER[sign.api]
    return (
        f"{file}:{sign.line} {sign.text}, as programs for {RELEASES[sign.api]} do. With --as {OPTIONS[other]} the "
        f"functions of mpi4jax {_RETURNS[other]}, as those of {RELEASES[other]}"
    )


def is_token(name: str) -> bool:
    """Whether a name is one that programs give to tokens, or to what they do not need."""
    return name.startswith("_") or _TOKEN.search(name) is not None


def read(source: str | bytes) -> Reading:
    """Reads a source text; one that is not Python's, or does not mention mpi4jax, says nothing."""
    if _PACKAGE.encode() not in (source.encode(errors="replace") if isinstance(source, str) else source):
        return Reading()
    try:
        tree = _Tree(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError):
        return Reading()
    signs = sorted(set(tree.signs()), key=lambda sign: (sign.line, sign.text))
    calls = [node for node in tree.nodes if tree.call(node)]
    lines = {line for call in calls for line in range(call.lineno, call.end_lineno + 1)}  # type: ignore[attr-defined]
    return Reading(tuple(signs), any(map(tree.asks, tree.nodes)), frozenset(lines))


def _dotted(node: ast.AST) -> str:
    """`a.b.c` as it is written; an empty string for anything else."""
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def _position(node: ast.AST, end: bool = False) -> tuple[int, int]:
    return (node.end_lineno, node.end_col_offset) if end else (node.lineno, node.col_offset)  # type: ignore[attr-defined]


class _Tree:
    """A syntax tree, with the parent of each node, and what the names in its scopes stand for."""

    def __init__(self, tree: ast.Module):
        self.nodes = list(ast.walk(tree))
        self.parent = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.names: dict[ast.AST, Names] = {}
        """The names, in each scope, of mpi4jax and of its functions, and of functions that return what those return; to
        other names belongs an empty string."""
        for node in self.nodes:
            self._bind(node)
        for _ in range(3):  # a function that calls another one, which may come later
            for node in self.nodes:
                self._bind_if_same(node)

    # --- what names stand for

    def scope(self, node: ast.AST) -> ast.AST:
        node = self.parent.get(node, node)
        while not isinstance(node, _SCOPES):
            node = self.parent[node]
        return node

    def _keep(self, node: ast.AST, name: str, meaning: str) -> None:
        names = self.names.setdefault(self.scope(node), {})
        names[name] = meaning or names.get(name, "")  # one of mpi4jax's wins: the other may be for where it is missing

    def _bind(self, node: ast.AST) -> None:
        """A name that is bound by an import, a definition, an assignment, or as a parameter."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                package = alias.name if alias.asname else name
                self._keep(node, name, _PACKAGE if package == _PACKAGE else "")
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found = FUNCTIONS if alias.name == "*" else {alias.name}
                for name in found:
                    ours = node.module == _PACKAGE and not node.level and name in FUNCTIONS
                    self._keep(node, (alias.asname or name) if len(found) == 1 else name, name if ours else "")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self._keep(node, node.name, "")
        elif isinstance(node, ast.arg):
            self._keep(node, node.arg, "")
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            self._keep(node, node.id, "")

    def _bind_if_same(self, node: ast.AST) -> None:
        """A name for a function that returns what one of mpi4jax returns, or for the package."""
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            meaning = self.function(node.value) or (_PACKAGE if self._imports(node.value) else "")
            self._keep(node, node.targets[0].id, meaning)
        elif isinstance(node, ast.FunctionDef) and not isinstance(self.scope(node), ast.ClassDef):
            returned = [n.value for n in self._own(node) if isinstance(n, ast.Return) and n.value is not None]
            found = [self.call(value) for value in returned]
            self._keep(node, node.name, found[0] if found and all(found) else "")

    def _own(self, scope: ast.AST) -> list[ast.AST]:
        return self._by_scope.get(scope, [])

    @cached_property
    def _by_scope(self) -> dict[ast.AST, list[ast.AST]]:
        found: dict[ast.AST, list[ast.AST]] = {}
        for node in self.nodes:
            found.setdefault(self.scope(node), []).append(node)
        return found

    def _imports(self, node: ast.AST) -> bool:
        """`importlib.import_module("mpi4jax")` and the like."""
        if not isinstance(node, ast.Call):
            return False
        named = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
        return named == [_PACKAGE] and _dotted(node.func).endswith(("import_module", "importorskip"))

    def _meaning(self, node: ast.AST) -> str:
        if not isinstance(node, ast.Name):
            return ""
        scope = self.scope(node)
        while node.id not in self.names.get(scope, {}):
            if isinstance(scope, ast.Module):
                return ""
            scope = self.scope(scope)
        return self.names[scope][node.id]

    def function(self, node: ast.AST) -> str:
        """The function of mpi4jax whose results an expression returns when it is called; empty if none."""
        if isinstance(node, ast.Attribute):
            return node.attr if node.attr in FUNCTIONS and self._meaning(node.value) == _PACKAGE else ""
        if isinstance(node, ast.Lambda):
            return self.call(node.body)
        if isinstance(node, ast.Call):
            keeps = node.args and _dotted(node.func).rpartition(".")[2] in _KEEPING
            return self.function(node.args[0]) if keeps else ""
        meaning = self._meaning(node)
        return meaning if meaning in FUNCTIONS else ""

    def call(self, node: ast.AST) -> str:
        """The function of mpi4jax that is called here; empty if none."""
        return self.function(node.func) if isinstance(node, ast.Call) else ""

    # --- signs

    def signs(self) -> Iterator[Sign]:
        for node in self.nodes:
            if module := self._module_of_tokens(node):
                if not self._guarded(node):
                    yield Sign("token", True, node.lineno, f"uses {module}")  # type: ignore[attr-defined]
            elif name := self.call(node):
                assert isinstance(node, ast.Call)
                if any(keyword.arg == "token" for keyword in node.keywords):
                    yield Sign("token", True, node.lineno, f"passes token= to mpi4jax.{name}")
                yield from self._of_use(node, name, follow=True)

    def _module_of_tokens(self, node: ast.AST) -> str:
        """A module of mpi4jax that this node imports or names, and that exists up to 0.7 only."""
        named: list[str] = []
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            named = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and self._meaning(node.value) == _PACKAGE:
            named = [f"{_PACKAGE}.{node.attr}"]
        of_tokens = [f"{_PACKAGE}.{module}" for module in _MODULES_OF_TOKENS]
        return next((m for name in named for m in of_tokens if f"{name}.".startswith(f"{m}.")), "")

    def _guarded(self, node: ast.AST) -> bool:
        """Inside a `try` that handles exceptions."""
        while node in self.parent:
            above = self.parent[node]
            if isinstance(above, ast.Try) and above.handlers and node in above.body:
                return True
            node = above
        return False

    def _of_use(self, node: ast.expr, name: str, follow: bool) -> Iterator[Sign]:
        """What is done with the value of `node`, which a call of mpi4jax's function `name` has returned."""
        up, line, called = self.parent[node], node.lineno, f"mpi4jax.{name}"
        array = Sign("notoken", True, line, f"uses the result of {called} as an array")
        if isinstance(up, (ast.Assign, ast.AnnAssign)) and up.value is node:
            for target in up.targets if isinstance(up, ast.Assign) else [up.target]:
                yield from self._of_target(target, name, follow)
        elif isinstance(up, ast.Tuple) and isinstance(above := self.parent[up], ast.Assign):
            for target in above.targets:  # a, b = f(x), g(x)
                if isinstance(target, ast.Tuple) and len(target.elts) == len(up.elts):
                    yield from self._of_target(target.elts[up.elts.index(node)], name, follow)
        elif name in _WITHOUT_RESULT:
            return
        elif isinstance(up, ast.Subscript) and up.value is node:
            yield from self._of_index(up, called)
        elif (
            (isinstance(up, ast.Attribute) and up.attr not in ("count", "index"))
            or isinstance(up, (ast.BinOp, ast.AugAssign))
            or (isinstance(up, ast.UnaryOp) and not isinstance(up.op, ast.Not))
            or (isinstance(up, ast.Compare) and not isinstance(up.ops[0], (ast.Is, ast.IsNot, ast.In, ast.NotIn)))
            or (isinstance(up, (ast.For, ast.comprehension)) and up.iter is node)
        ):
            yield array
        elif isinstance(up, ast.Call) and node in up.args:
            yield from self._of_argument(up, array)

    def _of_argument(self, call: ast.Call, array: Sign) -> Iterator[Sign]:
        """The value is passed to a function, which may be for pairs as well as for arrays."""
        name = _dotted(call.func)
        if _OF_ARRAYS.match(name):
            yield array
        elif name.rpartition(".")[2] not in _OF_ANYTHING:
            yield replace(array, sure=False, text=array.text.replace("uses", "passes on").replace(" as an array", ""))

    def _of_index(self, up: ast.Subscript, called: str) -> Iterator[Sign]:
        index = up.slice.value if isinstance(up.slice, ast.Constant) else None
        if isinstance(up.slice, ast.Constant) and index == 0 and isinstance(index, int):
            yield Sign("token", False, up.lineno, f"takes [0] of what {called} returns")
        elif index != 1 and not isinstance(up.slice, ast.UnaryOp):
            yield Sign("notoken", True, up.lineno, f"takes elements of the result of {called}")

    def _of_target(self, target: ast.expr, name: str, follow: bool) -> Iterator[Sign]:
        if isinstance(target, (ast.Tuple, ast.List)) and name not in _WITHOUT_RESULT:
            yield from self._of_parts(target, name)
        elif isinstance(target, ast.Name) and name in _WITHOUT_RESULT:
            if is_token(target.id.lstrip("_")):
                yield Sign("token", True, target.lineno, f"takes a token from mpi4jax.{name}")
        elif isinstance(target, ast.Name) and follow:
            for load in self._loads(target):
                yield from self._of_use(load, name, follow=False)

    def _of_parts(self, target: ast.Tuple | ast.List, name: str) -> Iterator[Sign]:
        """`y, token = ...`, or an array of two rows that is meant to be unpacked: the second value says which."""
        parts, line, called = target.elts, target.lineno, f"mpi4jax.{name}"
        if any(isinstance(part, ast.Starred) for part in parts):
            return
        if len(parts) != 2:
            yield Sign("notoken", True, line, f"unpacks the result of {called} into {len(parts)}")
            return
        second = parts[1]
        named = second.id if isinstance(second, ast.Name) else second.attr if isinstance(second, ast.Attribute) else ""
        loads = self._loads(second) if isinstance(second, ast.Name) else []
        if any(self._shows(load) for load in loads) or any(
            sign.sure and sign.api == "notoken" for load in loads for sign in self._of_use(load, name, follow=False)
        ):
            yield Sign("notoken", True, line, f"uses both values that it unpacks from {called} as arrays")
            return
        passed = any(isinstance(up := self.parent[load], ast.keyword) and up.arg == "token" for load in loads)
        yield Sign("token", passed or is_token(named), line, f"unpacks two values from {called}")

    def _shows(self, node: ast.AST) -> bool:
        """Nobody prints a token."""
        up = self.parent[node]
        return isinstance(up, ast.FormattedValue) or (isinstance(up, ast.Call) and _dotted(up.func) == "print")

    @cached_property
    def _occurrences(self) -> dict[tuple[ast.AST, str], list[ast.Name]]:
        found: dict[tuple[ast.AST, str], list[ast.Name]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Name):
                found.setdefault((self.scope(node), node.id), []).append(node)
        return found

    def _loads(self, target: ast.Name) -> list[ast.Name]:
        """Where the value that `target` gets is used, up to the next assignment in the text. Not in inner functions."""
        names = self._occurrences[self.scope(target), target.id]
        start = self._bound_at(target)
        stores = [self._bound_at(n) for n in names if isinstance(n.ctx, ast.Store)]
        end = min((place for place in [*stores, self._left_at(target)] if place > start), default=(1 << 30, 0))
        return [n for n in names if isinstance(n.ctx, ast.Load) and start <= _position(n) < end]

    def _bound_at(self, target: ast.AST) -> tuple[int, int]:
        """Where the value of a name changes: after the whole assignment."""
        node = target
        while isinstance(node, (ast.expr, ast.Starred)):
            node = self.parent[node]
        assigns = isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign))
        return _position(node, end=True) if assigns else _position(target)

    def _left_at(self, target: ast.AST) -> tuple[int, int]:
        """The end of the block in which a name gets its value, if nothing of it comes further."""
        node = target
        while not isinstance(node, ast.stmt):
            node = self.parent[node]
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(self.parent[node], block, [])
            if node in statements and isinstance(statements[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break)):
                return _position(statements[-1], end=True)
        return (1 << 30, 0)

    # --- programs for both

    def asks(self, node: ast.AST) -> bool:
        """Whether this node finds out which API there is."""
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            return bool(self._module_of_tokens(node)) and self._guarded(node)
        if isinstance(node, ast.Attribute):
            return node.attr == "__version__" and self._meaning(node.value) == _PACKAGE and self._decides(node)
        if not isinstance(node, ast.Call) or not node.args:
            return False
        first, called = node.args[0], _dotted(node.func).rpartition(".")[2]
        if called == "isinstance" and len(node.args) == 2:
            return any(_dotted(n) == "tuple" for n in ast.walk(node.args[1]))
        if called in _ASKING:
            which = [n.value for n in node.args[1:2] if isinstance(n, ast.Constant)]
            about = self.function(first) or self._meaning(first) == _PACKAGE
            return bool(about) and not any(str(value).endswith("_support") for value in which)
        of_package = isinstance(first, ast.Constant) and first.value == _PACKAGE
        return of_package and called == "version" and self._decides(node)

    def _decides(self, node: ast.AST) -> bool:
        """Whether a value is compared or kept, and not only printed."""
        while not isinstance(node, ast.stmt):
            if isinstance(node, ast.Compare):
                return True
            node = self.parent[node]
        return isinstance(node, (ast.Assign, ast.If))

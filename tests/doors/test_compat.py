"""Programs written for mpi4jax and JPI, unchanged: their calls, their results, their gradients, their errors."""

import importlib.metadata
import importlib.util
import linecache
import re
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import jaxmpi
from jaxmpi import compat
from jaxmpi._launcher import advice, sources, written_for
from jaxmpi.compat import _install
from support.launch import launch
from support.table import NEW_JAX


@pytest.fixture
def stand_in(monkeypatch):
    """Installs one package's stand-in, and takes it away after the test."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))

    def install(name):
        _install.INSTALLERS[name]()
        return importlib.import_module(name.partition("-")[0])

    yield install
    for name in ("mpi4jax", "jpi"):
        for module in [m for m in sys.modules if m.partition(".")[0] == name and m not in before]:
            del sys.modules[module]
        _install._installed.pop(name, None)


def example_input(size):
    return jnp.arange(2.0 * size)


def example_expected(rank, size):
    """Value and gradient of the worked example: scatter from 0, the last rank doubles, sum over the ranks."""
    n = 2 * size
    gradient = np.ones(n)
    gradient[-2:] = 2
    return n * (n - 1) / 2 + 2 * n - 3, gradient if rank == 0 else np.zeros(n)


# --- mpi4jax --------------------------------------------------------------------------------------------------------


def test_mpi4jax(stand_in, comm, rank, size):
    mpi4jax = stand_in("mpi4jax")
    x = jnp.arange(3.0) + rank
    total = size * np.arange(3.0) + size * (size - 1) / 2
    np.testing.assert_array_equal(mpi4jax.allreduce(x, op=MPI.SUM, comm=comm), total)
    np.testing.assert_array_equal(jax.jit(lambda x: mpi4jax.allreduce(x, MPI.SUM))(x), total)
    assert mpi4jax.barrier(comm=comm) is None
    assert mpi4jax.send(x, MPI.PROC_NULL, tag=1) is None
    np.testing.assert_array_equal(mpi4jax.allgather(x)[rank], x)
    np.testing.assert_array_equal(mpi4jax.bcast(x, root=np.int32(0)), np.arange(3.0))
    np.testing.assert_array_equal(mpi4jax.sendrecv(x, x, source=rank, dest=rank), x)
    assert mpi4jax.gather(x, 0).shape == ((size, 3) if rank == 0 else (3,))
    assert mpi4jax.has_cuda_support() == jaxmpi.has_cuda_support()
    assert mpi4jax.has_sycl_support() is False
    assert mpi4jax.__version__.startswith("0.9")
    assert importlib.util.find_spec("mpi4jax") is not None

    def loss(x):
        part = mpi4jax.scatter(x.reshape(size, 2) if rank == 0 else x[:2], 0, comm=comm)
        part = part * 2 if rank == size - 1 else part
        return mpi4jax.allreduce(part, op=MPI.SUM).sum()

    value, gradient = jax.value_and_grad(loss)(example_input(size))
    expected_value, expected_gradient = example_expected(rank, size)
    assert value == expected_value
    np.testing.assert_array_equal(gradient, expected_gradient)


def test_mpi4jax_errors(stand_in, comm, rank):
    mpi4jax = stand_in("mpi4jax")
    x = jnp.ones(3)
    with pytest.raises(RuntimeError, match=r"Drop the argument.*api='token'"):
        mpi4jax.allreduce(x, MPI.SUM, token=None)
    with pytest.raises(TypeError, match="static_argnums"):
        jax.jit(lambda x, root: mpi4jax.bcast(x, root))(x, 0)
    with pytest.raises(TypeError, match="communicator"):
        mpi4jax.allreduce(x, MPI.SUM, comm=3)
    with pytest.raises(TypeError):
        mpi4jax.bcast(x, 0.5)
    with pytest.raises(TypeError):
        mpi4jax.allreduce(x, op="sum")
    with pytest.raises(ValueError, match="first axis"):
        mpi4jax.alltoall(jnp.ones((comm.size + 1, 2)))
    with pytest.raises(ValueError, match="api must be one of"):
        compat.install_as_mpi4jax(api="tokens")
    with pytest.raises(RuntimeError, match="installed already"):
        compat.install_as_mpi4jax(api="token")
    compat.install_as_mpi4jax()  # again is nothing


def test_mpi4jax_with_tokens(stand_in, comm, rank, size):
    mpi4jax = stand_in("mpi4jax-token")
    x = jnp.arange(3.0) + rank
    total = size * np.arange(3.0) + size * (size - 1) / 2
    token = mpi4jax.barrier()

    @jax.jit
    def run(x, token):
        y, token = mpi4jax.allreduce(x, op=MPI.SUM, comm=comm, token=token)
        token = mpi4jax.send(y, MPI.PROC_NULL, token=token)
        z, token = mpi4jax.bcast(y + rank, 0, token=token)
        return z, token

    for any_token in (token, None, jnp.zeros(()), jax.lax.create_token() if hasattr(jax.lax, "create_token") else None):
        z, _ = run(x, any_token)
        np.testing.assert_array_equal(z, total)
    for token in (jnp.zeros(1), mpi4jax.barrier()):  # in a loop's carry
        for loop in (
            lambda f, start: jax.lax.fori_loop(0, 3, lambda i, carry: f(*carry), start),
            lambda f, start: jax.lax.scan(lambda carry, _: (f(*carry), None), start, None, length=3)[0],
        ):
            y, _ = loop(lambda x, t: mpi4jax.allreduce(x, MPI.MAX, token=t), (x, token))
            np.testing.assert_array_equal(y, np.arange(3.0) + size - 1)
    from mpi4jax.experimental import auto_tokenize, notoken

    assert mpi4jax.notoken.allreduce is notoken.allreduce

    np.testing.assert_array_equal(auto_tokenize(lambda x: notoken.allreduce(x, MPI.SUM))(x), total)

    def loss(x):
        part, token = mpi4jax.scatter(x.reshape(size, 2) if rank == 0 else x[:2], 0, comm=comm)
        part = part * 2 if rank == size - 1 else part
        return mpi4jax.allreduce(part, op=MPI.SUM, token=token)[0].sum()

    value, gradient = jax.value_and_grad(loss)(example_input(size))
    expected_value, expected_gradient = example_expected(rank, size)
    assert value == expected_value
    np.testing.assert_array_equal(gradient, expected_gradient)


def test_static_communicator(stand_in, comm, size):
    """The wrapper that is not public, but is all there is for a communicator as a static argument."""
    mpi4jax = stand_in("mpi4jax")
    from mpi4jax._src.utils import HashableMPIType, wrap_as_hashable

    f = jax.jit(lambda x, comm: mpi4jax.allreduce(x, op=MPI.SUM, comm=comm), static_argnums=1)
    for wrapped in (HashableMPIType(comm), wrap_as_hashable(comm)):
        np.testing.assert_array_equal(f(jnp.ones(2), wrapped), np.full(2, float(size)))
    assert f._cache_size() == 1
    part = comm.Dup()
    first = wrap_as_hashable(part)
    np.testing.assert_array_equal(f(jnp.ones(2), first), np.full(2, float(size)))
    part.Free()
    again = comm.Dup()  # perhaps with the same handle
    np.testing.assert_array_equal(f(jnp.ones(2), wrap_as_hashable(again)), np.full(2, float(size)))
    jax.effects_barrier()
    again.Free()


def test_imported_before(stand_in, monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4jax", sys)
    with pytest.raises(RuntimeError, match=r"imported already.*--as mpi4jax"):
        compat.install_as_mpi4jax()


# --- mpi4jax's two APIs ---------------------------------------------------------------------------------------------

TEXTS = {
    # certainly for tokens
    "g, _ = mpi4jax.allgather(x)": ("token", True),
    "y = ar(x, token=None)": ("token", True),
    "y, t = ar(x)\nz = halo(y, token=t)": ("token", True),
    "def f(x):\n    r = mpi4jax.bcast(x, 0)\n    y, tok = r\n    return y[0]": ("token", True),
    "f = functools.partial(mpi4jax.allreduce, op=SUM)\ny, _ = f(x)": ("token", True),
    "g = jax.jit(lambda x: ar(x))\ny, token = g(x)": ("token", True),
    "def f(x):\n    return ar(x)\ny, _ = jax.jit(f)(x)": ("token", True),
    "self.x, self.token = ar(x)": ("token", True),
    "token = mpi4jax.send(x, 1)": ("token", True),
    "from mpi4jax.experimental import notoken\ny = notoken.allreduce(x) + 1": ("token", True),
    "y = mpi4jax.notoken.allreduce(x)": ("token", True),
    # only likely
    "y = ar(x)[0]": ("token", False),
    "a, b = mpi4jax.allgather(x)": ("token", False),
    "y, t = ar(x)\nz = halo(y, t)": ("token", False),
    "y = ar(x)\nz = ode(y)\ng, _ = mpi4jax.gather(x, 0)": ("token", False),
    # certainly for results alone
    "a, b = mpi4jax.allgather(x)\nprint(a, b)": ("notoken", True),
    "s, n = ar(jnp.stack([s, n]), op=SUM)\nmean = s / n": ("notoken", True),
    "a, b, c = mpi4jax.allgather(x)": ("notoken", True),
    "y = mpi4jax.allreduce(x, op=SUM) / size": ("notoken", True),
    "y = ar(x).sum()": ("notoken", True),
    "x = ar(x)\ny = jnp.sin(x)": ("notoken", True),
    "y = mpi4jax.allgather(x)[rank]": ("notoken", True),
    "def f(x):\n    return ar(x)\ny = f(x) + 1": ("notoken", True),
    # for both, or not known
    "y = ar(x)\ndef f(y):\n    return y + 1": None,
    "def f(x):\n    y = ar(x)\n    if p:\n        z = ar(x)\n        return z\n    z = x.T": None,
    "y = ar(x)\nif isinstance(y, tuple):\n    y, _ = y": None,
    "if mpi4jax.__version__ < '0.8':\n    y, _ = ar(x)": None,
    "try:\n    y, _ = ar(x, token=t)\nexcept RuntimeError:\n    y = ar(x) + 0": None,
    "try:\n    from mpi4jax.experimental import notoken as m\nexcept ImportError:\n    m = mpi4jax": None,
    "def f(ar):\n    y, _ = ar(x)": None,
    "_ = mpi4jax.barrier()": None,
    "y, _ = other.allgather(x)": None,
}


@pytest.mark.one_rank
@pytest.mark.parametrize("text", TEXTS)
def test_what_a_program_is_written_for(text):
    """The expected answers are what mpi4jax's documentation says of its releases."""
    verdict = written_for.read(f"import mpi4jax\nfrom mpi4jax import allreduce as ar\n{text}\n").verdict
    assert (verdict and (verdict.sign.api, verdict.certain)) == TEXTS[text], verdict


@pytest.mark.one_rank
def test_what_is_read_of_a_program(tmp_path):
    texts = {
        "main.py": "import a, json, later\n",
        "later.py": "",
        "unused.py": "",
        "a/__init__.py": "from .b import c",
        "a/b/__init__.py": "from . import c, missing",
        "a/b/c.py": "from ..d import x",
        "a/d.py": "(",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = {source.file for source in sources.of_program(None, str(tmp_path / "main.py"))}
    assert found == {str(tmp_path / name) for name in texts if name != "unused.py"}


def function(folder, text, imports="import functools, mpi4jax"):
    """The function `f` of a module with this text."""
    file, names = str(folder / f"module{abs(hash(text))}.py"), {"jax": jax, "jnp": jnp, "SUM": MPI.SUM}
    text = f"{imports}\n{text}\n"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    exec(compile(text, file, "exec"), names)
    return names["f"]


@pytest.mark.ranks(2)
@pytest.mark.max_ranks(2)
def test_rows_that_are_taken_for_a_result_and_a_token(stand_in, rank, size, tmp_path, monkeypatch):
    """Also through functions that are passed on, and of which the text does not show what they are."""
    stand_in("mpi4jax")
    x = jnp.arange(3.0) + rank
    refused = (
        "def f(x):\n    y, _ = mpi4jax.allgather(x)\n    return y",
        "def g(function, x):\n    y, tok = function(x)\n    return y\n"
        "def f(x):\n    return g(lambda x: mpi4jax.allgather(x), x)",
        "def g(x):\n    return mpi4jax.allgather(x)\ndef f(x):\n    g(x)\n    y, _ = {'g': g}['g'](x)\n    return y",
        "def f(x):\n    f, o = {'g': functools.partial(mpi4jax.allgather)}['g'], type('o', (), {})\n"
        "    y, o.token = f(x)\n    return y",
    )
    for text in refused:
        for jit in (lambda f: f, jax.jit):
            with pytest.raises(RuntimeError, match="--as mpi4jax-token"):
                jit(function(tmp_path, text))(x)
    rows = "def f(x):\n    a, b = mpi4jax.allgather(x)\n    return {}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(function(tmp_path, rows.format("a + b"))(x), 2 * np.arange(3.0) + 1)
    with pytest.warns(RuntimeWarning, match="an array of two rows"):
        function(tmp_path, rows.format("(a, b)"))(x)
    with pytest.raises(ValueError, match="values to unpack"):
        function(tmp_path, "def f(x):\n    y, _ = {'g': mpi4jax.bcast}['g'](x, 0)\n    return y")(x)
    monkeypatch.setenv(written_for.SWITCH, "0")
    for module in ("mpi4jax", "mpi4jax._src"):
        sys.modules.pop(module)
    stand_in("mpi4jax")
    np.testing.assert_array_equal(function(tmp_path, refused[0])(x), np.arange(3.0))


@pytest.mark.parametrize("name", ["mpi4jax", "mpi4jax-token"])
def test_calls_for_the_other_api(stand_in, tmp_path, name):
    """Refused before they communicate."""
    stand_in(name)
    for_tokens = function(tmp_path, "def f(x):\n    y, token = mpi4jax.allreduce(x, op=SUM)\n    return y")
    alone = function(tmp_path, "def f(x):\n    y = mpi4jax.allreduce(x, op=SUM)\n    return y * 2")
    right, wrong = (alone, for_tokens) if name == "mpi4jax" else (for_tokens, alone)
    assert right(jnp.ones(3)).shape == (3,)
    with pytest.raises(RuntimeError, match=r"module\d+\.py:[34] .*--as mpi4jax.*; JAXMPI_COMPAT_CHECK=0"):
        wrong(jnp.ones(3))


# --- what programs find out -----------------------------------------------------------------------------------------


@pytest.mark.one_rank
@pytest.mark.parametrize("name", ["mpi4jax", "mpi4jax-token", "jpi"])
def test_metadata(stand_in, name):
    package = stand_in(name).__name__
    found = importlib.metadata.distribution(package)
    version = {"mpi4jax": "0.9.1", "mpi4jax-token": "0.7.2", "jpi": "0.1.0"}[name]
    assert (found.metadata["Name"], found.version, found.files) == (package, version, [])
    assert importlib.metadata.version(package.upper()) == version
    assert [d.version for d in importlib.metadata.distributions() if d.metadata["Name"] == package] == [version]
    assert package not in {d.metadata["Name"] for d in importlib.metadata.distributions(path=sys.path[:1])}
    if sys.version_info >= (3, 11):  # before, it fails for jaxmpi's own editable install
        assert importlib.metadata.packages_distributions()[package] == [package]
    importlib.metadata.entry_points()


@pytest.mark.parametrize("name", ["mpi4jax", "mpi4jax-token"])
def test_private_names(stand_in, comm, name):
    """That public programs import; from others they learn what there is instead."""
    mpi4jax = stand_in(name)
    from mpi4jax._src.collective_ops.allreduce import allreduce
    from mpi4jax._src.comm import get_default_comm
    from mpi4jax._src.flush import flush
    from mpi4jax._src.jax_compat import versiontuple
    from mpi4jax._src.xla_bridge.mpi_xla_bridge_cpu import get_logging, set_logging

    assert allreduce is mpi4jax.allreduce
    assert get_default_comm() is mpi4jax._src.utils.get_default_comm()
    assert get_default_comm().size == comm.size
    assert versiontuple("0.6.1.post2") == (0, 6, 1)
    flush()
    bridge = mpi4jax._src.xla_bridge
    assert mpi4jax.has_cuda_support() == bridge.HAS_GPU_EXT
    assert bridge.HAS_XPU_EXT is False
    before = get_logging()
    set_logging(True)
    assert bridge.get_logging() is True
    set_logging(before)
    for module, missing, told in [
        ("mpi4jax._src.collective_ops.allreduce", "mpi_allreduce_p", "ordered_effect"),
        ("mpi4jax._src.decorators", "setup_cuda_mpi", "JAXMPI_DEVICE_MPI"),
        ("mpi4jax._src.xla_bridge", "mpi_xla_bridge_xpu", "jaxmpi.info"),
        ("mpi4jax", "Allreduce", "allreduce"),
        *([("mpi4jax", "experimental", "--as mpi4jax-token")] if name == "mpi4jax" else []),
    ]:
        assert not hasattr(sys.modules[module], missing)
        with pytest.raises(AttributeError, match=told):
            getattr(sys.modules[module], missing)
        with pytest.raises(ImportError, match=told):
            exec(f"from {module} import {missing}")
    with pytest.raises(ImportError, match=r"jaxmpi\.info"):
        mpi4jax._src.decorators.ensure_xpu_ext()


def test_primitive_with_the_ordered_effect(stand_in, size):
    """A program's own primitive keeps its place among the calls, in all compiled forms and in derivatives."""
    stand_in("mpi4jax")
    from jax._src import dispatch  # as such programs do
    from jax._src.lib.mlir.dialects import hlo
    from jax.extend.core import Primitive
    from jax.interpreters import ad, mlir
    from mpi4jax._src.utils import ordered_effect

    twice = Primitive("twice")
    twice.def_effectful_abstract_eval(lambda x: (x, {ordered_effect}))
    twice.def_impl(lambda x: dispatch.apply_primitive(twice, x))
    ad.primitive_jvps[twice] = lambda xs, dxs: (twice.bind(*xs), twice.bind(ad.instantiate_zeros(dxs[0])))
    ad.primitive_transposes[twice] = lambda cotangent, _: [twice.bind(ad.instantiate_zeros(cotangent))]

    def lower(ctx, x):
        ctx.set_tokens_out(mlir.TokenSet({ordered_effect: ctx.tokens_in.get(ordered_effect)}))
        return [hlo.AddOp(x, x).result]

    mlir.register_lowering(twice, lower)

    def f(x):
        return jaxmpi.notoken.allreduce(twice.bind(jaxmpi.notoken.allreduce(x, MPI.SUM)), MPI.SUM).sum()

    for jit in (lambda f: f, jax.jit, jaxmpi.jit):
        assert jit(f)(jnp.ones(3)) == 6 * size**2
        np.testing.assert_array_equal(jit(jax.grad(f))(jnp.ones(3)), np.full(3, 2.0))


# --- JPI ------------------------------------------------------------------------------------------------------------


def test_jpi(stand_in, comm, rank, size):
    jpi = stand_in("jpi")
    token = jpi.gen_token()
    assert (token.shape, token.dtype) == ((), jnp.float32)
    x = jnp.arange(3.0) + rank
    for jit in (lambda f: f, jax.jit):
        y, token = jit(lambda x, t: jpi.allreduce(x, t, op=MPI.SUM, comm=comm))(x, token)
        np.testing.assert_array_equal(y, size * np.arange(3.0) + size * (size - 1) / 2)
        y, token = jit(lambda x, t: jpi.allgather(x, t, comm))(x, token)
        np.testing.assert_array_equal(y, np.stack([np.arange(3.0) + r for r in range(size)]))
        y, token = jit(lambda x, t: jpi.bcast(x, t, root=0, comm=comm))(x, token)
        np.testing.assert_array_equal(y, np.arange(3.0))
        y, token = jit(lambda x, t: jpi.gather(x, t, 0, comm))(x, token)
        np.testing.assert_array_equal(
            y, np.stack([np.arange(3.0) + r * (rank == 0) for r in range(size)]) * (rank == 0)
        )
        token = jpi.barrier(token, comm=comm)
        assert (token.shape, token.dtype) == ((), jnp.float32)
        for n in (1, 2):  # one row for each rank is squeezed
            whole = jnp.arange(6.0 * size * n).reshape(size * n, 6)
            part, token = jit(lambda x, t: jpi.scatter(x, t, 0, comm))(whole if rank == 0 else 0 * whole, token)
            np.testing.assert_array_equal(part, whole[rank * n : rank * n + n].reshape(part.shape))
            assert part.shape == ((6,) if n == 1 else (2, 6))
    with pytest.raises(ValueError, match="divisible"):
        jpi.scatter(jnp.ones(size + 1) if size > 1 else jnp.ones(()), token, 0, comm)


def test_gradients_of_jpi(stand_in, comm, rank, size):
    jpi = stand_in("jpi")
    weights = jnp.arange(1.0, size + 1)[:, None] * jnp.ones((size, 3))
    x = jnp.ones(3)

    def gradient(f):
        return jax.jit(jax.grad(lambda x: jnp.sum(f(x, jpi.gen_token()))))(x)

    np.testing.assert_array_equal(gradient(lambda x, t: jpi.allgather(x, t, comm)[0] * weights), np.full(3, rank + 1.0))
    np.testing.assert_array_equal(
        gradient(lambda x, t: jpi.bcast(x, t, 0, comm)[0] * (rank + 5)), np.full(3, 5.0 if rank == 0 else 0)
    )
    np.testing.assert_array_equal(gradient(lambda x, t: jpi.gather(x, t, 0, comm)[0] * weights), np.full(3, rank + 1.0))
    np.testing.assert_array_equal(gradient(lambda x, t: jpi.allreduce(x, t, MPI.SUM)[0] * 3), np.full(3, 3.0))

    def loss(x):
        part, token = jpi.scatter(x, jpi.gen_token(), 0, comm)
        part = part * 2 if rank == size - 1 else part
        return jpi.allreduce(part, token, MPI.SUM)[0].sum()

    value, of_x = jax.value_and_grad(loss)(example_input(size))
    expected_value, expected_gradient = example_expected(rank, size)
    assert value == expected_value
    np.testing.assert_array_equal(of_x, expected_gradient)


@pytest.mark.skipif(not NEW_JAX, reason="needs JAX 0.7")
@pytest.mark.ranks(2)  # MPICH does not send to oneself without a receive
def test_messages_of_jpi(stand_in, comm, rank, size):
    jpi = stand_in("jpi")
    left, right = (rank - 1) % size, (rank + 1) % size

    def f(x):
        x, token = jpi.send(x * rank, jpi.gen_token(), dest=right, tag=0, comm=comm)
        y, token = jpi.recv(jnp.empty_like(x), token, source=left, tag=0, comm=comm)
        return jnp.sum(y)

    np.testing.assert_array_equal(jax.grad(f)(jnp.ones((2, 2))), np.full((2, 2), float(rank)))


# --- whole programs -------------------------------------------------------------------------------------------------


@pytest.fixture
def program(tmp_path):
    return tmp_path / "program.py"


DEEP = {
    "solver/__init__.py": "",
    "solver/physics/__init__.py": "from .sums import total\n",
    "solver/physics/sums.py": "from mpi4py import MPI\nfrom mpi4jax import allreduce\n\n"
    "def total(x):\n    return allreduce(x, op=MPI.SUM)\n",
    "solver/__main__.py": "import jax.numpy as jnp\nfrom solver.physics import total\n"
    "print('total', float(total(jnp.float32(2))))\n",
}


@pytest.mark.launches
@pytest.mark.seconds(200)
def test_program_that_imports_deep_inside(tmp_path, monkeypatch):
    for name, text in DEEP.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    done = launch(2, "--as", "mpi4jax", "-m", "solver")
    assert done.stdout.count("total 4.0") == 2


@pytest.mark.launches
@pytest.mark.seconds(200)
def test_program_that_sets_up_mpi4py_first(program):
    program.write_text(
        "import mpi4py\nmpi4py.rc.thread_level = 'serialized'\nfrom mpi4py import MPI\n"
        "import jax.numpy as jnp\nfrom jpi import allreduce, gen_token\nimport mpi4jax, mpi4jax.experimental\n"
        "assert MPI.Query_thread() == MPI.THREAD_SERIALIZED\n"
        "y, token = allreduce(jnp.ones(2), gen_token(), MPI.SUM)\n"
        "z, token = mpi4jax.allreduce(y, MPI.SUM, token=token)\nprint('sum', float(z.sum()))\n"
    )
    done = launch(2, "--as", "jpi", "--as", "mpi4jax-token", program)
    assert done.stdout.count("sum 8.0") == 2


@pytest.mark.launches
@pytest.mark.seconds(200)
def test_looking_before_importing(program):
    """Programs ask whether a package is there, import again after a failure, reload; __main__ stays theirs at exit."""
    program.write_text(
        "import atexit, importlib, importlib.util, pickle, sys\n"
        "assert importlib.util.find_spec('mpi4jax') is not None and 'jax' not in sys.modules\n"
        "from importlib.metadata import version\nassert version('mpi4jax').startswith('0.9')\n"
        "import mpi4py\nmpi4py.rc.initialize = False\n"
        "try:\n    import mpi4jax\n    raise SystemExit('imported before MPI.Init')\nexcept RuntimeError as error:\n"
        "    print('told', 'MPI.Init_thread()' in str(error))\n"
        "from mpi4py import MPI\nMPI.Init_thread()\natexit.register(MPI.Finalize)\n"
        "import mpi4jax\nimportlib.reload(mpi4jax)\ndel sys.modules['mpi4jax']\nimport mpi4jax\n"
        "print('version', mpi4jax.__version__)\n"
        "from importlib.metadata import distributions\n"
        "assert [d.version for d in distributions(name='mpi4jax')] == [mpi4jax.__version__]\n"
        "class State: pass\natexit.register(lambda: print('pickled', len(pickle.dumps(State())) > 0))\n"
    )
    done = launch(1, "--as", "mpi4jax", program)
    for text in ("told True", "version 0.9", "pickled True"):
        assert text in done.stdout, done.stdout + done.stderr


@pytest.mark.launches
@pytest.mark.seconds(200)
def test_wrong_use(program):
    program.write_text("import mpi4jax\n")
    done = launch(1, program, check=False)
    assert "--as mpi4jax, before the program (mpi4jax-token if" in done.stderr
    done = launch(1, "--as", "mpi4jax", "--as", "mpi4jax-token", program, check=False)
    assert "one package twice" in done.stderr
    assert done.returncode == 2


@pytest.mark.launches
@pytest.mark.seconds(200)
def test_programs_for_the_other_api(program):
    """Refused before anything runs, also for a module beside the program; or advice at the end of the traceback."""
    program.write_text("print('started')\nimport beside\nbeside.run()\n")
    beside = program.with_name("beside.py")
    beside.write_text("import mpi4jax\ndef run():\n    g, _ = mpi4jax.allgather(1.0)\n")
    done = launch(2, "--as", "mpi4jax", program, check=False)
    assert (done.stdout, done.returncode) == ("", 1)
    assert f"{beside}:3 unpacks two values" in done.stderr
    assert "Run it by --as mpi4jax-token" in done.stderr
    done = launch(1, "--as", "mpi4jax", program, check=False, JAXMPI_COMPAT_CHECK="0")
    assert "started" in done.stdout
    assert re.search("to unpack.*\njaxmpi.run: if that is a result of mpi4jax.*--as mpi4jax-token$", done.stderr, re.M)


@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("text", "replaced", "told"),
    [
        ("y, t = jnp.ones(3)", "mpi4jax", "if that is a result of mpi4jax.*--as mpi4jax-token$"),
        ("y, t = jnp.ones(1)", "mpi4jax", "if that is a result of mpi4jax.*--as mpi4jax-token$"),
        ("y, t = jnp.float32(1)", "mpi4jax", "if that is a result of mpi4jax.*--as mpi4jax-token$"),
        ("(1, 2) + 1", "mpi4jax-token", "if that is a result of mpi4jax.*--as mpi4jax$"),
        ("(1, 2).sum()", "mpi4jax-token", "if that is a result of mpi4jax.*--as mpi4jax$"),
        ("jnp.sin((1, 2))", "mpi4jax-token", "if that is a result of mpi4jax.*--as mpi4jax$"),
        ("mpi4jax.allreduce(x).sum()", "", "--as mpi4jax, before the program$"),
        ("mpi4jax.send(x, 1, token=t)", "", "--as mpi4jax-token, before the program$"),
        ("raise ModuleNotFoundError('', name='jpi.token')", "mpi4jax", "--as jpi, before the program$"),
        ("import mpi4jax.experimental", "mpi4jax", "--as mpi4jax-token$"),
        ("raise ModuleNotFoundError('its text: --as mpi4jax-token', name='mpi4jax')", "jpi", "^$"),
        ("y, t, u = jnp.ones(2)", "mpi4jax", "^$"),
        ("y, t = jnp.ones(3)", "jpi", "^$"),
        ("{}['tuple']", "mpi4jax-token", "^$"),
    ],
)
def test_advice(text, replaced, told, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "mpi4jax", None)  # as if it were not there
    with pytest.raises(Exception) as raised:  # noqa: PT011 (of any kind)
        function(tmp_path, f"def f():\n    {text}", imports="import mpi4jax" if replaced == "" else "# mpi4jax")()
    assert re.search(told, advice.of_error(raised.value, [replaced]))

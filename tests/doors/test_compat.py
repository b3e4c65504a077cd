"""Programs written for mpi4jax and JPI, unchanged: their calls, their results, their gradients, their errors."""

import ast
import importlib.metadata
import importlib.util
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import jaxmpi
from jaxmpi import compat
from jaxmpi.compat import _install
from jaxmpi_launch import written_for
from support import simulated
from support.launch import launch
from support.rows import each
from support.table import NEW_JAX


@pytest.fixture
def stand_in(monkeypatch):
    """Installs one package's stand-in, and takes it away after the test."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))

    def install(name):
        _install.install(name)
        return importlib.import_module(name.partition("-")[0])

    yield install
    for name in ("mpi4jax", "jpi"):
        for module in [m for m in sys.modules if m.partition(".")[0] == name and m not in before]:
            del sys.modules[module]
        _install._installed.pop(name, None)


def check_example(scatter, allreduce, rank, size, whole=False):
    """Value and gradient of the worked example: scatter from 0, the last rank doubles, sum over the ranks. The `whole`
    array is passed on all ranks, or a part where it is not read."""
    n = 2 * size

    def loss(x):
        part, *token = scatter(x if whole else x.reshape(size, 2) if rank == 0 else x[:2])
        return allreduce(part * 2 if rank == size - 1 else part, *token).sum()

    value, gradient = jax.value_and_grad(loss)(jnp.arange(2.0 * size))
    assert value == n * (n - 1) / 2 + 2 * n - 3
    np.testing.assert_array_equal(gradient, [*[1.0] * (n - 2), 2, 2] if rank == 0 else np.zeros(n))


# --- mpi4jax --------------------------------------------------------------------------------------------------------


def test_mpi4jax(stand_in, comm, rank, size):
    mpi4jax = stand_in("mpi4jax")
    x, total = jnp.arange(3.0) + rank, size * np.arange(3.0) + size * (size - 1) / 2
    np.testing.assert_array_equal(mpi4jax.allreduce(x, op=MPI.SUM, comm=comm), total)
    np.testing.assert_array_equal(jax.jit(lambda x: mpi4jax.allreduce(x, MPI.SUM))(x), total)
    assert mpi4jax.barrier(comm=comm) is None
    assert mpi4jax.send(x, MPI.PROC_NULL, tag=1) is None
    np.testing.assert_array_equal(mpi4jax.allgather(x)[rank], x)
    np.testing.assert_array_equal(mpi4jax.bcast(x, root=np.int32(0)), np.arange(3.0))
    np.testing.assert_array_equal(mpi4jax.sendrecv(x, x, source=rank, dest=rank), x)
    assert mpi4jax.gather(x, 0).shape == ((size, 3) if rank == 0 else (3,))
    assert mpi4jax.has_cuda_support() == jaxmpi.has_cuda_support()
    assert mpi4jax.has_sycl_support() is (simulated.TRANSPORT == "sycl")
    assert mpi4jax.__version__.startswith("0.9")
    assert importlib.util.find_spec("mpi4jax") is not None
    check_example(lambda x: [mpi4jax.scatter(x, 0, comm=comm)], lambda x: mpi4jax.allreduce(x, op=MPI.SUM), rank, size)


def test_mpi4jax_errors(stand_in):
    mpi4jax = stand_in("mpi4jax")
    x = jnp.ones(3)
    with pytest.raises(RuntimeError, match=r"Drop the argument.*api='token'"):
        mpi4jax.allreduce(x, MPI.SUM, token=None)
    with pytest.raises(TypeError, match="static_argnums"):
        jax.jit(lambda x, root: mpi4jax.bcast(x, root))(x, 0)
    with pytest.raises(ValueError, match="api must be one of"):
        compat.install_as_mpi4jax(api="tokens")
    with pytest.raises(RuntimeError, match="installed already"):
        compat.install_as_mpi4jax(api="token")
    compat.install_as_mpi4jax()  # again is nothing


def test_mpi4jax_with_tokens(stand_in, comm, rank, size):
    mpi4jax = stand_in("mpi4jax-token")
    x, total = jnp.arange(3.0) + rank, size * np.arange(3.0) + size * (size - 1) / 2
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
    sum_with = lambda x, token: mpi4jax.allreduce(x, op=MPI.SUM, token=token)[0]  # noqa: E731
    check_example(lambda x: mpi4jax.scatter(x, 0, comm=comm), sum_with, rank, size)


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

ERROR = {
    "g, _ = mpi4jax.allgather(x)": "5 takes a result and a token from mpi4jax.allgather",
    "if old:\n    self.x, self.token = ar(x)": "6 takes a result and a token from mpi4jax.allreduce",
    "[y, new_tok] = m.bcast(x, 0)": "5 takes a result and a token from mpi4jax.bcast",
    "f(ar(\n    x, token=None))": "5 passes token= to mpi4jax.allreduce",
    "a, b = ar(x)\nmpi4jax.send(b, 1, token=t)": "6 passes token= to mpi4jax.send",
}
DOUBT = {
    "a, b = mpi4jax.allgather(x)": "5 takes two values from mpi4jax.allgather",
    "u, stokes = ar(jnp.stack([u, v]), op=SUM)": "5 takes two values from mpi4jax.allreduce",
}
ALONE = {
    "y = ar(x)\nprint(y[0])": "5 takes the result of mpi4jax.allreduce alone",
    "a, b, c = m.allgather(x)": "5 takes the result of mpi4jax.allgather alone",
}
NOTHING = (
    "y, _ = other.allgather(x)",
    "y = ar(x)[0]",
    "mpi4jax.barrier()",
    "token = mpi4jax.send(x, 1)",
    "gpu = mpi4jax.has_cuda_support()",
    "y = mpi4jax.notoken.allreduce(x)",
    "y, token = jpi.allreduce(x, token=token)",
    "y = x" + ".a()" * 400,  # deeper than Python's stack for a walk that follows calls
)


@pytest.mark.alone
def test_calls_for_the_other_api(capsys):
    """The expected answers are what mpi4jax's documentation says of its releases."""
    imports = "import jpi, mpi4jax\nimport mpi4jax as m\nfrom mpi4jax import allreduce as ar\nimport other\n"

    def check(text):
        tree = ast.parse(imports + text)
        error, warned = "", []
        for chosen in ("mpi4jax", "mpi4jax-token"):
            try:
                written_for.check(["jpi", chosen], tree, "a.py")
            except SystemExit as ended:
                error = str(ended)
            warned.append(capsys.readouterr().err)
        old = "as programs for mpi4jax up to 0.7 do: {}run it by --as mpi4jax-token"
        new = "as programs for mpi4jax from 0.8 on do: if it is one, run it by --as mpi4jax"
        assert error == (f"jaxmpi.run: a.py:{ERROR[text]}, {old.format('')}" if text in ERROR else "")
        assert warned == [
            f"jaxmpi.run: a.py:{DOUBT[text]}, {old.format('if it is one, ')}\n" if text in DOUBT else "",
            f"jaxmpi.run: a.py:{ALONE[text]}, {new}\n" if text in ALONE else "",
        ]

    each([*ERROR, *DOUBT, *ALONE, *NOTHING], check)


# --- what programs find out -----------------------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.parametrize("name", ["mpi4jax", "mpi4jax-token", "jpi"])
def test_metadata(stand_in, name):
    package = stand_in(name).__name__
    found = importlib.metadata.distribution(package)
    version = {"mpi4jax": "0.9.1", "mpi4jax-token": "0.7.2", "jpi": "0.1.0"}[name]
    assert (found.metadata["Name"], found.version) == (package, version)
    assert importlib.metadata.version(package.upper()) == version
    importlib.metadata.entry_points()


@pytest.mark.parametrize("name", ["mpi4jax", "mpi4jax-token"])
def test_private_names(stand_in, comm, name):
    """That public programs import."""
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
    with pytest.raises(ImportError, match="mpi_allreduce_p"):
        from mpi4jax._src.collective_ops.allreduce import mpi_allreduce_p  # noqa: F401
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
        return jaxmpi.allreduce(twice.bind(jaxmpi.allreduce(x, MPI.SUM)), MPI.SUM).sum()

    for jit in (lambda f: f, jax.jit, jaxmpi.jit):
        assert jit(f)(jnp.ones(3)) == 6 * size**2
        np.testing.assert_array_equal(jit(jax.grad(f))(jnp.ones(3)), np.full(3, 2.0))


# --- JPI ------------------------------------------------------------------------------------------------------------


def test_jpi(stand_in, comm, rank, size):
    jpi = stand_in("jpi")
    token = jpi.gen_token()
    assert (token.shape, token.dtype) == ((), jnp.float32)
    whole = jnp.arange(12.0 * size)

    def calls(x, whole, token):
        summed, token = jpi.allreduce(x, token, op=MPI.SUM, comm=comm)
        gathered, token = jpi.allgather(x, token, comm)
        first, token = jpi.bcast(x, token, root=0, comm=comm)
        on_root, token = jpi.gather(x, token, 0, comm)
        token = jpi.barrier(token, comm=comm)
        one_row, token = jpi.scatter(whole[: 6 * size].reshape(size, 6), token, 0, comm)
        two_rows, token = jpi.scatter(whole.reshape(2 * size, 6), token, 0, comm)
        return summed, gathered, first, on_root, one_row, two_rows, token

    for jit in (lambda f: f, jax.jit):
        *found, token = jit(calls)(jnp.arange(3.0) + rank, whole if rank == 0 else 0 * whole, token)
        stacked = np.arange(3.0) + np.arange(size)[:, None]
        expected = [size * np.arange(3.0) + size * (size - 1) / 2, stacked, np.arange(3.0), stacked * (rank == 0)]
        expected += [whole.reshape(-1, 6)[rank], whole.reshape(-1, 6)[2 * rank : 2 * rank + 2]]  # one row is squeezed
        for one, right in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, right, strict=False)
            assert one.shape == right.shape
        assert (token.shape, token.dtype) == ((), jnp.float32)
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
    sum_with = lambda x, token: jpi.allreduce(x, token, MPI.SUM)[0]  # noqa: E731
    check_example(lambda x: jpi.scatter(x, jpi.gen_token(), 0, comm), sum_with, rank, size, whole=True)


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


@pytest.mark.alone
@pytest.mark.nightly
@pytest.mark.seconds(200)
def test_module_that_sets_up_mpi4py_first(program, monkeypatch):
    program.write_text(
        "import mpi4py\nmpi4py.rc.thread_level = 'serialized'\nfrom mpi4py import MPI\n"
        "import jax.numpy as jnp\nfrom jpi import allreduce, gen_token\nimport mpi4jax, mpi4jax.experimental\n"
        "assert MPI.Query_thread() == MPI.THREAD_SERIALIZED\n"
        "y, token = allreduce(jnp.ones(2), gen_token(), MPI.SUM)\n"
        "z, token = mpi4jax.allreduce(y, MPI.SUM, token=token)\nprint('sum', float(z.sum()))\n"
    )
    monkeypatch.chdir(program.parent)
    done = launch(1, "--as", "jpi", "--as", "mpi4jax-token", "-m", "program")
    assert done.stdout == "sum 2.0\n"


@pytest.mark.alone
@pytest.mark.seconds(200)
def test_looking_before_importing(program):
    """Programs ask whether a package is there, import again after a failure, reload; __main__ stays theirs at exit.
    A line says that two values are taken, and the program runs."""
    program.write_text(
        "import atexit, importlib, importlib.util, pickle, sys\n"
        "assert importlib.util.find_spec('mpi4jax') is not None and 'jax' not in sys.modules\n"
        "from importlib.metadata import version\nassert version('mpi4jax').startswith('0.9')\n"
        "import mpi4py\nmpi4py.rc.initialize = False\n"
        "try:\n    import mpi4jax\n    raise SystemExit('imported before MPI.Init')\nexcept RuntimeError as error:\n"
        "    print('told', 'MPI.Init_thread()' in str(error))\n"
        "from mpi4py import MPI\nMPI.Init_thread()\natexit.register(MPI.Finalize)\n"
        "import mpi4jax\nimportlib.reload(mpi4jax)\ndel sys.modules['mpi4jax']\nimport mpi4jax\n"
        "print('version', mpi4jax.__version__)\nimport jax.numpy as jnp\n"
        "a, b = mpi4jax.allreduce(jnp.ones(2), MPI.SUM)\nprint('rows', a + b)\n"
        "from importlib.metadata import distributions\n"
        "assert [d.version for d in distributions(name='mpi4jax')] == [mpi4jax.__version__]\n"
        "class State: pass\natexit.register(lambda: print('pickled', len(pickle.dumps(State())) > 0))\n"
    )
    done = launch(1, "--as", "mpi4jax", program)
    assert re.match(rf"jaxmpi.run: {program}:\d+ takes two values from mpi4jax.allreduce", done.stderr)
    for text in ("told True", "version 0.9", "rows 2.0", "pickled True"):
        assert text in done.stdout, done.stdout + done.stderr


@pytest.mark.alone
@pytest.mark.seconds(200)
def test_wrong_use(program):
    """In a module beside the program, where the launcher does not look."""
    program.write_text("print('started')\nimport beside\n")
    program.with_name("beside.py").write_text("import mpi4jax\nmpi4jax.send(1.0, 0, token=None)\n")
    done = launch(1, "--as", "mpi4jax", program, check=False)
    assert re.search("RuntimeError: send: from mpi4jax 0.8 on .*--as mpi4jax-token", done.stderr), done.stderr
    assert (done.returncode, done.stdout) == (1, "started\n")


@pytest.mark.alone
@pytest.mark.seconds(200)
def test_programs_for_the_other_api(program):
    """Refused before anything runs."""
    program.write_text("print('started')\nimport mpi4jax\ng, _ = mpi4jax.allgather(1.0)\n")
    done = launch(2, "--as", "mpi4jax", program, check=False)
    assert (done.stdout, done.returncode) == ("", 1)
    assert done.stderr.startswith(f"jaxmpi.run: {program}:3 takes a result and a token")

"""jaxmpi.jit: the meaning of jax.jit, the same order, and mixtures of jax.jit, jaxmpi.jit and eager calls."""

import copy
import gc
import inspect
import pickle
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src import dispatch
from mpi4py import MPI

import jaxmpi
from jaxmpi._primitive import jit
from jaxmpi._primitive.effect import EFFECT
from support.rows import each


def test_control_flow(size):
    def model(x):
        x = lax.fori_loop(0, 3, lambda i, v: jaxmpi.allreduce(v, MPI.MAX) + 1, jaxmpi.allreduce(x, MPI.SUM))
        x = lax.while_loop(lambda v: jaxmpi.allreduce(v[0], MPI.MAX) < 100, lambda v: v * 2, x)
        x = lax.scan(lambda v, k: (jaxmpi.allreduce(v, MPI.MIN) + k, v[0]), x, jnp.arange(4.0))[0]
        return lax.cond(x[0] > 0, lambda v: jaxmpi.allreduce(v, MPI.SUM), lambda v: v, jax.jit(jnp.sin)(x) + 2)

    x = jnp.arange(4.0)
    np.testing.assert_array_equal(jaxmpi.jit(model)(x), jax.jit(model)(x))


def test_arguments(rank, size):
    """Static and donated arguments by position and by name, keywords, defaults, pytrees, closures."""
    traced = []

    @jaxmpi.jit(static_argnames=("times", "name"), donate_argnums=0)
    def f(x, tree, times, scale=2.0, *, name="a"):
        traced.append((times, name))
        for _ in range(times):
            x = jaxmpi.allreduce(x, MPI.SUM)
        return {"x": x * scale, name: (tree["u"] + 1, None)}

    def call(**more):
        return f(jnp.ones(3), {"u": jnp.arange(2)}, **more)

    result = call(times=2)
    np.testing.assert_array_equal(result["x"], np.full(3, 2.0 * size**2))
    np.testing.assert_array_equal(result["a"][0], [1, 2])
    assert result["a"][1] is None
    np.testing.assert_array_equal(call(times=1, scale=3.0)["x"], np.full(3, 3.0 * size))
    assert "b" in call(times=1, name="b")
    np.testing.assert_array_equal(f(jnp.ones(3), {"u": jnp.arange(2)}, 1, 5.0)["x"], np.full(3, 5.0 * size))
    x = jnp.ones(3)
    f(x, {"u": jnp.arange(2)}, 1)
    assert x.is_deleted()
    before = len(traced)
    call(times=2)
    assert len(traced) == before, "a call like an earlier one is not traced again"

    captured = jnp.arange(3.0) + rank
    g = jaxmpi.jit(lambda n, x: jaxmpi.allreduce(x * n + captured, MPI.SUM), static_argnums=0)
    total = size * np.arange(3.0) + size * (size - 1) / 2
    np.testing.assert_array_equal(g(3, jnp.ones(3)), total + 3 * size)
    with pytest.raises(TypeError):
        g()


@jaxmpi.jit
def plain(x):
    """Its words."""
    return jaxmpi.allreduce(x, MPI.MAX)


class Model:
    scale = 2

    @jaxmpi.jit
    def run(x):
        return jaxmpi.allreduce(x, MPI.MAX)

    @jaxmpi.jit(static_argnums=0)
    def method(self, x):
        return jaxmpi.allreduce(x * self.scale, MPI.MAX)


def test_decorator():
    assert plain(jnp.float32(3)) == 3
    assert Model.run(jnp.float32(3)) == 3
    assert Model().method(jnp.float32(3)) == 6
    assert (plain.__name__, plain.__doc__) == ("plain", "Its words.")
    assert "method" in repr(Model.method)
    assert list(inspect.signature(Model.method).parameters) == ["self", "x"]
    assert "_allreduce" in plain.lower(jnp.float32(3)).as_text()
    assert pickle.loads(pickle.dumps(plain)) is plain
    assert copy.deepcopy(plain) is plain


def test_without_communication():
    f = jaxmpi.jit(lambda x, y: (x + y, x))
    a, b = f(jnp.ones(2), 1)
    np.testing.assert_array_equal(a, [2, 2])
    np.testing.assert_array_equal(b, [1, 1])
    assert jaxmpi.jit(lambda: None)() is None


def test_no_result(rank, size):
    """A function that returns nothing still communicates."""
    right, left = (rank + 1) % size, (rank - 1) % size
    if size > 1:
        send = jaxmpi.jit(lambda x: jaxmpi.send(x, right, tag=9))
        assert send(jnp.full(3, rank)) is None
        np.testing.assert_array_equal(jaxmpi.recv(jnp.zeros(3, int), left, tag=9), np.full(3, left))
    assert jaxmpi.jit(lambda x: jaxmpi.barrier())(jnp.ones(1)) is None


def test_transformed(size):
    """Under another transformation it is jax.jit."""
    total = jaxmpi.jit(lambda x: jaxmpi.allreduce(x, MPI.SUM))
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(jax.grad(lambda v: jnp.sum(total(v) ** 2))(x), 2 * size * np.arange(3.0))
    np.testing.assert_array_equal(jax.vmap(total)(jnp.ones((2, 3))), np.full((2, 3), float(size)))
    np.testing.assert_array_equal(jax.jit(lambda v: total(v) + 1)(x), size * np.arange(3.0) + 1)
    np.testing.assert_array_equal(jaxmpi.jit(jax.grad(lambda v: jnp.sum(total(v))))(x), np.ones(3))
    np.testing.assert_array_equal(jaxmpi.jit(lambda v: total(total(v)))(x), size**2 * np.arange(3.0))
    with jax.disable_jit():
        np.testing.assert_array_equal(total(x), size * np.arange(3.0))
        np.testing.assert_array_equal(jaxmpi.allreduce(x, MPI.SUM), size * np.arange(3.0))


def test_other_effects(size):
    seen = []

    @jaxmpi.jit
    def f(x):
        y = jaxmpi.allreduce(x, MPI.SUM)
        jax.debug.callback(lambda v: seen.append(float(v)), y[0], ordered=True)
        return jaxmpi.allreduce(y, MPI.MAX)

    for i in range(3):
        assert f(jnp.full(2, float(i)))[0] == i * size
    jax.effects_barrier()
    assert seen == [0.0, size, 2.0 * size]


def test_two_threads(two_threads, rank, size):

    def work(part, seed):
        left, right = (rank - 1) % size, (rank + 1) % size
        ways = [jaxmpi.jit, jax.jit, lambda f: f]
        calls = [way(lambda x: jaxmpi.sendrecv(x, x, left, right, comm=part)) for way in ways]
        for i in range(15):
            y = calls[i % 3](jnp.full(3, 1000.0 * seed + 10 * i + rank))
            z = calls[(i + 1) % 3](y)
            assert y[0] == 1000.0 * seed + 10 * i + left
            assert z[0] == 1000.0 * seed + 10 * i + (rank - 2) % size

    two_threads(work)


@pytest.mark.usefixtures("own_errors")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("after", [jaxmpi.jit, jax.jit, lambda f: f], ids=["jaxmpi.jit", "jax.jit", "eager"])
@pytest.mark.parametrize("way", [jaxmpi.jit, jax.jit])
def test_error_is_not_kept(way, after, rank, size):
    """A computation that fails after it was dispatched raises where its result is waited for. What comes next is
    executed, so that the other ranks need not wait, and warns."""
    heavy = jax.jit(lambda x: jnp.linalg.matrix_power(jnp.full((700, 700), x[0]) / 700, 9)[0, :3] * 0 + x)
    total = after(lambda x: jaxmpi.allreduce(x, MPI.SUM))
    if rank == 0:
        jaxmpi.send(jnp.ones(10), 1)
    if rank == 1:
        dispatched = []

        def fail():
            dispatched.append(way(lambda x: jaxmpi.recv(x, 0))(heavy(jnp.ones(3))))
            jax.block_until_ready(dispatched)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(Exception, match="would be truncated"):
                fail()
            assert total(1) == size
        if dispatched:  # and failed later
            assert "an earlier computation failed" in str(caught[0].message)
    else:
        assert total(1) == size
    assert total(1) == size


def test_eager_is_compiled_once(comm, size):
    """Operations with equal parameters share one compiled program, whichever objects say so."""
    from jaxmpi._primitive.operation import eager_programs

    before = eager_programs()
    for tag in (1, 1, np.int32(1)):
        for _ in range(3):
            jaxmpi.sendrecv(jnp.ones(3), jnp.ones(3), comm.rank, comm.rank, sendtag=tag, recvtag=tag)
    assert eager_programs() == before + 1


def test_compile_time_eval(rank, size):
    """Operations on known values are communicated at once, also while something else is traced."""

    def total():
        jaxmpi.barrier()
        return jaxmpi.allreduce(jnp.arange(3.0), MPI.SUM)

    with jax.ensure_compile_time_eval():
        np.testing.assert_array_equal(total(), size * np.arange(3.0))

    @jax.jit
    def f(x):
        with jax.ensure_compile_time_eval():
            known = total()
        return x + known

    np.testing.assert_array_equal(f(jnp.ones(3)), size * np.arange(3.0) + 1)


@pytest.mark.usefixtures("own_errors")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", [jaxmpi.jit, jax.jit])
def test_barrier_after_error(way, rank, size):
    """An error that was caught does not come back at every `jax.effects_barrier`."""
    if rank == 0:
        jaxmpi.send(jnp.ones(10), 1)
    if rank == 1:
        with pytest.raises(Exception, match="would be truncated"):
            jax.block_until_ready(way(lambda x: jaxmpi.recv(x, 0))(jnp.ones(3)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert jaxmpi.allreduce(1, MPI.SUM) == size
    jax.effects_barrier()
    assert jaxmpi.allreduce(1, MPI.SUM) == size


def is_in_place(function, x, **options):
    return "output_operand_alias" in jit._discharged_jit(function, options).lower(np.zeros(0, bool), x).as_text()


def check_in_place(functions, given, place):
    """Each function gives what is expected of `given(x)` and leaves its operand as it was; `place` says of the last
    word of a row whether a result takes an operand's place."""

    def check(name):
        function, expected, spare = functions[name]
        x = given()
        np.testing.assert_array_equal(jaxmpi.jit(function)(x), np.full(3, expected))
        np.testing.assert_array_equal(x, given())
        assert is_in_place(function, x) == place(spare)

    each(functions, check)


@pytest.mark.parametrize("threshold", [1, 1 << 60], ids=["large", "small"])
def test_in_place(threshold, monkeypatch, rank, size):
    """Results take the place of operands that nobody needs, and only those: an operand is never overwritten."""
    monkeypatch.setattr(jit, "_COPY_BYTES", threshold)
    total, own = size * (size + 1) / 2, rank + 1.0

    def given():
        return jnp.full(3, own)

    def sum_of(x):
        return jaxmpi.allreduce(x, MPI.SUM)

    constant = given()
    functions = {
        "argument": (sum_of, total, False),
        "intermediate": (lambda x: sum_of(2 * x), 2 * total, True),
        "used later": (lambda x: sum_of(y := 2 * x) + y, 2 * total + 2 * own, False),
        "returned": (lambda x: (y := 2 * x, sum_of(y))[0], 2 * own, False),
        "constant": (lambda x: sum_of(constant) + x, total + own, False),
        "loop": (lambda x: lax.fori_loop(0, 2, lambda i, v: sum_of(v), x), size * total, True),
    }
    check_in_place(functions, given, lambda spare: spare or threshold > 1)
    x = given()
    assert is_in_place(sum_of, x, donate_argnums=0)
    np.testing.assert_array_equal(jaxmpi.jit(sum_of, donate_argnums=0)(x), np.full(3, total))
    assert x.is_deleted()
    x = given()
    for operation, expected in (("allreduce", total), ("scan", own * (own + 1) / 2)):
        np.testing.assert_array_equal(getattr(jaxmpi, operation)(x, MPI.SUM), np.full(3, expected))
    np.testing.assert_array_equal(jaxmpi.reduce(x, MPI.SUM, 0), np.full(3, total if rank == 0 else own))
    np.testing.assert_array_equal(x, given())


def test_bcast_in_place(monkeypatch, rank):
    """Root's array is handed through where nobody needs it afterwards, and only there. Elsewhere it is copied, so that
    nothing is computed of it before it is sent."""
    monkeypatch.setattr(jit, "_COPY_BYTES", 1)

    def of_root(x):
        return jaxmpi.bcast(x, 0)

    functions = {
        "argument": (of_root, 1, False),
        "intermediate": (lambda x: of_root(2 * x), 2, True),
        "used later": (lambda x: of_root(y := 2 * x) * 3 + 0 * y, 6, False),
        "loop": (lambda x: lax.fori_loop(0, 3, lambda i, v: of_root(v) * 2, x), 8, True),
        "while": (lambda x: lax.while_loop(lambda v: v[0] < 100, lambda v: of_root(v) * 2, of_root(x)), 128, True),
        "kept by the loop": (lambda x: lax.fori_loop(0, 3, lambda i, v: v + of_root(x), x), rank + 4, False),
        "call": (lambda x: jax.jit(lambda v: of_root(v) + 1)(x * 2), 3, True),
        "kept by the call": (lambda x: jax.jit(lambda v: of_root(v) + 1)(y := x * 2) + 0 * y, 3, False),
    }
    check_in_place(functions, lambda: jnp.full(3, rank + 1.0), lambda spare: spare and rank == 0)
    for function, _, _ in functions.values():
        text = jit._discharged_jit(function, {}).lower(np.zeros(0, bool), jnp.ones(3)).as_text()
        assert all("-> (tensor<3x" in line for line in text.splitlines() if "@jaxmpi_bcast" in line), text


def runtime_link():
    """The array that the next call of this thread takes."""
    return dispatch.runtime_tokens.current_tokens[EFFECT]._buf


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="XLA executes nothing in the thread that calls for a GPU")
def test_short_computations_pass_no_link(size):
    """What XLA executes in the thread that calls returns no link, which costs as much as a result. Longer ones do."""
    short, long = (jaxmpi.jit(lambda x: jaxmpi.allreduce(jnp.sin(x), MPI.SUM)) for _ in range(2))
    x, y = jnp.ones(3).block_until_ready(), jnp.ones(5000).block_until_ready()
    jaxmpi.barrier()
    before = runtime_link()
    np.testing.assert_allclose(short(x), size * np.sin(1.0), rtol=1e-6)
    assert runtime_link() is before
    np.testing.assert_allclose(long(y), size * np.sin(1.0), rtol=1e-6)
    assert runtime_link() is not before


@pytest.mark.skipif(
    not jax.config.read("jax_cpu_enable_async_dispatch"), reason="all operands are ready as the function is called"
)
def test_short_computations_of_what_is_not_ready(size):
    """If operands are still being computed a short computation is waited for, and after some times has a link."""
    heavy = jax.jit(lambda x: jnp.linalg.matrix_power(jnp.full((500, 500), x[0]) / 500, 9)[0, :3] * 0 + x)
    total = jaxmpi.jit(lambda x: jaxmpi.allreduce(x, MPI.SUM))
    results, links = [], []
    for i in range(12):
        results.append(total(heavy(jnp.full(3, float(i)))))
        links.append(runtime_link())
    for i, result in enumerate(results):
        np.testing.assert_allclose(result, size * float(i))
    assert links[-1] is not links[0]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 8))])
def test_mixtures(seed, rank, size):
    """Random mixtures of ways to call, sizes, and operands that are still being computed: messages of one tag, so that
    each call gets its neighbour's value only if all have been executed in order."""
    draw = np.random.default_rng([seed, 5])
    left, right = (rank - 1) % size, (rank + 1) % size
    ways = [jaxmpi.jit, jax.jit, lambda f: f]
    heavy = jax.jit(lambda x: jnp.linalg.matrix_power(jnp.full((300, 300), x[0]) / 300, 5)[0, 0] * 0 + x)

    def sums(x):
        return jaxmpi.allreduce(jnp.cos(x), MPI.SUM)

    def ring(x):
        return jaxmpi.sendrecv(x, x, left, right)

    def loop(x):
        return lax.fori_loop(0, 3, lambda _, v: jaxmpi.sendrecv(v, v, left, right), x)

    calls = [[way(f) for way in ways] for f in (sums, ring, loop)]
    results = []
    for i in range(30):
        kind, way, elements = draw.integers(3), draw.integers(3), int(draw.choice([7, 3000]))
        x = jnp.full(elements, float(100 * i + rank))
        if draw.integers(3) == 0:
            x = heavy(x)
        results.append((kind, i, calls[kind][way](x)))
        if draw.integers(4) == 0:
            jax.block_until_ready(results[-1][-1])
    for kind, i, result in results:
        if kind == 0:
            expected = sum(np.cos(np.float32(100 * i + r), dtype=np.float32) for r in range(size))
        else:
            expected = 100 * i + (rank - (3 if kind == 2 else 1)) % size
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_call_within_a_call(rank, size):
    """A call that is executed while another is traced does not count for that, whose operands are not there yet."""
    heavy = jax.jit(lambda x: jnp.linalg.matrix_power(jnp.full((700, 700), x[0]) / 700, 9)[0, :3] * 0 + x)
    within = jaxmpi.jit(lambda x: jaxmpi.allreduce(x, MPI.SUM))
    left, right = (rank - 1) % size, (rank + 1) % size

    def traced(x):
        with jax.ensure_compile_time_eval():
            known = within(np.float32(2))
        return jaxmpi.sendrecv(x, x, left, right) + known

    for i in range(2):
        first = jaxmpi.jit(lambda x, i=i: traced(x) + i)(heavy(jnp.full(3, float(rank))))
        second = jaxmpi.sendrecv(jnp.full(3, 10.0 + rank), jnp.zeros(3), left, right)
        np.testing.assert_allclose(first, left + 2 * size + i)
        np.testing.assert_allclose(second, 10 + left)


def test_error_of_an_operand_is_not_kept(rank, size):
    """An operand whose computation has failed makes this call fail alone, however soon its error is known."""

    def fail(x):
        raise ValueError("no value")

    failing = jax.jit(lambda x: jax.pure_callback(fail, x, x))
    total = jaxmpi.jit(lambda x: jaxmpi.allreduce(x, MPI.SUM))
    alone = jaxmpi.jit(lambda x: jaxmpi.sendrecv(x, x, rank, rank))
    for elements in (3, 5000):
        for _ in range(3):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with pytest.raises(Exception, match="no value"):
                    jax.block_until_ready(alone(failing(jnp.ones(elements))))
                np.testing.assert_allclose(total(jnp.ones(elements)), size)


def test_functions_are_not_kept(size):
    """Nor those that are kept by themselves."""
    gc.freeze()  # what other tests have left
    made = jaxmpi.jit(lambda x: x + 1)
    made.itself = made
    assert made(1) == 2
    gone = [weakref.ref(made)]
    del made
    for i in range(3):
        f = jaxmpi.jit(lambda x, i=i: jaxmpi.allreduce(x, MPI.SUM) + i)
        assert f(1.0) == size + i
        gone.append(weakref.ref(f))
    del f
    gc.collect()
    gc.unfreeze()
    assert [kept() for kept in gone] == [None] * 4

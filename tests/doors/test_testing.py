"""`jaxmpi.testing.check_grads`: right programs pass, wrong ones are found, and what it says of them is true."""

import importlib.util
import inspect
import re
from functools import partial
from pathlib import Path

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import jaxmpi
from jaxmpi._testing import figures, verdict
from jaxmpi.testing import check_grads
from support import drawing, gradients
from support.launch import launch
from support.rows import each, row_by_row
from support.table import NEW_JAX

pytestmark = pytest.mark.skipif(not NEW_JAX, reason="this JAX has no derivatives of communication")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def draw(*shape, dtype=float, rank=RANK):
    numbers = np.random.default_rng([7, rank, *shape]).normal(size=shape)
    return jnp.asarray(numbers + 1j * numbers[::-1] if jnp.issubdtype(dtype, jnp.complexfloating) else numbers, dtype)


def total(x):
    return jaxmpi.allreduce(jnp.sum(x), MPI.SUM)


W, X, Y = draw(3, rank=0), draw(4, 3), draw(4)


def error(w, x, y):
    """A local loss."""
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2)


def regression(w, x, y):
    return total(error(jaxmpi.replicate(w), x, y)) / SIZE


# --- right programs --------------------------------------------------------------------------------------------------


def tree(state, data):
    model, n = state
    own = jaxmpi.replicate(model)
    output = own["layers"][0] @ data["x"].T + own["shift"]
    return total(output**2) / n + jnp.sum(model["shift"] ** 2) + jnp.sum(model["empty"]), {"n": n}


def neighbours(w, x):
    """Results of each rank's own."""
    left = jaxmpi.sendrecv(x, x, (RANK - 1) % SIZE, (RANK + 1) % SIZE)
    return x * left @ jaxmpi.replicate(w), jaxmpi.scan(x, MPI.SUM)


def scattered(numbers, w):
    """Only root's numbers count: other ranks have templates."""
    part = jaxmpi.scatter(numbers, 0)
    return total(jnp.sin(part) * jaxmpi.replicate(w)[0])


@jax.custom_vjp
def square(x):
    return x**2


square.defvjp(lambda x: (x**2, x), lambda x, ct: (2 * x * ct,))


def of_keys(key, n, w, x):
    return regression(w * n, x, Y) + 0 * jax.random.normal(key)


HALF = partial(jnp.asarray, dtype=jnp.bfloat16)
TREE = ({"layers": [draw(2, 3, rank=0)], "shift": jnp.ones((2, 1)), "empty": jnp.zeros((0, 2))}, 5)
RIGHT = {
    "regression": (regression, (W, X, Y), "w"),
    "jax.jit": (jax.jit(regression), (W, X, Y), 0),
    "jaxmpi.jit": (jaxmpi.jit(regression), (W, X, Y), (0,)),
    "float32": (regression, tuple(a.astype(jnp.float32) for a in (W, X, Y)), "w"),
    "bfloat16": (regression, (HALF(W), HALF(X), HALF(Y)), "w"),
    "complex": (
        lambda w, x: total(jnp.abs(jaxmpi.replicate(w) * x) ** 2 + jnp.real(x * jnp.exp(x))),
        (draw(3, dtype=complex, rank=0), draw(3, dtype=complex)),
        "w",
    ),
    "pytrees": (tree, (TREE, {"x": X}), "state"),
    "numbers at positions": (lambda x, w: total(jaxmpi.replicate(w) * x), (1.0 + RANK, 0.5), -1),
    "scattered": (scattered, (draw(SIZE, 3) if RANK == 0 else draw(3), W), "w"),
    "keys and integers": (of_keys, (jax.random.key(3), 2, W, X), ("key", "n", "w")),
    "kinks nearby": (lambda w, x: total(jax.nn.relu(x @ jaxmpi.replicate(w))), (W, X), "w"),
    "no derivative": (lambda w, x: total(x**2) + 0 * jnp.sum(w), (W, X), "w"),
    "cancelling": (lambda b, x: total(jax.nn.softmax(x + jaxmpi.replicate(b)[0])), (W, X), "b"),
    "a tiny scale": (lambda k, x: total(jnp.sqrt(1e5 * jaxmpi.replicate(k)) * x[0]), (1e-6 * jnp.exp(W), X), "k"),
}


@pytest.mark.parametrize(
    "names",
    [["pytrees"], pytest.param([name for name in RIGHT if name != "pytrees"], marks=pytest.mark.nightly)],
    ids=["pytrees", "more"],
)
def test_right(names):
    def check(name):
        f, args, invariant = RIGHT[name]
        check_grads(f, args, invariant=invariant)

    each(names, check)


def test_right_in_other_ways(comm):
    """Results of each rank's own, second derivatives, one mode, another communicator, a gradient by hand."""
    check_grads(neighbours, (W, X), invariant="w", invariant_out=False)
    gradient = jax.grad(regression, argnums=(0, 1))
    check_grads(gradient, (W, X, Y), invariant="w", invariant_out=(True, False))
    until = lambda x: jax.lax.while_loop(lambda x: total(x) < 100, lambda x: x + x**2, jnp.abs(x))  # noqa: E731
    check_grads(until, (X,), modes=("fwd",), invariant_out=False)
    halves = comm.Split(RANK % 2, RANK)
    on_half = lambda w, x: jaxmpi.allreduce(  # noqa: E731
        jnp.sum(x @ jaxmpi.replicate(w, comm=halves)) ** 2, MPI.SUM, comm=halves
    )
    check_grads(on_half, (W + RANK % 2, X), invariant="w", comm=halves)
    halves.Free()
    by_hand = lambda w: (jaxmpi.allreduce(jax.grad(error)(w, X, Y), MPI.SUM) / SIZE,)  # noqa: E731
    check_grads(lambda w: regression(w, X, Y), (W,), invariant=0, gradient=by_hand)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donated_arguments():
    """What f may overwrite is a copy."""
    w, x, y = (jnp.copy(a) for a in (W, X, Y))
    check_grads(jaxmpi.jit(regression, donate_argnums=(0, 1, 2)), (w, x, y), invariant="w")
    assert not any(a.is_deleted() for a in (w, x, y))


# --- mistakes --------------------------------------------------------------------------------------------------------


def told(*args, **kwargs):
    """What check_grads raises, which is the same on all ranks."""
    with pytest.raises(AssertionError) as caught:
        check_grads(*args, **kwargs)
    text = str(caught.value)
    assert MPI.COMM_WORLD.allgather(text).count(text) == SIZE
    return text


def missing_in_one_of_two(w, b, x):
    return total(error(jaxmpi.replicate(w) + b, x, Y)) / SIZE


def missing_in_a_loop(w, x):
    def step(w, _):
        gradient = jnp.tanh(x.T @ (x @ w))
        return w - 0.1 * jaxmpi.allreduce(gradient, MPI.SUM), None

    return jnp.sum(jax.lax.scan(step, w, None, length=2)[0])


def too_many_at_the_loss(w, x):
    return jaxmpi.replicate(regression(w, x, Y))


PART = "each rank has a part of the derivative: their sum is right"
TIMES = f"{SIZE} times the derivative, as many times as there are ranks"
MISTAKES = {
    missing_in_one_of_two: {"b": PART},
    too_many_at_the_loss: {"w": TIMES, "x": TIMES},
    missing_in_a_loop: {"w": "the ranks differ, and should have the same", "x": ""},
}
"""How the gradient of each wrong argument is related to the derivative, if in a simple way. test_random_programs has
mistakes of all kinds, docs/gradients.md the usual ones."""
VALUES = {"w": W, "b": -W, "x": X}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "mistakes", [list(MISTAKES)[:2], pytest.param(list(MISTAKES)[2:], marks=pytest.mark.nightly)], ids=["few", "more"]
)
def test_mistakes(mistakes):
    """They are found, in the arguments that have them, and what is said of the figures is true."""

    def check(mistake):
        names = inspect.signature(mistake).parameters
        text = told(mistake, tuple(map(VALUES.get, names)), invariant=[name for name in names if name in "wb"])
        relations = dict(re.findall(r"^  (\S+): reverse mode .*(?:\n    (.*))?$", text, re.M))
        assert relations == MISTAKES[mistake], text
        assert "docs/gradients.md has the usual mistakes" in text

    each(mistakes, check, lambda mistake: mistake.__name__)


@pytest.mark.alone
def test_relations():
    """Of a gradient to the derivative, which is 1 here. A factor is named if it is the number of ranks in a part of
    them."""
    whole, rows = "as many times as there are ranks", {}
    rows["each rank has a part of the derivative: their sum is right"] = (0.5, 0.25, 0.125, 0.125)
    rows["the ranks differ, and their mean is right"] = (2.0, 1.0, 0.5, 0.5)
    rows["the ranks differ, and should have the same"] = (1.0, 2.0, 3.0, 4.0)
    rows[f"4 times the derivative, {whole}"] = (4.0,) * 4
    rows["2 times the derivative"] = (2.0,) * 4
    rows["the derivative divided by 2"] = (0.5,) * 4
    rows["the derivative divided by 4, the number of ranks"] = (0.25,) * 4
    rows[""] = (1.5,) * 4
    for said, parts in rows.items():
        gradient, tolerance = figures.Gradient(parts, True, 1.0), verdict.Tolerance(1e-7, 0.0)
        assert verdict.relation(gradient, figures.Derivative(1.0, 1.0), 4, tolerance) == said, parts


@pytest.mark.alone
@pytest.mark.sampled
@pytest.mark.nightly
def test_with_comparison_of_cotangents(script):
    """JAXMPI_CHECK=1 would raise on one rank alone."""
    program = script("""
        from jaxmpi.testing import check_grads
        def mean(x):
            return jaxmpi.allreduce(jnp.mean(x), MPI.SUM) / size
        try:
            check_grads(jaxmpi.jit(lambda x: mean(jnp.sin(x - mean(x)))), (jnp.arange(3.0) ** (rank + 1),))
        except AssertionError as error:
            print(error, flush=True)
    """)
    said = launch(2, program, JAXMPI_CHECK="1").stdout
    assert said.count("check_grads: the gradient is wrong") == 2, said


def test_figures():
    """They are those of the witness, in the direction of 1 for a single number. A gradient by hand gets no advice."""
    w = 0.5

    @jax.custom_jvp
    def half(x):
        return x**2

    half.defjvp(lambda x, t: (x[0] ** 2, x[0] * t[0]))
    text = told(lambda w: half(w) + 0 * total(w), (w,), invariant=0)
    forward, differences = map(float, re.search(r"w: forward mode (.*), differences (.*)$", text, re.M).groups())
    np.testing.assert_allclose(differences, 2 * forward, rtol=1e-2)
    wrong = lambda x: (2 * jax.grad(lambda x: total(x**2))(x),)  # noqa: E731
    text = told(lambda x: total(x**2), (X,), gradient=wrong)
    given, forward = map(float, re.search(r"x: gradient (.*); forward mode (.*); ", text).groups())
    np.testing.assert_allclose(given, 2 * forward, rtol=1e-2)
    assert ("2 times the derivative" in text) == (SIZE >= 2)
    assert "docs/gradients.md" not in text


# --- what else it refuses --------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_local_loss():
    text = told(error, (W, X, Y), invariant="w")
    assert re.search("the result of f is not the same on all ranks: .* on rank 0, .* on rank 1", text)
    assert "jaxmpi.allreduce(loss, MPI.SUM)" in text
    x = X - jnp.mean(X)
    text = told(lambda x: jnp.sum(x) - jax.lax.stop_gradient(jnp.sum(x)), (x,))
    assert "the same result on all ranks here, but not the same derivative" in text


def test_forward_mode_is_compared_with_differences():
    text = told(lambda w, x: regression(jax.lax.stop_gradient(w), x, Y), (W, X), invariant="w")
    assert re.search(r"forward mode does not agree.*\n  w: forward mode 0, differences .*\nThat is not a matter", text)
    text = told(lambda x: total(jax.nn.relu(x)), (0 * X,))
    assert "or have a kink here" in text


def test_inconclusive():
    """Where differences are all there is, and rounding hides the derivative."""
    f = lambda x: 1e5 + total(square(x))  # noqa: E731
    check_grads(f, (X,), modes=("rev",))
    text = told(f, (X.astype(jnp.float32),), modes=("rev",))
    assert "inconclusive. In a random direction of x differences are" in text


def test_not_finite():
    assert "the result of f is not finite" in told(lambda x: total(jnp.log(0 * x)), (X,))
    text = told(lambda x: {"loss": total(x), "more": total(x / (RANK - SIZE + 1))}, (X,), invariant_out=False)
    assert "the result['more'] of f is not finite" in text


WRONG = {
    "args": (TypeError, "must be a tuple of the arguments", (lambda x: total(x), X), {}),
    "nothing": (ValueError, "no array of floating-point or complex", (lambda x: total(x), (3,)), {}),
    "name": (ValueError, "names of arguments, w, x, y; got 'v'", (regression, (W, X, Y)), {"invariant": ["v"]}),
    "position": (ValueError, "w, x, y; got 3", (regression, (W, X, Y)), {"invariant": 3}),
    "modes": (ValueError, "'fwd' and 'rev', got 'fwd'", (regression, (W, X, Y)), {"modes": "fwd"}),
    "prefix": (
        ValueError, "a prefix of the result of f. Got [True, False]",
        (regression, (W, X, Y)), {"invariant": "w", "invariant_out": [True, False]},
    ),
    "result": (ValueError, "f returns no array", (lambda x: x.astype(int), (X,)), {"modes": ("fwd",)}),
    "gradient": (
        TypeError, "gradient must return a tuple",
        (regression, (W, X, Y)), {"invariant": "w", "gradient": jax.grad(regression)},
    ),
    "gradient of several": (
        ValueError, "f must return one real number",
        (lambda x: jaxmpi.allreduce(x, MPI.SUM), (X,)), {"gradient": lambda x: (x,)},
    ),
    "comm": (TypeError, "comm must be an mpi4py communicator", (regression, (W, X, Y)), {"comm": 1}),
}  # fmt: skip


@pytest.mark.alone
@row_by_row("name", WRONG)
def test_wrong_arguments(name):
    kind, text, args, options = WRONG[name]
    with pytest.raises(kind, match=re.escape(text)):
        check_grads(*args, **options)


@pytest.mark.ranks(2)
def test_arguments_that_do_not_match():
    """On all ranks, before anything of f is called."""
    with pytest.raises(
        ValueError, match=r"state\['a'\] is invariant, .* is 0 on rank 0, 1 on rank 1, index 1, 0|at index 1, 0"
    ):
        check_grads(lambda state, x: 1 / 0, ({"a": jnp.zeros((2, 1)).at[1].set(RANK > 0)}, X), invariant="state")
    with pytest.raises(ValueError, match=r"float64 of shape .* on rank 0, float64 of shape .* on rank 1"):
        check_grads(lambda w, x: 1 / 0, (jnp.ones(2 + (RANK == 1)), X), invariant=0)
    with pytest.raises(
        ValueError, match=r"arrays of the same names among args.* Rank 0 has x\[0\], and rank 1 x\[0\], x\[1\]"
    ):
        check_grads(lambda x: 1 / 0, ([X] * (1 + (RANK == 1)),))
    with pytest.raises(ValueError, match="arrays of the same names on all ranks"):
        check_grads(lambda x: [total(x)] * (1 + RANK), (X,))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("when", ["value", "derivative"])
def test_error_on_one_rank(when):
    """While tracing it is an error of all ranks: none waits."""

    def f(x):
        if when == "derivative" and RANK == 0:
            jaxmpi.send(x, 1)
        if RANK == 1:
            if when == "value":
                raise OSError("no such file")
            x = jaxmpi.recv(x, 0, tag=MPI.ANY_TAG)
        return total(x)

    kind, text = (
        (OSError, "no such file") if when == "value" else (NotImplementedError, "recv cannot be differentiated")
    )
    with pytest.raises(kind if RANK == 1 else RuntimeError, match=text) as caught:
        check_grads(f, (X,))
    if RANK != 1:
        assert f"rank 1 could not differentiate f. It raised {kind.__name__}: {text}" in str(caught.value)


# --- random programs -------------------------------------------------------------------------------------------------


def same(comm, gradient, expected):
    close = all(np.allclose(a, b, rtol=1e-6, atol=1e-9) for a, b in zip(gradient, expected, strict=True))
    return all(comm.allgather(close))


def gradient_of(f, args):
    return jax.grad(f, argnums=tuple(range(len(args))))(*args)


def test_random_programs(comm, rank, size):
    """Right ones pass, and are right by the witness. A mistake that makes a gradient wrong, by the witness, is found.
    One that does no harm is no alarm."""

    def check(drawn):
        seed, which = drawn
        program = right = gradients.generate(seed)
        if which is not None:
            program = (possible := list(gradients.mistakes(right)))[which % len(possible)]
        args, _ = gradients.arguments(seed, rank, size)
        f = program.function(comm)
        if same(comm, gradient_of(f, args), gradients.expected(right, seed, rank, size)):
            check_grads(f, args, invariant=gradients.INVARIANT)
        else:
            assert which is not None, str(program)
            told(f, args, invariant=gradients.INVARIANT)

    mistakes = st.integers(0, 1 << 10) if size > 1 else st.none()
    drawing.on_all_ranks(comm, st.tuples(st.integers(0, 1 << 32), st.none() | mistakes), check, 12)


# --- the examples ----------------------------------------------------------------------------------------------------


def example(name):
    pytest.importorskip("tqdm")
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_global_sum():
    return example("global_sum").global_sum_of_squares, (X,), {}


def of_poisson():
    module = example("poisson_cg")
    grid = jaxmpi.Grid((0, 0), (7, 7))
    f, k, wanted = module.make_body(grid)
    loss = jaxmpi.jit(lambda f, k: module.misfit(f, k, wanted, grid, lambda *_: None)[0])
    return loss, (f, k), {"rtol": 1e-6}


@pytest.mark.parametrize("make", [of_global_sum, pytest.param(of_poisson, marks=pytest.mark.nightly)])
def test_example(make):
    """The losses of the examples have the gradients with which these work."""
    f, args, options = make()
    check_grads(f, args, **options)

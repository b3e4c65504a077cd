"""All ranks take part in a derivative: whatever JAX looks into, on whichever rank it depends on nothing.

Each function here is one on all ranks, with an operand, a result or a whole nested function that depends on nothing on
some of them. Adjoints by the dot-product test, tangents by finite differences, as support/derivatives.py has them; a
message that a derivative has left over would be received by the next operation, so each test ends with one of known
values.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.lax.control_flow import solves
from mpi4py import MPI

import jaxmpi
from support.derivatives import Map, check, check_all, check_wrapped, needs_new_jax, normal
from support.rows import each, rows

few = pytest.mark.skipif(MPI.COMM_WORLD.size > 3, reason="takes too long on more ranks than cores")
pytestmark = [needs_new_jax, pytest.mark.ranks(2), few]
EAGER = lambda f: f  # noqa: E731
WRAPS = {"plain": EAGER, "jit": jaxmpi.jit}
"""Inside a transformation jaxmpi.jit is jax.jit."""


@pytest.fixture(autouse=True)
def _nothing_left_over(comm, rank, size):
    yield
    np.testing.assert_array_equal(jaxmpi.bcast(jnp.full(2, 5.0 + rank), 0), [5, 5])
    left = jaxmpi.sendrecv(jnp.full(2, float(rank)), jnp.zeros(2), (rank - 1) % size, (rank + 1) % size)
    np.testing.assert_array_equal(left, [(rank - 1) % size] * 2)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def send_alone(x):
    jaxmpi.send(x, 1, tag=2)


def send_and_count(x):
    jaxmpi.send(x, 1, tag=2)
    return jnp.argmax(x)


def send_and_stop(x):
    jaxmpi.send(x, 1, tag=2)
    return lax.stop_gradient(x)


SENDERS = {
    "nothing": send_alone,
    "integer": send_and_count,
    "stopped": send_and_stop,
    "jit": jax.jit(send_alone),
    "jit-integer": lambda x: jax.jit(send_and_count)(x),
}


@rows("names", SENDERS)
def test_checkpoint_without_a_differentiable_result(names, comm, rank):
    def f(x, sender):
        if rank == 0:
            jax.checkpoint(sender)(x * 3)
            return 0.0 * jnp.sum(x)
        if rank == 1:
            return jnp.sum(7 * jaxmpi.recv(jnp.zeros(2), 0, tag=2))
        return 0.0 * jnp.sum(x)

    x = normal((2,), float, rank, 0)
    fs = {name: lambda x, name=name: f(x, SENDERS[name]) for name in names}
    check_all([Map(name, g, x) for name, g in fs.items()], comm)
    gradients = jaxmpi.jit(lambda x: {name: jax.grad(g)(x) for name, g in fs.items()})(x)
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, [21, 21] if rank == 0 else [0, 0], err_msg=name)


def test_derivatives_of_a_derivative_of_a_checkpoint_of_constants(comm, rank, size):
    """All operands of what is inside the checkpoint are constants on one rank."""

    def steps(c):
        step = lambda c: jnp.sin(jaxmpi.allreduce(0.5 * c, MPI.SUM))  # noqa: E731
        branch = lambda c: lax.cond(jnp.arange(2)[1] > 0, step, lambda c: c, c)  # noqa: E731
        return branch(lax.scan(lambda c, _: (step(c), None), c, None, length=2)[0])

    def loss(x, remember):
        y = remember(lambda x: steps(x if rank == 0 else jnp.arange(3.0)))(x)
        return jnp.sum(y**2) + jnp.sum(x**3)

    def twice(remember):
        return jax.grad(lambda x: jnp.sum(jax.grad(loss)(x, remember) ** 2))

    x = normal((3,), float, rank, 0)
    np.testing.assert_allclose(jaxmpi.jit(twice(jax.checkpoint))(x), jax.jit(twice(EAGER))(x), rtol=1e-10, atol=1e-12)
    check(jax.grad(lambda x: loss(x, jax.checkpoint)), x, comm, 1e-10)


def test_second_derivative_of_a_checkpoint_that_communicates_integers(comm, rank, size):
    """Nothing inside has a derivative, and no derivative communicates; but on other ranks it might."""

    def rounded(x):
        total = lambda c: jaxmpi.allreduce(jnp.round(100 * c).astype(jnp.int32), MPI.SUM).astype(float) / 100  # noqa: E731
        return lax.scan(lambda c, _: (total(c), None), x, None, length=2)[0]

    def squares(x):
        return jnp.sum(jax.grad(lambda x: jnp.sum(jax.checkpoint(rounded)(x) * jnp.sin(x)))(x) ** 2)

    x = normal((3,), float, rank, 0)
    total = size * np.sum([np.round(100 * np.asarray(other)) for other in comm.allgather(x)], axis=0) / 100
    np.testing.assert_allclose(jaxmpi.jit(jax.grad(squares))(x), -(total**2) * np.sin(2 * x), rtol=1e-12)


def test_checkpoint_around_loops_of_checkpoints(comm, rank, size):
    """What a step communicates is constant on one rank, in a jitted checkpoint and in a loop of its own."""

    @jax.jit
    @jax.checkpoint
    def inner(c):
        total = jaxmpi.reduce(jnp.cos(c), MPI.PROD, 0)
        return jnp.sin(total + jaxmpi.bcast(c if rank == 0 else jnp.ones(2), 0))

    def step(c, _):
        def more(_, c):
            everyone = jaxmpi.allgather(jnp.ones(2) if rank == 0 else c)
            return c + 0.1 * jnp.sum(everyone, axis=0)

        return lax.fori_loop(0, 2, more, inner(c)), None

    check(jax.checkpoint(lambda x: lax.scan(step, x, None, length=2)[0]), normal((2,), float, rank, 0), comm)


# --- functions with derivatives of their own -------------------------------------------------------------------------


def solve_spread(b, w):
    """Solves 2 u + w * (what the rank before has of u) / 2 + (rank 0's u) / 10 = b by Richardson's iterations."""
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size

    def matvec(u):
        ring = jaxmpi.sendrecv(u, u, (rank - 1) % size, (rank + 1) % size)
        return 2 * u + w * ring / 2 + 0.1 * jaxmpi.bcast(u, 0)

    def solve(matvec, b):
        return lax.fori_loop(0, 60, lambda i, u: u + (b - matvec(u)) / 2, b)

    return lax.custom_linear_solve(matvec, b, solve, transpose_solve=solve)


@rows("constants", ["side", "matrix", "both", "matrix of others"])
def test_linear_solve_of_constants(constants, comm, rank, size):
    """A right-hand side, or a matrix, or both, that are constants on rank 0 alone; a matrix that is one elsewhere."""

    def f(x, constant):
        b = jnp.ones(2) if rank == 0 and constant in ("side", "both") else x
        is_constant = rank > 0 if constant == "matrix of others" else rank == 0 and constant != "side"
        return jnp.sin(solve_spread(b, jnp.full(2, 0.5) if is_constant else jnp.cos(x))) + x

    x = normal((2,), float, rank, 0)
    wraps = {"side": EAGER, "matrix": jax.jit, "both": jaxmpi.jit, "matrix of others": jax.jit}
    check_all([Map(name, wraps[name](lambda x, name=name: f(x, name)), x, 1e-9) for name in constants], comm)


def test_second_derivative_of_a_checkpoint_that_prevents_cse_of_some_operands(comm, rank, size):
    try:
        remember = jax.checkpoint(lambda a, b: jaxmpi.bcast(jnp.sin(a) * b, 0), prevent_cse=(True, False))
        remember(jnp.ones(2), jnp.ones(2))
    except (AssertionError, TypeError, ValueError):
        pytest.skip("this JAX prevents all or none")
    squares = lambda f: lambda x: jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(f(x, x)))(x) ** 2))(x)  # noqa: E731
    x = normal((2,), float, rank, 0)
    expected = squares(lambda a, b: jaxmpi.bcast(jnp.sin(a) * b, 0))(x)
    np.testing.assert_allclose(squares(remember)(x), expected, rtol=1e-12)


@pytest.mark.parametrize("function", [lambda y, x: y * x, lambda y, x: jnp.sin(y) * x, lambda y, x: x / y])
def test_transposed_product_with_what_was_communicated(function):
    f = lambda x: function(jaxmpi.bcast(jnp.ones(2), 0), x)  # noqa: E731
    with pytest.raises(NotImplementedError, match="compute that outside of it"):
        jax.linear_transpose(f, jnp.ones(2))(jnp.ones(2))


def test_root_of_constants(comm, rank, size):
    """u + tanh(u's neighbour) / 4 = x, where x is a constant on rank 0."""

    def root(x, transposed):
        def equation(u):
            ring = jaxmpi.sendrecv(u, u, (rank - 1) % size, (rank + 1) % size)
            return u + jnp.tanh(ring) / 4 - x

        def solve(f, u):
            return lax.fori_loop(0, 60, lambda i, u: u - f(u), u)

        def tangent_solve(g, y):
            once = lambda g, y: lax.fori_loop(0, 60, lambda i, u: u - (g(u) - y), y)  # noqa: E731
            return lax.custom_linear_solve(g, y, once, transpose_solve=once) if transposed else once(g, y)

        return lax.custom_root(equation, jnp.zeros(2), solve, tangent_solve)

    def f(x, transposed):
        return root(jnp.ones(2) if rank == 0 else x, transposed) * x

    x, v = normal((2,), float, rank, 0), normal((2,), float, rank, 1)
    reverse = [Map(name, wrap(lambda x: f(x, True)), x, 1e-9) for name, wrap in WRAPS.items()]
    if hasattr(solves, "_RootLinearMap"):
        for root_of in reverse:
            with pytest.raises(NotImplementedError, match="cannot be transposed"):
                jax.vjp(root_of.f, x)
    else:
        check_all(reverse, comm)
    forward = {name: wrap(lambda x: f(x, False)) for name, wrap in WRAPS.items()}
    tangents = jax.jit(lambda x, v: {name: jax.jvp(g, (x,), (v,))[1] for name, g in forward.items()})(x, v)
    above, below = map(jax.jit(lambda x: f(x, False)), (x + 1e-6 * v, x - 1e-6 * v))
    for name, tangent in tangents.items():
        np.testing.assert_allclose(tangent, (above - below) / 2e-6, rtol=1e-6, atol=1e-8, err_msg=name)


@jax.custom_jvp
def of_two(x, y):
    rank = MPI.COMM_WORLD.rank
    product = jaxmpi.scan(y if rank == 0 else x, MPI.PROD)
    jaxmpi.gather(x, 0)
    return jnp.sin(product) * x + jaxmpi.allgather(jnp.ones(2) if rank == 1 else y)[0]


@of_two.defjvp
def _of_two_jvp(primals, tangents):
    return jax.jvp(of_two.fun, primals, tangents)


@jax.custom_jvp
def by_hand(x, y):
    return jaxmpi.bcast(x, 0) + jaxmpi.scan(y, MPI.SUM)


@by_hand.defjvp
def _by_hand_jvp(primals, tangents):
    return by_hand(*primals), jaxmpi.bcast(tangents[0], 0) + jaxmpi.scan(tangents[1], MPI.SUM)


@jax.custom_vjp
def turned(x):
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    return jaxmpi.sendrecv(x, x, (rank - 1) % size, (rank + 1) % size)


def _turned_back(_, ct):
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    return (jaxmpi.sendrecv(ct, ct, (rank + 1) % size, (rank - 1) % size),)


turned.defvjp(lambda x: (turned(x), None), _turned_back)


@jax.custom_vjp
def added_backwards(x):
    return x


added_backwards.defvjp(lambda x: (x, None), lambda _, ct: (jaxmpi.allreduce(ct, MPI.SUM),))


@jax.custom_vjp
def cubes_added(x):
    return jaxmpi.allreduce(x**3, MPI.SUM)


cubes_added.defvjp(lambda x: (cubes_added(x), x), lambda x, ct: (3 * x**2 * jaxmpi.allreduce(ct, MPI.SUM),))

PLACES = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "cond": lambda f: lambda x: lax.cond(x[0] ** 2 > -1, f, lambda x: x, x),
}


RULES = {"jvp": lambda x: of_two(x, 0.5 * x), "by hand": lambda x: by_hand(x, x)}


@rows("places", PLACES)
def test_custom_jvp_of_an_operand_and_of_a_constant_on_one_rank(places, comm, rank):
    """Called with what depends on something, and with a constant on one rank; each place with one of the rules."""
    x, maps = normal((2,), float, rank, 0), []
    for place in places:
        name = list(RULES)[list(PLACES).index(place) % 2]
        g = lambda x, f=RULES[name]: f(jnp.full(2, 0.7) if rank == 0 else x) * x  # noqa: E731
        maps += [Map(f"{name} in {place}", PLACES[place](f), x, 1e-10) for f in (RULES[name], g)]
    check_all(maps, comm)


@rows("places", PLACES)
def test_custom_jvp_of_two_operands_of_which_one_is_constant(places, comm, rank):
    x, half, maps = normal((2,), float, rank, 0), jnp.full(2, 0.5), []
    for place in places:
        function = (of_two, by_hand)[list(PLACES).index(place) % 2]
        f = lambda x, function=function: function(*((x, half) if rank == 0 else (half, x)))  # noqa: E731
        maps.append(Map(place, PLACES[place](f), x, 1e-10))
    check_all(maps, comm)


@jax.custom_jvp
def scanned_forwards(x):
    return x


scanned_forwards.defjvp(lambda primals, tangents: (scanned_forwards(*primals), jaxmpi.scan(tangents[0], MPI.SUM)))


@rows("places", PLACES)
def test_custom_jvp_of_a_constant_whose_rule_alone_communicates(places, rank, size):
    x, t = normal((2,), float, rank, 0), normal((2,), float, rank, 1)

    def tangent(place, x, t):
        function = PLACES[place](scanned_forwards)
        return jax.jvp(lambda x: function(jnp.full(2, 0.7) if rank == 0 else x), (x,), (t,))[1]

    found = jax.jit(lambda x, t: {place: tangent(place, x, t) for place in places})(x, t)
    once = np.cumsum([normal((2,), float, r, 1) * (r > 0) for r in range(size)], axis=0)
    expected = dict.fromkeys(PLACES, once[rank]) | {"scan": np.cumsum(once, axis=0)[rank]}
    each(places, lambda place: np.testing.assert_allclose(found[place], expected[place], rtol=1e-12))


def of_forward_rule(forward):
    function = jax.custom_vjp(identity)
    function.defvjp(forward, passed_back)
    return function


def identity(x):
    return x


def passed_back(_, cotangent):
    return (cotangent,)


def test_custom_vjp_of_functions_that_differ_in_the_forward_rule(rank, size):
    """What is known of one says nothing of the other. On rank 0 they are called with a constant."""
    quiet = of_forward_rule(lambda x: (x, None))
    sums = of_forward_rule(lambda x: (jaxmpi.allreduce(x, MPI.SUM), None))
    for function, total in ((quiet, rank + 1.0), (sums, sum(range(1, size + 1)))):
        value, gradient = jax.value_and_grad(lambda x, f=function: f(jnp.asarray(1.0) if rank == 0 else x))(rank + 1.0)
        assert (value, gradient) == (total, rank > 0)


@jax.custom_jvp
def without_derivative(x):
    return jnp.round(x)


@without_derivative.defjvp
def _without_derivative_jvp(primals, tangents):
    return jnp.round(primals[0]), jnp.zeros_like(tangents[0])


OF_ONE = {"jvp": lambda x: of_two(x, x), "by hand": lambda x: by_hand(x, x), "vjp": cubes_added}


@rows("names", OF_ONE)
def test_rule_of_what_has_zeros_for_a_tangent(names, comm, rank):
    """JAX knows such a tangent for an array, which depends on nothing that is differentiated."""
    x, w = normal((2,), float, rank, 0), normal((2,), float, rank, 1)

    def of(name):
        return lambda x: OF_ONE[name](without_derivative(x) if rank == 0 else x) * x

    check_all([Map(name, of(name), x, 1e-10) for name in names if name != "vjp"], comm)
    if "vjp" in names:
        ys, back = jax.jit(lambda x, w: (of("vjp")(x), jax.vjp(of("vjp"), x)[1](w)[0]))(x, w)
        total = sum(comm.allgather(np.asarray(w * x)))
        np.testing.assert_allclose(back, w * ys / x + (0 if rank == 0 else 3 * x**2 * total), rtol=1e-12)


@rows("names", OF_ONE)
def test_rule_in_a_loop_that_does_not_use_what_it_is_given(names, comm, rank, size):
    """The linear part of the loop does not depend on that operand either; on other ranks, on the same."""
    x = normal((2,), float, rank, 0)

    def loss(name, x):
        other = jnp.full(2, 0.7) if rank == 0 else 0.7 * x

        def step(carry, row):
            lax.scan(lambda c, _: (c, jnp.sin(other)), row, None, length=2)
            return OF_ONE[name](carry), row

        return jnp.sum(lax.scan(step, other, jnp.stack([other, other]))[0] + x)

    losses = jax.jit(lambda x: {name: loss(name, x) for name in names})
    gradients = jax.jit(lambda x: {name: jax.grad(loss, argnums=1)(name, x) for name in names})(x)
    h = 1e-6
    for r in range(size):
        for i in range(2):
            step = np.zeros(2)
            step[i] = h * (r == rank)
            near = [comm.allreduce(np.array(list(losses(x + s * step).values()))) for s in (1, -1)]
            if r == rank:
                slopes = (near[0] - near[1]) / (2 * h)
                np.testing.assert_allclose([gradients[name][i] for name in sorted(names)], slopes, rtol=1e-6)


BACKWARDS = {
    "added": (added_backwards, lambda ws: [sum(ws)] * len(ws)),
    "turned": (turned, lambda ws: [*ws[1:], ws[0]]),
}
"""Functions whose rule backwards communicates, and what the rule does with the cotangents of all ranks."""
CALLS = rows("calls", [(name, place) for name in BACKWARDS for place in PLACES], " in ".join)


@CALLS
def test_custom_vjp_of_a_constant(calls, comm, rank, size):
    """The rule backwards communicates, also where the function is called with a constant."""
    x, w = normal((2,), float, rank, 0), normal((2,), float, rank, 1)

    def gradients(name, place):
        function, wrap = BACKWARDS[name][0], PLACES[place]
        own = lambda x: jnp.full(2, 0.7) if rank == 0 else x  # noqa: E731
        f = lambda x: wrap(function)(own(x)) * 2  # noqa: E731
        g = lambda x: wrap(lambda _: function(own(x)))(jnp.ones(2, int)) * 2  # noqa: E731 (no operand tells)
        fs = (f, g) if place in ("plain", "jit", "checkpoint") else (f,)
        return lambda x: [jax.grad(lambda x, f=f: w @ f(x))(x) for f in fs]

    def check(row):
        (name, place), found = row
        ws = [2 * normal((2,), float, r, 1) for r in range(size)]
        for _ in range(2 if place == "scan" else 1):
            ws = BACKWARDS[name][1](ws)
        for gradient in found:
            np.testing.assert_allclose(gradient, 0 * x if rank == 0 else ws[rank], rtol=1e-12)

    found = jax.jit(lambda x: [gradients(*call)(x) for call in calls])(x)
    each(list(zip(calls, found, strict=True)), check, lambda row: " in ".join(row[0]))


@CALLS
def test_custom_vjp_that_one_rank_does_not_use(calls, comm, rank, size):
    """The rule backwards communicates, also where nothing depends on the function."""
    x, w = normal((2,), float, rank, 0), normal((2,), float, rank, 1)

    def of_rank(x, y):
        return 3 * x if rank == 0 else 2 * y

    def gradients(name, place):
        function, wrap = BACKWARDS[name][0], PLACES[place]
        within = wrap(lambda x: of_rank(x, function(x)))
        around = lambda x: of_rank(x, wrap(function)(x))  # noqa: E731
        return lambda x: [jax.vjp(f, x)[1](w)[0] for f in (within, around)]

    def around(ws):
        return [3 * w if r == 0 else 0 * w for r, w in enumerate(ws)]

    def into(ws):
        return [0 * w if r == 0 else 2 * w for r, w in enumerate(ws)]

    def check(row):
        (name, place), found = row
        backwards = BACKWARDS[name][1]
        ws = [normal((2,), float, r, 1) for r in range(size)]
        inside, used = ws, into(ws)
        for _ in range(2 if place == "scan" else 1):
            inside = [a + b for a, b in zip(around(inside), backwards(into(inside)), strict=True)]
            used = backwards(used)
        np.testing.assert_allclose(found[0], inside[rank], rtol=1e-12)
        np.testing.assert_allclose(found[1], around(ws)[rank] + used[rank], rtol=1e-12)

    found = jax.jit(lambda x: [gradients(*call)(x) for call in calls])(x)
    each(list(zip(calls, found, strict=True)), check, lambda row: " in ".join(row[0]))


STRAIGHT = rows("places", [place for place in PLACES if place != "scan"])


@STRAIGHT
def test_second_derivative_of_custom_vjp_that_one_rank_does_not_use(places, rank, size):
    x, n = normal((2,), float, rank, 0), size - 1

    def second(place):
        def loss(x):
            y = PLACES[place](cubes_added)(x)
            return jnp.sum(x) + (0.0 if rank == 0 else jnp.sum(y))

        return jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))

    found = jax.jit(lambda x: {place: second(place)(x) for place in places})(x)
    expected = 2 * (1 + 3 * x**2 * n) * 6 * x * n
    each(places, lambda place: np.testing.assert_allclose(found[place], expected, rtol=1e-12))


SECOND = {
    "forward over reverse": lambda f, x, v: jax.jvp(jax.grad(f), (x,), (v,))[1],
    "reverse over reverse": lambda f, x, v: jax.grad(lambda x: jnp.vdot(jax.grad(f)(x), v))(x),
    "reverse over forward": lambda f, x, v: jax.grad(lambda x: jax.jvp(f, (x,), (v,))[1])(x),
}


@STRAIGHT
def test_second_derivative_of_custom_jvp_that_one_rank_does_not_use(places, rank, size):
    """JAX leaves the function itself, which does not communicate, out of the first derivative there."""
    xs, vs = ([normal((2,), float, r, i) for r in range(size)] for i in range(2))

    def loss(place):
        def f(x):
            y = scanned_forwards(x)
            return jnp.sin(x if rank == 0 else y)

        return lambda x: jnp.sum(PLACES[place](f)(x))

    summed = np.tril(np.ones((size, size)))  # row r: what rank r's sum contains
    summed = np.where(np.arange(size)[:, None] == 0, np.eye(size), summed)
    expected = (summed.T @ (-np.sin(xs) * (summed @ np.array(vs))))[rank]
    calls = [(place, second) for place in places for second in SECOND]
    found = jax.jit(lambda x, v: [SECOND[second](loss(place), x, v) for place, second in calls])(xs[rank], vs[rank])
    check = lambda row: np.testing.assert_allclose(row[1], expected, rtol=1e-12)  # noqa: E731
    each(list(zip(calls, found, strict=True)), check, lambda row: f"{row[0][1]} in {row[0][0]}")


def test_custom_vjp_that_looks_at_values_and_that_one_rank_does_not_use(rank, size):
    """Such a rule cannot be traced, so it is not known whether it communicates."""

    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x, None), lambda _, ct: (jaxmpi.allreduce(ct if float(ct) > -1 else -ct, MPI.SUM),))
    gradient = jax.grad(lambda x: (f(x), x)[int(rank == 0)])(2.0)
    assert gradient == (size if rank == 0 else size - 1)


def test_derivative_in_a_loop_that_ends_for_each_row(comm):
    """`vmap` makes its condition one for each row; the derivative inside is differentiated again."""

    def f(x, times=lambda y: jaxmpi.bcast(y, 0)):
        def step(state):
            return state[0] + 1, jax.jvp(lambda y: times(jnp.sin(y) * x), (state[1],), (1.0,))[1]

        return lax.while_loop(lambda state: state[0] < 3 + 0 * state[1], step, (0.0, x))[1]

    xs = jnp.asarray([0.3, 0.5])
    second = [jax.vmap(lambda x, g=g: jax.jvp(g, (x,), (1.0,))[1])(xs) for g in (f, lambda x: f(x, lambda y: y))]
    np.testing.assert_allclose(*second, rtol=1e-12)
    of_batch = jax.jvp(jax.vmap(f), (xs,), (jnp.ones(2),))[1]
    np.testing.assert_allclose(of_batch, second[1], rtol=1e-12)


def test_custom_vmap_is_refused(rank):
    """On each rank by itself, before anything is sent; its value is fine."""

    @jax.custom_batching.custom_vmap
    def f(x):
        return jaxmpi.bcast(x, 0) ** 2

    @f.def_vmap
    def _rule(axis_size, in_batched, x):
        return jaxmpi.bcast(x, 0) ** 2, in_batched[0]

    np.testing.assert_array_equal(jax.vmap(f)(jnp.full((3, 2), 2.0 + rank)), np.full((3, 2), 4.0))
    if rank == 0:
        for g in (f, jax.jit(f), lambda x: x * f(jnp.ones(2))):
            with pytest.raises(NotImplementedError, match="custom_vmap"):
                jax.jvp(g, (jnp.ones(2),), (jnp.ones(2),))


# --- operands of other kinds -----------------------------------------------------------------------------------------


def test_exchange_of_two_dtypes(comm, rank, size):
    """Rank 0 sends floating-point numbers and receives integers."""
    if rank > 1:
        return
    other = 1 - rank
    counts = jnp.arange(3)

    def f(x):
        if rank == 0:
            got = jaxmpi.sendrecv(3 * x, counts, other, other, sendtag=1, recvtag=2)
            return x * got
        got = jaxmpi.sendrecv(counts, x, other, other, sendtag=2, recvtag=1)
        return 7 * got * x

    pair = comm.Create_group(comm.group.Incl([0, 1]))
    x = normal((3,), float, rank, 0)
    check_wrapped(lambda wrap: wrap(f), x, WRAPS, pair)
    gradient = jax.grad(lambda x: jnp.sum(f(x)))(x)
    others = 21 * normal((3,), float, other, 0)
    np.testing.assert_allclose(gradient, jnp.arange(3) + others if rank == 0 else others)
    pair.Free()


LOOPS = {
    "scan": lambda f: lambda k: lax.scan(lambda c, _: (c + 1, f(k)), k, None, length=2)[1].sum(),
    "cond": lambda f: lambda k: lax.cond(k > 0, lambda k: f(k), lambda k: 0.0 * f(k), k),
    "while": lambda f: lambda k: lax.while_loop(lambda s: s < k + 2, lambda s: s + (f(k) > -9).astype(s.dtype), k),
    "jit": lambda f: jax.jit(f),
    "checkpoint": lambda f: jax.checkpoint(f),
}


@rows("places", LOOPS)
def test_no_floating_point_operand(places, comm, rank):
    """What rank 0 sends is received in a function of an integer alone."""

    def f(x, place):
        template = jnp.zeros(())

        def get(k):
            return jaxmpi.bcast(x[0] ** 2 if rank == 0 else template, 0) * k

        def loop_of_others(k):
            return jaxmpi.bcast(template, 0) * k

        y = LOOPS[place](get if rank == 0 else loop_of_others)(jnp.int32(1))
        return jnp.sum(y) * x

    x, v = normal((2,), float, rank, 0), normal((2,), float, rank, 1)
    check_all([Map(place, lambda x, place=place: f(x, place), x) for place in places if place != "while"], comm)
    if "while" in places:
        g = jax.jit(lambda x, v: (jax.jvp(lambda x: f(x, "while"), (x,), (v,))[1], f(x, "while")))
        near = [g(x + s * 1e-6 * v, v)[1] for s in (1, -1)]
        np.testing.assert_allclose(g(x, v)[0], (near[0] - near[1]) / 2e-6, rtol=1e-6, atol=1e-8)


def test_differentiated_with_respect_to_nothing(rank):
    """On one rank alone here: it knows by itself, before anything is sent."""
    if rank == 0:
        with pytest.raises(NotImplementedError, match="with respect to nothing"):
            jax.jvp(lambda _: jaxmpi.bcast(jnp.ones(2), 0), ({},), ({},))


def test_arrays_of_64_bits_that_are_no_longer_enabled(comm, size):
    """A value keeps its dtype, and zeros get one that JAX has."""
    x = jnp.arange(3.0)
    total = lambda x: jaxmpi.allreduce(x, MPI.SUM)  # noqa: E731
    jax.config.update("jax_enable_x64", False)
    try:
        value, tangent = jax.jit(lambda x: jax.jvp(total, (x,), (x,)))(x)
    finally:
        jax.config.update("jax_enable_x64", True)
    np.testing.assert_array_equal(value, size * np.arange(3.0))
    np.testing.assert_array_equal(tangent, size * np.arange(3.0))

"""Derivatives of every operation: adjoints by the dot-product test, tangents by finite differences, on all ranks.

Stack the arrays of all ranks into one vector: an operation is a map of it with one Jacobian J, of which each rank has
rows and columns. For any v and w, <J v, w> = <v, J' w> summed over the ranks. Finite differences of the operation
itself, at x + h v on all ranks, are the witness of J v.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI

import jaxmpi
from jaxmpi import notoken
from support.derivatives import between_ranks, check, draw, needs_new_jax
from support.table import CASES, NEW_JAX, REPLICATED, max_ranks

PAIRS = [case for case in CASES if NEW_JAX or not case.name.startswith("send_recv")]
FEWER = [case for case in PAIRS if not case.variant]


TOLERANCE = {
    "float32": 1e-4,
    "float64": 1e-12,
    "complex64": 1e-4,
    "complex128": 1e-12,
    "bfloat16": 0.3,
    "float16": 3e-2,
}


@pytest.mark.slow("case")
@pytest.mark.parametrize("dtype", max_ranks(2, TOLERANCE, but=["float64", "complex64", "bfloat16"]))
@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_dot_product(case, dtype, comm, rank, size):
    for root in case.roots(size):
        x = draw(case.shape((3, 2), rank, size, root), jnp.dtype(dtype), rank, 0)
        replicated = case.name in REPLICATED
        f = lambda x, root=root: case.call(x, comm, root)  # noqa: E731
        double = dtype in ("float64", "complex128")
        check(f, x, comm, TOLERANCE[dtype], double, replicated, compiled=dtype == "float64" and root == size - 1)


@pytest.mark.two_ranks_suffice
@pytest.mark.slow("case")
@pytest.mark.parametrize("shape", [(), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("case", FEWER, ids=str)
def test_scalars_and_nothing(case, shape, comm, rank, size):
    for root in case.roots(size):
        x = draw(case.shape(shape, rank, size, root), float, rank, 0)
        check(lambda x, root=root: case.call(x, comm, root), x, comm, replicated=case.name in REPLICATED)


# --- ranks that differ ----------------------------------------------------------------------------------------------


def test_constant_templates(comm, rank, size):
    """Where a rank's operand is not read it may be a constant, also where it is the only operand there."""
    x = draw((size, 3), float, rank, 0)
    template = jax.ShapeDtypeStruct((3,), float)
    for root in range(size):
        mine = rank == root
        check(lambda x, r=root, m=mine: notoken.bcast(x[0] if m else jnp.zeros(3), r), x, comm)
        check(lambda x, r=root, m=mine: notoken.scatter(x if m else jnp.zeros(3), r), x, comm)
        check(lambda x, r=root, m=mine: notoken.bcast(x[0] if m else template, r) * x[1], x, comm)
        check(lambda x, r=root, m=mine: notoken.scatter(x if m else template, r) ** 2, x, comm)


@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit, jax.checkpoint, jaxmpi.jit], ids=["plain", "jit", "checkpoint", "jaxmpi"]
)
def test_one_rank_alone_depends(wrap, comm, rank, size):
    """Each operation where the operand of rank 0 alone depends on what is differentiated."""
    x = draw((size, 2), float, rank, 0)

    def of(operation):
        return lambda x: jnp.sum(operation(x if rank == 0 else jnp.ones((size, 2)))) + jnp.sum(x)

    for operation in between_ranks(rank, size):
        check(wrap(of(operation)), x, comm)


@needs_new_jax
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_results_that_one_rank_alone_uses(wrap, comm, rank, size):
    x = draw((size, 2), float, rank, 0)
    for operation in between_ranks(rank, size):

        def f(x, operation=operation):
            y = operation(x)
            return jnp.sum(y * x[0, 0]) if rank == size - 1 else jnp.sum(x)

        check(wrap(f), x, comm)


@needs_new_jax
@pytest.mark.ranks(2)
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit, jaxmpi.jit], ids=["plain", "jit", "jaxmpi"])
def test_pair_in_two_functions(jit, comm, rank, size):
    """A chain of ranks, each working on what the one before has sent; the halves of a pair in two functions."""

    def pass_on(y):
        if rank < size - 1:
            notoken.send(jnp.sin(y), rank + 1, tag=3)

    def take():
        return notoken.recv(jnp.zeros(3), rank - 1, tag=3) if rank > 0 else jnp.ones(3)

    def f(x):
        y = take() * x
        pass_on(y)
        return y * 2 if rank == size - 1 else jnp.zeros(3)

    x = draw((3,), float, rank, 0)
    check(jit(f), x, comm)
    gradient = jit(jax.grad(lambda x: jnp.sum(f(x))))(x)
    xs = comm.allgather(np.asarray(x))

    def chain(xs):
        y = jnp.ones(3)
        for i, x in enumerate(xs):
            y = (y if i == 0 else jnp.sin(y)) * x
        return jnp.sum(2 * y)

    np.testing.assert_allclose(gradient, jax.grad(chain)(xs)[rank], rtol=1e-12)


@needs_new_jax
@pytest.mark.ranks(2)
def test_pair_in_scan(comm, rank, size):
    """A pipeline: in each step a rank takes the value of the one before and sends its own."""

    def f(x):
        def step(y, _):
            got = notoken.recv(jnp.zeros(2), rank - 1, tag=1) if rank > 0 else x
            y = jnp.tanh(got + 0.5 * y * x)
            if rank < size - 1:
                notoken.send(y, rank + 1, tag=1)
            return y, None

        return lax.scan(jax.checkpoint(step), x, None, length=5)[0]

    x = draw((2,), float, rank, 0)
    check(f, x, comm)
    check(jax.jit(f), x, comm)


@needs_new_jax
@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, jaxmpi.jit], ids=["jit", "checkpoint", "jaxmpi"])
def test_functions_of_constants(wrap, comm, rank, size):
    """Functions whose operands are constants on one rank, or that have none: they are differentiated all the same."""
    take = wrap(lambda: notoken.recv(jnp.zeros(2), 0, tag=1))
    take_more = wrap(lambda t: lax.scan(lambda c, _: (c + notoken.recv(t, 0, tag=2), None), t, None, length=3)[0])
    branch = wrap(lambda k, t: lax.cond(k > 0, lambda t: notoken.bcast(t, 0), lambda t: t, t))

    def f(x):
        if rank == 0:
            for other in range(1, size):
                notoken.send(x, other, tag=1)
                for k in range(3):
                    notoken.send(x**k, other, tag=2)
            got = x
        else:
            got = take() + take_more(jnp.zeros(2)) ** 2
        return got * branch(1, x if rank == 0 else jnp.zeros(2))

    x = draw((2,), float, rank, 0)
    check(f, x, comm, compiled=True)


@needs_new_jax
@pytest.mark.ranks(2)
def test_messages_of_derivatives_have_tags_of_their_own(comm, rank, size):
    """Tangents that nobody receives are never taken for a message."""
    if rank == 0:
        jax.jvp(lambda x: notoken.send(x, 1, tag=4, comm=comm), (jnp.ones(3),), (jnp.full(3, 7.0),))
        notoken.send(jnp.full(3, 2.0), 1, tag=4, comm=comm)
    if rank == 1:
        np.testing.assert_array_equal(notoken.recv(jnp.zeros(3), 0, tag=4, comm=comm), np.ones(3))
        np.testing.assert_array_equal(notoken.recv(jnp.zeros(3), 0, tag=4, comm=comm), np.full(3, 2.0))
        comm.Recv(np.empty(3), 0)


# --- reductions that are not linear ---------------------------------------------------------------------------------

OPS = {"MAX": MPI.MAX, "MIN": MPI.MIN, "PROD": MPI.PROD, "SUM": MPI.SUM}
REDUCTIONS = {
    "allreduce": lambda x, op, comm, root: notoken.allreduce(x, op, comm=comm),
    "iallreduce": lambda x, op, comm, root: notoken.wait(notoken.iallreduce(x, op, comm=comm)),
    "reduce": lambda x, op, comm, root: notoken.reduce(x, op, root, comm=comm),
    "scan": lambda x, op, comm, root: notoken.scan(x, op, comm=comm),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_derivatives_of_reductions(name, op, comm, rank, size):
    for root in range(size) if name == "reduce" else [0]:

        def f(x, root=root):
            return REDUCTIONS[name](x, OPS[op], comm, root)

        x = draw((4,), float, rank, 0)
        check(f, x, comm, replicated=name in REPLICATED)
        if op == "PROD":  # one zero, and two zeros, among the factors
            zeros = jnp.asarray([rank != 0, rank != size - 1, rank not in (0, size - 1), 1.0])
            check(f, x * zeros, comm, replicated=name in REPLICATED)
            check(f, draw((4,), complex, rank, 0), comm, replicated=name in REPLICATED)


@pytest.mark.parametrize("op", ["MAX", "MIN"])
def test_ties_share(op, comm, rank, size):
    x = jnp.ones(2)
    gradient = jax.grad(lambda x: jnp.sum(notoken.allreduce(x, OPS[op])))(x)
    np.testing.assert_allclose(gradient, np.full(2, 1 / size), rtol=1e-15)
    _, tangent = jax.jvp(lambda x: notoken.scan(x, OPS[op]), (x,), (jnp.full(2, 1.0 + rank),))
    np.testing.assert_allclose(tangent, np.full(2, np.mean(1.0 + np.arange(rank + 1))), rtol=1e-14)
    _, tangent = jax.jvp(lambda x: notoken.reduce(x, OPS[op], 0), (x,), (jnp.full(2, 1.0 + rank),))
    np.testing.assert_allclose(
        tangent, np.full(2, np.mean(1.0 + np.arange(size)) if rank == 0 else 1.0 + rank), rtol=1e-14
    )


def test_extreme_that_is_no_number(rank):
    x = jnp.asarray([jnp.nan, 1.0 + rank])
    gradient = jax.grad(lambda x: jnp.sum(notoken.allreduce(x, MPI.MAX)))(x)
    assert np.isnan(gradient[0])
    assert not np.isnan(gradient[1])


@pytest.mark.two_ranks_suffice
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction_keeps_its_dtype(name, dtype, comm, rank):
    x = jnp.full(2, 1 + rank, dtype)
    for op in OPS.values():
        y, tangent = jax.jvp(lambda x, op=op: REDUCTIONS[name](x, op, comm, 0), (x,), (jnp.ones_like(x),))
        assert tangent.dtype == y.dtype == x.dtype
        assert np.isfinite(np.asarray(tangent, np.float32)).all()


@needs_new_jax
def test_no_derivative(comm):
    own = MPI.Op.Create(lambda a, b, t: None, commute=True)
    with pytest.raises(NotImplementedError, match=r"MPI\.SUM.*MPI\.PROD.*MPI\.MAX"):
        jax.grad(lambda x: notoken.allreduce(x, own))(1.0)
    own.Free()


# --- higher order ---------------------------------------------------------------------------------------------------


@pytest.mark.two_ranks_suffice
@pytest.mark.parametrize("case", FEWER, ids=str)
def test_second_derivative(case, comm, rank, size):
    """Reverse over reverse and forward over reverse: the derivative of a gradient, by the same checks."""
    root = size - 1
    x = draw(case.shape((2,), rank, size, root), float, rank, 0)

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(jnp.sin(case.call(x, comm, root)) ** 2))(x)

    if case.name in REPLICATED:  # its gradient is no Jacobian of stacked vectors: against the sum over ranks itself
        xs = jnp.asarray(comm.allgather(np.asarray(x)))

        def local(xs):
            return jnp.sum(jnp.sin(jnp.sum(xs, axis=0)) ** 2)

        v = draw(x.shape, float, rank, 1)
        _, tangent = jax.jvp(gradient, (x,), (v,))
        vs = jnp.asarray(comm.allgather(np.asarray(v)))
        expected = jax.jvp(jax.grad(local), (xs,), (vs,))[1][rank]
        np.testing.assert_allclose(tangent, expected, rtol=1e-10)
        return
    check(gradient, x, comm, rtol=1e-10)


@pytest.mark.two_ranks_suffice
@pytest.mark.parametrize("op", ["PROD", "MAX"])
def test_second_derivative_of_reductions(op, comm, rank, size):
    x = draw((3,), float, rank, 0).at[0].multiply(rank != 0)
    xs = jnp.asarray(comm.allgather(np.asarray(x)))
    reduction = {"PROD": jnp.prod, "MAX": jnp.max}[op]
    cumulative = {"PROD": jnp.cumprod, "MAX": lax.cummax}[op]
    v = draw(x.shape, float, rank, 1)
    vs = jnp.asarray(comm.allgather(np.asarray(v)))

    def ours(x):
        return jax.grad(lambda x: jnp.sum(notoken.allreduce(x, OPS[op]) ** 2))(x)

    def theirs(xs):
        return jax.grad(lambda xs: jnp.sum(reduction(xs, axis=0) ** 2))(xs)

    np.testing.assert_allclose(ours(x), theirs(xs)[rank], rtol=1e-10, atol=1e-12)
    got = jax.jvp(ours, (x,), (v,))[1]
    np.testing.assert_allclose(got, jax.jvp(theirs, (xs,), (vs,))[1][rank], rtol=1e-10, atol=1e-12)

    def ours_of_scan(x):
        return jax.grad(lambda x: jnp.sum(notoken.scan(x, OPS[op]) ** 2))(x)

    def theirs_of_scan(xs):
        return jax.grad(lambda xs: jnp.sum(cumulative(xs, axis=0) ** 2))(xs)

    np.testing.assert_allclose(ours_of_scan(x), theirs_of_scan(xs)[rank], rtol=1e-10, atol=1e-12)
    got = jax.jvp(ours_of_scan, (x,), (v,))[1]
    np.testing.assert_allclose(got, jax.jvp(theirs_of_scan, (xs,), (vs,))[1][rank], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", FEWER, ids=str)
def test_jacobians(case, comm, rank, size):
    """Column by column and row by row: the Jacobian with respect to this rank's own input, one rank after the other.

    jacfwd maps over the columns on all ranks at once: of the sum over the ranks of their columns with one number.
    """
    root = 0
    x = draw(case.shape((2,), rank, size, root), float, rank, 0)

    def f(x):
        return case.call(x, comm, root)

    n = comm.allreduce(x.size, MPI.MAX)
    if comm.allreduce(x.size, MPI.MIN) == n:  # mapped over the same number of columns on all ranks
        columns = jnp.eye(n).reshape(n, *x.shape)
        expected = jnp.stack([jax.jvp(f, (x,), (column,))[1] for column in columns], axis=-1)
        np.testing.assert_allclose(jax.jacfwd(f)(x), expected.reshape(*expected.shape[:-1], *x.shape), rtol=1e-12)
    y = f(x)
    m = comm.allreduce(y.size, MPI.MAX)
    if comm.allreduce(y.size, MPI.MIN) == m:
        rows = jnp.eye(m).reshape(m, *y.shape)
        expected = jnp.stack([jax.vjp(f, x)[1](row)[0] for row in rows])
        np.testing.assert_allclose(jax.jacrev(f)(x), expected.reshape(*y.shape, *x.shape), rtol=1e-12)


@needs_new_jax
def test_jacobian_of_an_unused_result(comm, rank, size):
    """jacrev maps a cotangent that on other ranks is a zero nobody has asked for."""
    x = draw((2,), float, rank, 0)

    def f(x):
        y = notoken.bcast(x, 0)
        return y * 2 if rank == size - 1 else x

    for jit in (lambda f: f, jax.jit):
        jacobian = jax.jacrev(jit(f))(x)
        expected = np.zeros((2, 2))
        if rank == 0:
            expected += 2 * np.eye(2)
        if rank != size - 1:
            expected += np.eye(2)
        np.testing.assert_allclose(jacobian, expected)


@pytest.mark.two_ranks_suffice
@needs_new_jax
def test_mapped_derivatives_that_one_rank_does_not_need(comm, rank, size):
    """vmap of derivatives of a function whose result one rank does not use, and of one where it is a constant."""

    def f(x):
        y = notoken.bcast(x, 0)
        return jnp.sum(jnp.sin(y) * x) if rank == size - 1 else jnp.sum(x**3)

    xs = draw((4, 3), float, rank, 0)
    for g in (
        jax.grad(f),
        jax.hessian(f),
        jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2)),
        lambda x: jax.jvp(jax.grad(f), (x,), (x,))[1],
    ):
        np.testing.assert_allclose(jax.vmap(g)(xs), jnp.stack([g(x) for x in xs]), rtol=1e-12)

    def h(z, y, x):
        return notoken.bcast(x * 2 if rank == 0 else jnp.zeros(2), 0) + z + y

    x, u = jnp.ones(2), jnp.zeros(2)
    tangents = jax.vmap(lambda v: jax.jvp(h, (x, x, x), (u, u, v))[1])(jnp.ones((4, 2)))
    np.testing.assert_array_equal(tangents, np.full((4, 2), 2.0))


INSIDE = {
    "call": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda x: lax.cond(True, f, lambda x: x, x),
    "while": lambda f: lambda x: lax.while_loop(lambda s: s[0] < 1, lambda s: (s[0] + 1, f(x)), (0, jnp.ones(2)))[1],
    "scan": lambda f: lambda x: lax.scan(lambda y, _: (f(x) * y, None), jnp.ones(2), length=1)[0],
}


@pytest.mark.two_ranks_suffice
@needs_new_jax
@pytest.mark.parametrize("other", [jnp.ones_like, lambda x: x], ids=["constant", "linear"])
@pytest.mark.parametrize("inside", INSIDE)
def test_second_tangents_of_an_extreme_whose_operand_differs(inside, other, comm, rank, size):
    """The operand is nonlinear on rank 0 alone, so there alone its tangent has a tangent. `vmap` maps directions."""
    x, directions = jnp.array([0.5, 2.0]), jnp.arange(1.0, 7.0).reshape(3, 2)

    def second(f):
        along = lambda f, v: lambda x: jax.jvp(f, (x,), (v,))[1]  # noqa: E731
        return jax.vmap(lambda v: along(along(f, v), v)(x))(directions)

    for op, extreme in ((MPI.MIN, jnp.minimum), (MPI.MAX, jnp.maximum)):
        f = INSIDE[inside](lambda y, op=op: notoken.allreduce(y, op))
        result = second(lambda x, f=f: f(x**2 if rank == 0 else other(x)) + 0 * x)
        expected = second(lambda x, e=extreme: e(x**2, other(x)) if size > 1 else x**2)
        np.testing.assert_allclose(result, expected, rtol=1e-12)


# --- control flow and solvers ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("case", FEWER, ids=str)
@pytest.mark.parametrize(
    "wrap", max_ranks(2, [lambda f: f, jax.checkpoint], but=[jax.checkpoint]), ids=["plain", "checkpoint"]
)
def test_scan_of_50_steps(wrap, case, comm, rank, size):
    root = 0
    x = draw(case.shape((2,), rank, size, root), float, rank, 0)

    def f(x):
        def step(c, k):
            return c + jnp.sum(jnp.sin(case.call(x * jnp.cos(k), comm, root))) / 100, None

        return lax.scan(wrap(step), 0.0, jnp.arange(50.0))[0]

    check(f, x, comm, rtol=1e-10, replicated=case.name in REPLICATED, compiled=True)


@pytest.mark.two_ranks_suffice
@needs_new_jax
@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.everything_saveable], ids=["default", "everything"])
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit, jaxmpi.jit], ids=["eager", "jax.jit", "jaxmpi.jit"])
def test_checkpoint_of_complex_numbers(comm, rank, size, jit, policy):
    """What is kept of them is used by the rest, in a scan too, beside real numbers."""
    x = jnp.arange(3.0) / 4 + 1j * (1 + rank)

    def f(z):
        y, r = notoken.allreduce((z, jnp.real(z)), MPI.SUM, comm=comm)
        return jnp.sum(jnp.real(jnp.sin(y) * jnp.cos(r) * notoken.sendrecv(z, z, (rank - 1) % size, (rank + 1) % size)))

    def looped(f):
        return lambda z: jax.lax.scan(lambda c, _: (c + f(z), None), 0.0, None, length=2)[0]

    for around in (lambda f: f, looped):
        expected = jax.grad(around(f))(x)
        found = jit(jax.grad(around(jax.checkpoint(f, policy=policy))))(x)
        np.testing.assert_allclose(found, expected, rtol=2e-5)


def test_checkpoints_around_loops_and_in_them(comm, rank, size):
    """What a step communicates is the same in each step, so JAX would move it out of the loop."""

    def step(c):
        return jnp.sin(notoken.bcast(c if rank == 0 else jnp.ones(2), 0))

    def looped(step):
        return lambda x: jnp.sum(jax.checkpoint(lambda x: lax.scan(lambda c, _: (step(c) * x, None), x, None, 3)[0])(x))

    x = draw((2,), float, rank, 0)
    expected = jax.value_and_grad(lambda x: jnp.sum(step(step(step(x) * x) * x) * x))(x)
    for wrap in (
        lambda f: f,
        jax.checkpoint,
        lambda f: jax.jit(jax.checkpoint(f)),
        lambda f: jax.checkpoint(jax.jit(f)),
    ):
        check(looped(wrap(step)), x, comm)
        value, gradient = jax.value_and_grad(looped(wrap(step)))(x)
        np.testing.assert_allclose(value, expected[0], rtol=1e-12)
        np.testing.assert_allclose(gradient, expected[1], rtol=1e-12)


@needs_new_jax
@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_pair_in_checkpoints(wrap, comm, rank, size):
    def pair(x):
        if rank == 0:
            notoken.send(x, 1, tag=2)
            return notoken.recv(jnp.zeros(3), 1, tag=3)
        if rank == 1:
            y = notoken.recv(jnp.zeros(3), 0, tag=2)
            notoken.send(jnp.sin(x) * y, 0, tag=3)
            return y
        return x

    def f(x):
        return jax.checkpoint(lambda x: lax.scan(lambda c, k: (wrap(pair)(c) * k, None), x, jnp.arange(1.0, 4.0))[0])(x)

    check(f, draw((3,), float, rank, 0), comm)


def test_while_of_a_constant_on_one_rank(comm, rank, size):
    def f(x):
        start = (x if rank == 0 else jnp.ones(2), 0)
        return lax.while_loop(lambda c: c[1] < 3, lambda c: (notoken.scan(c[0], MPI.SUM), c[1] + 1), start)[0] + 0 * x

    x, v = draw((2,), float, rank, 0), draw((2,), float, rank, 1)
    for jit in (lambda f: f, jax.jit):
        value, tangent = jit(lambda x, v: jax.jvp(f, (x,), (v,)))(x, v)
        np.testing.assert_allclose(value, f(x), rtol=1e-12)
        np.testing.assert_allclose(tangent, (f(x + 1e-6 * v) - f(x - 1e-6 * v)) / 2e-6, rtol=1e-6, atol=1e-8)


def test_cond_and_while(comm, rank, size):
    x = draw((3,), float, rank, 0)

    def branches(x):
        return lax.cond(x.size > 2, lambda x: notoken.scan(x, MPI.SUM), lambda x: x, x)

    def loop(x):
        return lax.while_loop(lambda c: c[1] < 3, lambda c: (jnp.sin(notoken.scan(c[0], MPI.SUM)), c[1] + 1), (x, 0))[0]

    check(branches, x, comm)
    v = draw((3,), float, rank, 1)
    _, tangent = jax.jvp(loop, (x,), (v,))
    np.testing.assert_allclose(tangent, (loop(x + 1e-6 * v) - loop(x - 1e-6 * v)) / 2e-6, rtol=1e-6, atol=1e-8)


def test_custom_rules_that_communicate(comm, rank, size):
    """custom_vjp and custom_jvp functions that communicate, and linearize."""

    @jax.custom_vjp
    def total(x):
        return notoken.scan(x, MPI.SUM)

    total.defvjp(lambda x: (total(x), None), lambda _, ct: jax.vjp(lambda x: notoken.scan(x, MPI.SUM), ct)[1](ct))

    @jax.custom_jvp
    def twice(x):
        return 2 * notoken.bcast(x, 0)

    twice.defjvp(lambda p, t: (twice(*p), 2 * notoken.bcast(t[0], 0)))
    x = draw((3,), float, rank, 0)
    np.testing.assert_allclose(
        jax.vjp(total, x)[1](x)[0], jax.vjp(lambda x: notoken.scan(x, MPI.SUM), x)[1](x)[0], rtol=1e-12
    )
    check(twice, x, comm)
    _, push = jax.linearize(lambda x: notoken.scan(x, MPI.SUM) ** 2, x)
    np.testing.assert_allclose(push(x), jax.jvp(lambda x: notoken.scan(x, MPI.SUM) ** 2, (x,), (x,))[1], rtol=1e-12)


def distributed_solve(a, b, comm, iterations):
    """Solves A A' u + u = b for the rows of A that are spread over the ranks, by conjugate gradients."""

    def matvec(u):
        return u + notoken.allreduce(a.T @ (a @ u), MPI.SUM, comm=comm)

    def solve(matvec, b):
        def step(state):
            u, r, p, rr, i = state
            q = matvec(p)
            alpha = rr / jnp.vdot(p, q)
            u, r = u + alpha * p, r - alpha * q
            new = jnp.vdot(r, r)
            return u, r, r + new / rr * p, new, i + 1

        start = (jnp.zeros_like(b), b, b, jnp.vdot(b, b), 0)
        return lax.while_loop(lambda s: (s[-1] < iterations) & (s[3] > 1e-26), step, start)[0]

    return lax.custom_linear_solve(matvec, b, solve, symmetric=True)


def test_conjugate_gradients(comm, rank, size):
    a, b = draw((4, 5), float, rank, 0), draw((5,), float, 0, 1)

    def loss(a, b):
        return jnp.sum(distributed_solve(a, b, comm, 50) ** 3)

    rows = jnp.asarray(np.concatenate(comm.allgather(np.asarray(a))))

    def dense(rows, b):
        return jnp.sum(jnp.linalg.solve(jnp.eye(5) + rows.T @ rows, b) ** 3)

    for jit in (jax.jit, jaxmpi.jit):
        of_a, of_b = jit(jax.grad(loss, argnums=(0, 1)))(a, b)
        expected_a, expected_b = jax.grad(dense, argnums=(0, 1))(rows, b)
        np.testing.assert_allclose(of_a, expected_a[4 * rank : 4 * rank + 4], rtol=1e-8, atol=1e-12)
        np.testing.assert_allclose(of_b, expected_b, rtol=1e-8, atol=1e-12)

    def memory(iterations):
        gradient = jax.jit(jax.grad(lambda a, b: jnp.sum(distributed_solve(a, b, comm, iterations) ** 3)))
        return gradient.lower(a, b).compile().memory_analysis().temp_size_in_bytes

    assert memory(10) == memory(10_000), "memory does not grow with the iterations"


def test_solve_that_is_not_symmetric(comm, rank, size):
    """custom_linear_solve transposes its matvec, with the communication in it."""
    left, right = (rank - 1) % size, (rank + 1) % size
    w = jnp.asarray(np.random.default_rng([3, rank]).uniform(-0.4, 0.4, size=3))
    b = draw((3,), float, rank, 0)

    def solution(w, b):
        def matvec(u):
            ring = notoken.sendrecv(u, jnp.zeros(3), left, right)
            return 2 * u + w * ring + 0.1 * notoken.bcast(u if rank == 0 else 0 * u, 0)

        def solve(matvec, b):
            return lax.fori_loop(0, 100, lambda i, u: u + (b - matvec(u)) / 2, b)

        return lax.custom_linear_solve(matvec, b, solve, transpose_solve=solve)

    def dense(ws, bs):
        a = 2 * jnp.eye(3 * size).reshape(size, 3, size, 3)
        for r in range(size):
            a = a.at[r, :, (r - 1) % size].add(jnp.diag(ws[r])).at[r, :, 0].add(0.1 * jnp.eye(3))
        return jnp.linalg.solve(a.reshape(3 * size, 3 * size), bs.reshape(-1)).reshape(size, 3)

    ws, bs = (jnp.asarray(comm.allgather(np.asarray(x))) for x in (w, b))
    expected = jax.grad(lambda ws, bs: jnp.sum(jnp.sin(dense(ws, bs))), argnums=(0, 1))(ws, bs)
    for jit in (lambda f: f, jax.jit):
        got = jit(jax.grad(lambda w, b: jnp.sum(jnp.sin(solution(w, b))), argnums=(0, 1)))(w, b)
        for ours, theirs in zip(got, expected, strict=True):
            np.testing.assert_allclose(ours, theirs[rank], rtol=1e-8, atol=1e-12)


@needs_new_jax
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_constants_in_what_is_transposed(wrap, comm, rank, size):
    """linear_transpose of operations whose operand, a template or not, depends on nothing on all ranks but one."""
    for operation in between_ranks(rank, size):

        def f(x, operation=operation):
            return operation(x if rank == 0 else jnp.zeros((size, 2)))

        x, w = draw((size, 2), float, rank, 0), None
        y, pull = jax.vjp(f, x)
        w = draw(y.shape, float, rank, 1)
        (transposed,) = jax.linear_transpose(wrap(f), x)(w)
        np.testing.assert_allclose(transposed, pull(w)[0], rtol=1e-12)


@needs_new_jax
@pytest.mark.parametrize("loop", ["scan", "while", "cond"])
def test_constants_in_loops_that_are_transposed(loop, comm, rank):
    """Refused before anything is sent; on one rank alone here, as no other one has to know."""
    if rank > 0:
        return
    loops = {
        "scan": lambda f, x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
        "while": lambda f, x: lax.while_loop(lambda s: s[1] < 2, lambda s: (f(s[0]), s[1] + 1), (x, 0))[0],
        "cond": lambda f, x: lax.cond(jnp.asarray(True), f, lambda x: x, x),
    }

    def f(x):
        return x + notoken.recv(jnp.zeros(3), 0, tag=1)

    with pytest.raises(NotImplementedError, match=r"recv cannot be transposed.*0 \* x"):
        jax.linear_transpose(lambda x: loops[loop](f, x), jnp.ones(3))(jnp.ones(3))


# --- replicated values ----------------------------------------------------------------------------------------------


def test_worked_example(comm, rank, size):
    """Scatter from 0, the last rank doubles, allreduce, sum."""
    n = 2 * size

    def loss(x):
        part = notoken.scatter(x.reshape(size, 2) if rank == 0 else x[:2], 0)
        part = part * 2 if rank == size - 1 else part
        return jnp.sum(notoken.allreduce(part, MPI.SUM))

    value, gradient = jax.value_and_grad(loss)(jnp.arange(float(n)))
    assert value == n * (n - 1) / 2 + (2 * n - 3)
    if size == 4:
        assert value == 41.0
    expected = np.ones(n)
    expected[-2:] = 2
    np.testing.assert_array_equal(gradient, expected if rank == 0 else np.zeros(n))


def test_replicate(comm, rank, size):
    """A replicated parameter, used differently on each rank: the gradient is that of the whole, on all ranks."""
    data = np.arange(5.0) + rank
    everything = np.concatenate([np.arange(5.0) + r for r in range(size)])

    def loss(w):
        w = jaxmpi.replicate(w)
        return notoken.allreduce(jnp.sum(jnp.sin(w * data)), MPI.SUM)

    for jit in (lambda f: f, jax.jit, jaxmpi.jit):
        value, gradient = jit(jax.value_and_grad(loss))(0.3)
        np.testing.assert_allclose(value, np.sum(np.sin(0.3 * everything)))
        np.testing.assert_allclose(gradient, np.sum(everything * np.cos(0.3 * everything)))
    second = jax.grad(jax.grad(loss))(0.3)
    np.testing.assert_allclose(second, -np.sum(everything**2 * np.sin(0.3 * everything)))
    tree = jaxmpi.replicate({"w": jnp.ones(2), "b": 1.0})
    np.testing.assert_array_equal(tree["w"], np.ones(2))


@needs_new_jax
def test_replicate_that_one_rank_does_not_use(comm, rank, size):
    def loss(w):
        u = jaxmpi.replicate(w)
        return notoken.allreduce(u * 3 if rank == 0 else 0.0 * w, MPI.SUM)

    assert jax.grad(loss)(2.0) == 3


def test_replicate_of_a_constant(comm, rank, size):
    def loss(w):
        return notoken.allreduce(jaxmpi.replicate(2.0 if rank else w) * w, MPI.SUM)

    np.testing.assert_allclose(jax.grad(loss)(3.0), 3.0 + sum(3.0 for _ in range(size)) if rank == 0 else 2.0)


# --- one loss on all ranks ------------------------------------------------------------------------------------------


def products_with_hessian(loss, x, v):
    """The gradient, and the second derivative along `v` in forward over reverse, reverse over reverse and reverse over
    forward mode."""
    gradient, forward = jax.jvp(jax.grad(loss), (x,), (v,))
    reverse = jax.grad(lambda x: jnp.vdot(jax.grad(loss)(x), v))(x)
    of_tangent = jax.grad(lambda x: jax.jvp(loss, (x,), (v,))[1])(x)
    return gradient, forward, reverse, of_tangent


def one_loss(y):
    """Of an array (n, 3), with a full Hessian and nothing that is alike in two rows."""
    weights = jnp.linspace(0.3, 1.7, y.size).reshape(y.shape)
    return jnp.sum(jnp.sin(weights * y)) + jnp.sum(weights * y) ** 3


@pytest.mark.two_ranks_suffice
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit, jaxmpi.jit], ids=["plain", "jit", "jaxmpi"])
@pytest.mark.parametrize("name", ["allgather", "bcast"])
def test_invariant(name, jit, comm, rank, size):
    """What every rank has been sent, and a loss of it that every rank computes: the derivatives of one loss, not N."""
    x, v = draw((2, 3), float, rank, 0), draw((2, 3), float, rank, 1)
    xs, vs = (jnp.asarray(comm.allgather(np.asarray(array))) for array in (x, v))
    for root in range(size if name == "bcast" else 1):

        def loss(x, root=root):
            y = notoken.allgather(x) if name == "allgather" else notoken.bcast(x, root)
            return one_loss(jaxmpi.invariant(y).reshape(-1, 3))

        def whole(xs, root=root):
            return one_loss((xs if name == "allgather" else xs[root]).reshape(-1, 3))

        np.testing.assert_allclose(jit(loss)(x), whole(xs), rtol=1e-12)
        first, second = jax.jvp(jax.grad(whole), (xs,), (vs,))
        gradient, *products = jit(lambda x, v, loss=loss: products_with_hessian(loss, x, v))(x, v)
        np.testing.assert_allclose(gradient, first[rank], rtol=1e-12)
        for product in products:
            np.testing.assert_allclose(product, second[rank], rtol=1e-10)


def test_invariant_makes_a_sum_an_allreduce(comm, rank, size):
    """`allreduce` of a sum with its convention is the sum whose derivative is the true adjoint, then `invariant`."""
    x, v = draw((2, 3), float, rank, 0), draw((2, 3), float, rank, 1)
    conventional = products_with_hessian(lambda x: one_loss(notoken.allreduce(jnp.sin(x), MPI.SUM)), x, v)
    true = products_with_hessian(
        lambda x: one_loss(jaxmpi.invariant(jnp.sum(notoken.allgather(jnp.sin(x)), axis=0))), x, v
    )
    xs, vs = (jnp.asarray(comm.allgather(np.asarray(array))) for array in (x, v))
    first, second = jax.jvp(jax.grad(lambda xs: one_loss(jnp.sum(jnp.sin(xs), axis=0))), (xs,), (vs,))
    for a, b, witness in zip(conventional, true, (first, second, second, second), strict=True):
        np.testing.assert_allclose(a, witness[rank], rtol=1e-10)
        np.testing.assert_allclose(b, witness[rank], rtol=1e-10)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", max_ranks(2, [(), (3,), (0,), (2, 0)], but=[(3,)]), ids=str)
def test_invariant_of_dtypes_and_shapes(shape, dtype, comm, rank, size):
    """The identity in forward mode, and each transpose's transpose; a transpose divides."""
    dtype = jnp.dtype(dtype)
    x, t, w = (draw(shape, dtype, seed, seed) for seed in range(3))

    @jax.jit  # one program for all of it
    def everything(x, t, w):
        pull = jax.linear_transpose(jaxmpi.invariant, x)
        push = jax.linear_transpose(lambda w: pull(w)[0], w)
        again = jax.linear_transpose(lambda t: push(t)[0], t)
        return jax.jvp(jaxmpi.invariant, (x,), (t,)), (pull(w)[0], push(t)[0], again(w)[0])

    (y, tangent), transposes = everything(x, t, w)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(tangent, t)
    for got, expected in zip(transposes, (w / size, t, w / size), strict=True):
        assert got.dtype == dtype
        assert got.shape == shape
        close = {"rtol": 4 * float(jnp.finfo(dtype).eps)}
        wide = np.complex128 if jnp.issubdtype(dtype, jnp.complexfloating) else float
        np.testing.assert_allclose(np.asarray(got, wide), np.asarray(expected, wide), **close)


def test_invariant_under_vmap(comm, rank, size):
    x = draw((4, 3), float, rank, 0)
    xs = jnp.asarray(comm.allgather(np.asarray(x)))

    def loss(x):
        return one_loss(jaxmpi.invariant(notoken.allgather(x)))

    expected = jax.vmap(jax.grad(one_loss), 1, 1)(xs)[rank]
    for jit in (lambda f: f, jax.jit, jaxmpi.jit):
        np.testing.assert_allclose(jit(jax.vmap(jax.grad(loss)))(x), expected, rtol=1e-12)
    np.testing.assert_array_equal(jax.vmap(jaxmpi.invariant, 1, 1)(xs[0]), xs[0])


def test_invariant_of_a_pytree_and_integers(comm, rank, size):
    tree = {"w": jnp.arange(2.0), "n": jnp.arange(3), "on": jnp.asarray(True), "b": 1.0}
    same = jaxmpi.invariant(tree)
    assert jax.tree.structure(same) == jax.tree.structure(tree)
    for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == jnp.asarray(b).dtype
    assert notoken.invariant is jaxmpi.invariant

    def loss(x):
        y = jaxmpi.invariant({**tree, "w": notoken.allgather(x)})
        return jnp.sum(y["w"] * y["b"]) * jnp.sum(y["n"])

    np.testing.assert_allclose(jax.grad(loss)(jnp.ones(2)), np.full(2, 3.0))
    half = comm.Split(rank % 2, rank)
    (gradient,) = jax.vjp(lambda x: jaxmpi.invariant(x, comm=half), 1.0)[1](1.0)
    np.testing.assert_allclose(gradient, 1 / half.size)


def test_invariant_of_a_constant(comm, rank, size):
    """On one rank alone it depends on what is differentiated."""
    y = 2.0 * jnp.ones(2)

    def loss(x):
        return jnp.sum(jaxmpi.invariant(x if rank == 0 else y) ** 2) + 0 * jnp.sum(x)

    expected = 2 * y / size if rank == 0 else 0 * y
    for jit in (lambda f: f, jax.jit, jax.checkpoint):
        np.testing.assert_allclose(jax.grad(jit(loss))(y), expected, rtol=1e-12)

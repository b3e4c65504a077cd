"""Derivatives of every operation: adjoints by the dot-product test, tangents by finite differences, on all ranks, as
support/derivatives.py has them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI

import jaxmpi
from support.derivatives import Map, between_ranks, check, check_all, check_wrapped, direction, needs_new_jax, normal
from support.rows import each, rows
from support.table import CASES, NEW_JAX, REDUCING, REPLICATED

PAIRS = [case for case in CASES if NEW_JAX or not case.name.startswith("send_recv")]
FEWER = [case for case in PAIRS if not case.variant]
EAGER = lambda f: f  # noqa: E731
WRAPS = {"plain": EAGER, "checkpoint": jax.checkpoint, "jit": jaxmpi.jit}
"""Inside a transformation jaxmpi.jit is jax.jit."""
TOLERANCE = {"float64": 1e-12, "float32": 1e-4, "complex64": 1e-4, "bfloat16": 0.3}


def of_table(case, root, shape, dtype, comm):
    """A row of the table as a map whose tangents NumPy knows, since it is linear."""
    inputs = [jnp.zeros(case.shape(shape, r, comm.size, root), dtype) for r in range(comm.size)]
    expected = case.expected([np.asarray(direction(x, r)) for r, x in enumerate(inputs)], comm.rank, root)
    x = normal(inputs[comm.rank].shape, dtype, comm.rank, 0)
    name = f"{case} {root} {dtype} {shape}"
    call = lambda x: case.call(x, comm, root)  # noqa: E731
    return Map(name, call, x, TOLERANCE[dtype], case.name in REPLICATED, expected)


@rows("cases", PAIRS)
def test_dot_product(cases, comm, size):
    maps = [of_table(case, root, (3, 2), "float64", comm) for case in cases for root in case.roots(size)]
    kinds = [((2,), "complex64"), ((), "bfloat16")]
    maps += [of_table(case, 0, *kind, comm) for case in cases if not case.variant for kind in kinds]
    check_all(maps, comm, [jaxmpi.jit])


# --- ranks that differ ----------------------------------------------------------------------------------------------


def test_constant_templates(comm, rank, size):
    """Where a rank's operand is not read it may be a constant, also where it is the only operand there."""
    x = normal((size, 3), float, rank, 0)
    template = jax.ShapeDtypeStruct((3,), float)

    def of_root(root):
        mine = rank == root
        return {
            f"bcast {root}": lambda x: jaxmpi.bcast(x[0] if mine else jnp.zeros(3), root),
            f"scatter {root}": lambda x: jaxmpi.scatter(x if mine else jnp.zeros(3), root),
            f"bcast {root} into a shape": lambda x: jaxmpi.bcast(x[0] if mine else template, root) * x[1],
            f"scatter {root} into a shape": lambda x: jaxmpi.scatter(x if mine else template, root) ** 2,
        }

    check_all([Map(name, f, x) for root in range(size) for name, f in of_root(root).items()], comm)


def test_one_rank_alone_depends(comm, rank, size):
    """Each operation where the operand of rank 0 alone depends on what is differentiated."""
    x = normal((size, 2), float, rank, 0)

    def f(x):
        operand = x if rank == 0 else jnp.ones((size, 2))
        return {name: jnp.sum(op(operand)) + jnp.sum(x) for name, op in between_ranks(rank, size).items()}

    check(f, x, comm, ways=[EAGER])
    check_wrapped(lambda wrap: wrap(f), x, WRAPS, comm)


@needs_new_jax
def test_results_that_one_rank_alone_uses(comm, rank, size):
    x = normal((size, 2), float, rank, 0)

    def f(x):
        ys = {name: op(x) for name, op in between_ranks(rank, size).items()}
        return {name: jnp.sum(y * x[0, 0]) if rank == size - 1 else jnp.sum(x) for name, y in ys.items()}

    check_wrapped(lambda wrap: wrap(f), x, WRAPS, comm)


@needs_new_jax
@pytest.mark.ranks(2)
def test_pair_in_two_functions(comm, rank, size):
    """A chain of ranks, each working on what the one before has sent; the halves of a pair in two functions."""

    def pass_on(y):
        if rank < size - 1:
            jaxmpi.send(jnp.sin(y), rank + 1, tag=3)

    def take():
        return jaxmpi.recv(jnp.zeros(3), rank - 1, tag=3) if rank > 0 else jnp.ones(3)

    def f(x):
        y = take() * x
        pass_on(y)
        return y * 2 if rank == size - 1 else jnp.zeros(3)

    x = normal((3,), float, rank, 0)
    check_wrapped(lambda wrap: wrap(f), x, WRAPS, comm)


@needs_new_jax
@pytest.mark.ranks(2)
def test_functions_of_constants(comm, rank, size):
    """Functions whose operands are constants on one rank, or that have none: they are differentiated all the same."""

    def f(x, wrap):
        take = wrap(lambda: jaxmpi.recv(jnp.zeros(2), 0, tag=1))
        take_more = wrap(lambda t: lax.scan(lambda c, _: (c + jaxmpi.recv(t, 0, tag=2), None), t, None, length=3)[0])
        branch = wrap(lambda k, t: lax.cond(k > 0, lambda t: jaxmpi.bcast(t, 0), lambda t: t, t))
        if rank == 0:
            for other in range(1, size):
                jaxmpi.send(x, other, tag=1)
                for k in range(3):
                    jaxmpi.send(x**k, other, tag=2)
            got = x
        else:
            got = take() + take_more(jnp.zeros(2)) ** 2
        return got * branch(1, x if rank == 0 else jnp.zeros(2))

    x = normal((2,), float, rank, 0)
    check_wrapped(lambda wrap: lambda x: f(x, wrap), x, WRAPS, comm, ways=[jaxmpi.jit])


@needs_new_jax
@pytest.mark.ranks(2)
def test_messages_of_derivatives_have_tags_of_their_own(comm, rank, size):
    """Tangents that nobody receives are never taken for a message."""
    if rank == 0:
        jax.jvp(lambda x: jaxmpi.send(x, 1, tag=4, comm=comm), (jnp.ones(3),), (jnp.full(3, 7.0),))
        jaxmpi.send(jnp.full(3, 2.0), 1, tag=4, comm=comm)
    if rank == 1:
        np.testing.assert_array_equal(jaxmpi.recv(jnp.zeros(3), 0, tag=4, comm=comm), np.ones(3))
        np.testing.assert_array_equal(jaxmpi.recv(jnp.zeros(3), 0, tag=4, comm=comm), np.full(3, 2.0))
        comm.Recv(np.empty(3), 0)


# --- reductions that are not linear ---------------------------------------------------------------------------------

OPS = {"MAX": MPI.MAX, "MIN": MPI.MIN, "PROD": MPI.PROD, "SUM": MPI.SUM}
REDUCTIONS = {name: REDUCING[name] for name in ("allreduce", "iallreduce", "reduce", "scan")}
"""The functions whose derivatives are tested here for each op of OPS; tests/operations/test_by_counts.py has others."""


@rows("names", REDUCTIONS)
def test_derivatives_of_reductions(names, comm, rank, size):
    """PROD with one zero, and two zeros, among the factors."""
    zeros = jnp.asarray([rank != 0, rank != size - 1, rank not in (0, size - 1), 1.0])
    x, z = normal((4,), float, rank, 0), normal((4,), complex, rank, 0)
    maps = []
    for name in names:
        for op in OPS:
            for root in [size - 1] if name == "reduce" else [0]:
                f = lambda x, name=name, op=op, root=root: REDUCTIONS[name](x, OPS[op], comm, root)  # noqa: E731
                points = {"": x, "with zeros": x * zeros, "complex": z} if op == "PROD" else {"": x}
                maps += [Map(f"{name} {op} {root} {p}", f, x, 1e-12, name in REPLICATED) for p, x in points.items()]
    check_all(maps, comm)


@rows("ops", ["MAX", "MIN"])
def test_ties_share(ops, comm, rank, size):
    x, t = jnp.ones(2), jnp.full(2, 1.0 + rank)

    def derivatives(x, t, op):
        gradient = jax.grad(lambda x: jnp.sum(jaxmpi.allreduce(x, OPS[op])))(x)
        _, of_scan = jax.jvp(lambda x: jaxmpi.scan(x, OPS[op]), (x,), (t,))
        _, of_reduce = jax.jvp(lambda x: jaxmpi.reduce(x, OPS[op], 0), (x,), (t,))
        return gradient, of_scan, of_reduce

    found = jax.jit(lambda x, t: [derivatives(x, t, op) for op in ops])(x, t)
    means = (1 / size, np.mean(1.0 + np.arange(rank + 1)), np.mean(1.0 + np.arange(size)) if rank == 0 else 1.0 + rank)
    for op, values in zip(ops, found, strict=True):
        np.testing.assert_allclose(values, np.repeat(means, 2).reshape(3, 2), rtol=1e-14, err_msg=op)


def test_extreme_that_is_no_number(rank):
    x = jnp.asarray([jnp.nan, 1.0 + rank])
    gradient = jax.grad(lambda x: jnp.sum(jaxmpi.allreduce(x, MPI.MAX)))(x)
    assert np.isnan(gradient[0])
    assert not np.isnan(gradient[1])


def test_reductions_keep_their_dtype(comm, rank):
    calls = [(name, op, dtype) for name in REDUCTIONS for op in OPS for dtype in ("bfloat16", "float32")]

    def tangent(x, name, op):
        return jax.jvp(lambda x: REDUCTIONS[name](x, OPS[op], comm, 0), (x,), (jnp.ones_like(x),))

    xs = [jnp.full(2, 1 + rank, dtype) for _, _, dtype in calls]
    found = jax.jit(lambda xs: [tangent(x, *call[:2]) for x, call in zip(xs, calls, strict=True)])(xs)

    def kept(row):
        (_, _, dtype), (y, tangent) = row
        assert tangent.dtype == y.dtype == jnp.dtype(dtype)
        assert np.isfinite(np.asarray(tangent, np.float32)).all()

    each(list(zip(calls, found, strict=True)), kept, lambda row: " ".join(row[0]))


@needs_new_jax
def test_no_derivative(comm):
    own = MPI.Op.Create(lambda a, b, t: None, commute=True)
    with pytest.raises(NotImplementedError, match=r"MPI\.SUM.*MPI\.PROD.*MPI\.MAX"):
        jax.grad(lambda x: jaxmpi.allreduce(x, own))(1.0)
    own.Free()


# --- higher order ---------------------------------------------------------------------------------------------------


def parts(arrays):
    """Where each array lies in the vector of all."""
    return [slice(*ends) for ends in itertools.pairwise(np.cumsum([0, *map(np.size, arrays)]))]


def jacobian(case, root, comm):
    """That of all ranks, of entries of shape (2,), by NumPy; the columns and the rows of each rank."""
    xs = [np.zeros(case.shape((2,), r, comm.size, root)) for r in range(comm.size)]
    results = lambda: [np.ravel(case.expected(xs, r, root)) for r in range(comm.size)]  # noqa: E731
    columns = []
    for x in xs:
        for k in range(x.size):
            x.flat[k] = 1
            columns.append(np.concatenate(results()))
            x.flat[k] = 0
    return np.stack(columns, axis=1), parts(xs), parts(results())


@rows("cases", FEWER)
def test_second_derivatives(cases, comm, rank, size):
    """Forward over reverse and reverse over reverse, against the Hessian of the sum of squared sines over the ranks."""
    root = size - 1
    tables = [jacobian(case, root, comm) for case in cases]
    shapes = [[case.shape((2,), r, size, root) for r in range(size)] for case in cases]
    points = [[[normal(s, float, r, seed) for r, s in enumerate(of)] for seed in range(2)] for of in shapes]

    def products(xs, vs):
        found = []
        for case, x, v in zip(cases, xs, vs, strict=True):
            f = lambda x, case=case: jnp.sum(jnp.sin(case.call(x, comm, root)) ** 2)  # noqa: E731
            gradient, forward = jax.jvp(jax.grad(f), (x,), (v,))
            found.append((gradient, forward, jax.vjp(jax.grad(f), x)[1](v)[0]))
        return found

    found = jax.jit(products)(*([p[seed][rank] for p in points] for seed in range(2)))

    def same(row):
        case, (j, columns, lines), (xs, vs), (gradient, forward, reverse) = row
        if case.name in REPLICATED:
            j = j[lines[0]]
        x, v = (np.concatenate([np.ravel(part) for part in of]) for of in (xs, vs))
        mine = columns[rank]
        np.testing.assert_allclose(np.ravel(gradient), (j.T @ np.sin(2 * j @ x))[mine], rtol=1e-10, atol=1e-12)
        expected = (j.T @ (2 * np.cos(2 * j @ x) * (j @ v)))[mine]
        np.testing.assert_allclose(np.ravel(forward), expected, rtol=1e-10, atol=1e-12)
        if case.name not in REPLICATED:  # whose gradient is no Jacobian of stacked vectors
            np.testing.assert_allclose(np.ravel(reverse), expected, rtol=1e-10, atol=1e-12)

    each(list(zip(cases, tables, points, found, strict=True)), same, lambda row: str(row[0]))


@rows("ops", ["PROD", "MAX"])
def test_second_derivatives_of_reductions(ops, comm, rank, size):
    x = normal((3,), float, rank, 0).at[0].multiply(rank != 0)
    v = normal(x.shape, float, rank, 1)
    xs, vs = (jnp.asarray(comm.allgather(np.asarray(array))) for array in (x, v))
    witnesses = {
        "PROD": (lambda xs: jnp.prod(xs, axis=0), lambda xs: jnp.cumprod(xs, axis=0)),
        "MAX": (lambda xs: jnp.max(xs, axis=0), lambda xs: lax.cummax(xs, axis=0)),
    }

    def derivatives(f, x, v):
        return jax.jvp(jax.grad(lambda x: jnp.sum(f(x) ** 2)), (x,), (v,))

    def ours(x, v):
        calls = [
            (lambda x, op=op: jaxmpi.allreduce(x, OPS[op]), lambda x, op=op: jaxmpi.scan(x, OPS[op])) for op in ops
        ]
        return [derivatives(f, x, v) for pair in calls for f in pair]

    theirs = jax.jit(lambda xs, vs: [derivatives(f, xs, vs) for op in ops for f in witnesses[op]])(xs, vs)
    for call in (jax.jit(ours), ours):
        for got, wanted in zip(jax.tree.leaves(call(x, v)), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(got, wanted[rank], rtol=1e-10, atol=1e-12)


@rows("cases", FEWER)
def test_jacobians(cases, comm, rank, size):
    """jacfwd maps over the columns on all ranks at once: of the sum over the ranks of their columns with one number;
    jacrev over rows. Where ranks have other numbers of them, neither is a Jacobian."""
    tables = [jacobian(case, 0, comm) for case in cases]
    alike = lambda of: len({part.stop - part.start for part in of}) == 1  # noqa: E731
    forward, reverse = ([alike(table[i]) for table in tables] for i in (1, 2))
    xs = [normal(case.shape((2,), rank, size, 0), float, rank, 0) for case in cases]

    def jacobians(xs):
        found = []
        for case, x, columns, lines in zip(cases, xs, forward, reverse, strict=True):
            f = lambda x, case=case: case.call(x, comm, 0)  # noqa: E731
            found.append((jax.jacfwd(f)(x) if columns else None, jax.jacrev(f)(x) if lines else None))
        return found

    def same(row):
        case, (j, columns, lines), (of_columns, of_lines) = row
        if of_columns is not None:
            mine = sum(j[lines[rank], part] for part in columns)
            np.testing.assert_allclose(np.reshape(of_columns, mine.shape), mine, rtol=1e-12)
        if of_lines is not None:
            mine = sum(j[part, columns[rank]] for part in lines) / (size if case.name in REPLICATED else 1)
            np.testing.assert_allclose(np.reshape(of_lines, mine.shape), mine, rtol=1e-12)

    each(list(zip(cases, tables, jax.jit(jacobians)(xs), strict=True)), same, lambda row: str(row[0]))


@needs_new_jax
def test_mapped_derivatives_that_one_rank_does_not_need(comm, rank, size):
    """vmap of derivatives of a function whose result one rank does not use, and of one where it is a constant. jacrev
    maps a cotangent that on other ranks is a zero nobody has asked for."""

    def f(x):
        y = jaxmpi.bcast(x, 0)
        return jnp.sum(jnp.sin(y) * x) if rank == size - 1 else jnp.sum(x**3)

    xs = normal((4, 3), float, rank, 0)
    derivatives = (
        jax.grad(f),
        jax.hessian(f),
        jax.jacrev(lambda x: (jaxmpi.bcast(x, 0) ** 2, x)[int(rank < size - 1)]),
        jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2)),
        lambda x: jax.jvp(jax.grad(f), (x,), (x,))[1],
    )
    one = jax.jit(lambda x: [g(x) for g in derivatives])
    for found, *expected in zip(
        jax.jit(lambda xs: [jax.vmap(g)(xs) for g in derivatives])(xs), *map(one, xs), strict=True
    ):
        np.testing.assert_allclose(found, jnp.stack(expected), rtol=1e-12)

    def h(z, y, x):
        return jaxmpi.bcast(x * 2 if rank == 0 else jnp.zeros(2), 0) + z + y

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


@needs_new_jax
@rows("places", INSIDE)
def test_second_tangents_of_an_extreme_whose_operand_differs(places, comm, rank, size):
    """The operand is nonlinear on rank 0 alone, so there alone its tangent has a tangent. `vmap` maps directions."""
    x, directions = jnp.array([0.5, 2.0]), jnp.arange(1.0, 7.0).reshape(3, 2)
    others = {"constant": jnp.ones_like, "linear": lambda x: x}
    extremes = {"MIN": (MPI.MIN, jnp.minimum), "MAX": (MPI.MAX, jnp.maximum)}

    def second(f):
        along = lambda f, v: lambda x: jax.jvp(f, (x,), (v,))[1]  # noqa: E731
        return jax.vmap(lambda v: along(along(f, v), v)(x))(directions)

    def ours(inside, op, other):
        f = INSIDE[inside](lambda y: jaxmpi.allreduce(y, extremes[op][0]))
        return second(lambda x: f(x**2 if rank == 0 else others[other](x)) + 0 * x)

    def theirs(op, other):
        return second(lambda x: extremes[op][1](x**2, others[other](x)) if size > 1 else x**2)

    pairs = (("MIN", "constant"), ("MAX", "linear"))
    calls = [(inside, *pairs[list(INSIDE).index(inside) % 2]) for inside in places]
    expected = jax.jit(lambda: {(op, other): theirs(op, other) for op in extremes for other in others})()

    def same(row):
        np.testing.assert_allclose(row[1], expected[row[0][1:]], rtol=1e-12)

    found = jax.jit(lambda: [ours(*call) for call in calls])()
    each(list(zip(calls, found, strict=True)), same, lambda row: " ".join(row[0]))


# --- control flow and solvers ---------------------------------------------------------------------------------------


@rows("cases", FEWER)
def test_scan_of_50_steps(cases, comm, rank, size):
    """Of all operations in one step, apart where the result counts once."""
    maps = []
    for replicated in (False, True):
        chosen = [case for case in cases if (case.name in REPLICATED) == replicated]
        xs = [normal(case.shape((2,), rank, size, 0), float, rank, 0) for case in chosen]

        def f(xs, wrap, chosen=chosen):
            def step(carry, k):
                results = [case.call(x * jnp.cos(k), comm, 0) for case, x in zip(chosen, xs, strict=True)]
                return [c + jnp.sum(jnp.sin(y)) / 100 for c, y in zip(carry, results, strict=True)], None

            return lax.scan(wrap(step), [0.0] * len(chosen), jnp.arange(50.0))[0]

        for name in ("plain", "checkpoint")[replicated:]:
            wrapped = lambda xs, f=f, wrap=WRAPS[name]: f(xs, wrap)  # noqa: E731
            expected = None if replicated or name == "plain" else len(maps) - 1
            maps.append(Map(f"{name} {replicated}", wrapped, xs, 1e-10, replicated, expected))
    check_all(maps, comm)


@needs_new_jax
def test_checkpoint_of_complex_numbers(comm, rank, size):
    """What is kept of them is used by the rest, in a scan too, beside real numbers."""
    x = jnp.arange(3.0) / 4 + 1j * (1 + rank)

    def f(z):
        y, r = jaxmpi.allreduce((z, jnp.real(z)), MPI.SUM, comm=comm)
        return jnp.sum(jnp.real(jnp.sin(y) * jnp.cos(r) * jaxmpi.sendrecv(z, z, (rank - 1) % size, (rank + 1) % size)))

    def looped(f):
        return lambda z: jax.lax.scan(lambda c, _: (c + f(z), None), 0.0, None, length=2)[0]

    everything = jax.checkpoint_policies.everything_saveable
    wraps = [EAGER, jax.checkpoint, lambda f: jax.checkpoint(f, policy=everything)]
    found = jaxmpi.jit(lambda x: [jax.grad(around(w(f)))(x) for around in (EAGER, looped) for w in wraps])(x)
    for expected, *others in (found[:3], found[3:]):
        np.testing.assert_allclose(others, np.stack([expected] * 2), rtol=2e-5)


def test_checkpoints_around_loops_and_in_them(comm, rank, size):
    """What a step communicates is the same in each step, so JAX would move it out of the loop."""

    def step(c):
        return jnp.sin(jaxmpi.bcast(c if rank == 0 else jnp.ones(2), 0))

    def looped(step):
        return lambda x: jnp.sum(jax.checkpoint(lambda x: lax.scan(lambda c, _: (step(c) * x, None), x, None, 3)[0])(x))

    x = normal((2,), float, rank, 0)
    wraps = {
        **WRAPS,
        "jit of checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
        "checkpoint of jit": lambda f: jax.checkpoint(jax.jit(f)),
    }
    fs = [lambda x: jnp.sum(step(step(step(x) * x) * x) * x), *(looped(wrap(step)) for wrap in wraps.values())]
    expected, *found = jax.jit(lambda x: [jax.value_and_grad(f)(x) for f in fs])(x)
    for name, values in zip(wraps, found, strict=True):
        for got, wanted in zip(values, expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-12, err_msg=name)


@needs_new_jax
@pytest.mark.ranks(2)
def test_pair_in_checkpoints(comm, rank, size):
    def pair(x):
        if rank == 0:
            jaxmpi.send(x, 1, tag=2)
            return jaxmpi.recv(jnp.zeros(3), 1, tag=3)
        if rank == 1:
            y = jaxmpi.recv(jnp.zeros(3), 0, tag=2)
            jaxmpi.send(jnp.sin(x) * y, 0, tag=3)
            return y
        return x

    def f(wrap):
        return jax.checkpoint(lambda x: lax.scan(lambda c, k: (wrap(pair)(c) * k, None), x, jnp.arange(1.0, 4.0))[0])

    x = normal((3,), float, rank, 0)
    check_wrapped(f, x, {name: WRAPS[name] for name in ("plain", "checkpoint")}, comm)


def test_cond_and_while(comm, rank, size):
    """Of what depends on something on all ranks, and of a constant on all ranks but one."""
    x, v = normal((3,), float, rank, 0), normal((3,), float, rank, 1)

    def branches(x):
        return lax.cond(x.size > 2, lambda x: jaxmpi.scan(x, MPI.SUM), lambda x: x, x)

    def loop(start):
        return lax.while_loop(
            lambda c: c[1] < 3, lambda c: (jnp.sin(jaxmpi.scan(c[0], MPI.SUM)), c[1] + 1), (start, 0)
        )[0]

    check(branches, x, comm)
    for f in (loop, lambda x: loop(x if rank == 0 else jnp.ones(3)) + 0 * x):
        near = [*map(jax.jit(f), (x, x + 1e-6 * v, x - 1e-6 * v))]
        for way in (EAGER, jax.jit):
            value, tangent = way(lambda x, v, f=f: jax.jvp(f, (x,), (v,)))(x, v)
            np.testing.assert_allclose(value, near[0], rtol=1e-12)
            np.testing.assert_allclose(tangent, (near[1] - near[2]) / 2e-6, rtol=1e-6, atol=1e-8)
            np.testing.assert_allclose(way(lambda x, v, f=f: jax.linearize(f, x)[1](v))(x, v), tangent, rtol=1e-12)


def distributed_solve(a, b, comm, iterations):
    """Solves A A' u + u = b for the rows of A that are spread over the ranks, by conjugate gradients."""

    def matvec(u):
        return u + jaxmpi.allreduce(a.T @ (a @ u), MPI.SUM, comm=comm)

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
    a, b = normal((4, 5), float, rank, 0), normal((5,), float, 0, 1)

    def loss(a, b):
        return jnp.sum(distributed_solve(a, b, comm, 50) ** 3)

    everything = jnp.asarray(np.concatenate(comm.allgather(np.asarray(a))))

    def dense(rows, b):
        return jnp.sum(jnp.linalg.solve(jnp.eye(5) + rows.T @ rows, b) ** 3)

    expected_a, expected_b = jax.jit(jax.grad(dense, argnums=(0, 1)))(everything, b)
    of_a, of_b = jaxmpi.jit(jax.grad(loss, argnums=(0, 1)))(a, b)
    np.testing.assert_allclose(of_a, expected_a[4 * rank : 4 * rank + 4], rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(of_b, expected_b, rtol=1e-8, atol=1e-12)

    def memory(iterations):
        gradient = jax.jit(jax.grad(lambda a, b: jnp.sum(distributed_solve(a, b, comm, iterations) ** 3)))
        return gradient.lower(a, b).compile().memory_analysis().temp_size_in_bytes

    assert memory(10) == memory(10_000), "memory does not grow with the iterations"


@needs_new_jax
def test_constants_in_what_is_transposed(comm, rank, size):
    """linear_transpose of operations whose operand, a template or not, depends on nothing on all ranks but one."""
    x = normal((size, 2), float, rank, 0)

    def f(x):
        operand = x if rank == 0 else jnp.zeros((size, 2))
        return {name: operation(operand) for name, operation in between_ranks(rank, size).items()}

    @jax.jit
    def transposes(x):
        y, pull = jax.vjp(f, x)
        w = {
            name: jnp.cos(jnp.arange(leaf.size) + rank + i).reshape(leaf.shape)
            for i, (name, leaf) in enumerate(y.items())
        }
        return pull(w)[0], [jax.linear_transpose(wrap(f), x)(w)[0] for wrap in WRAPS.values()]

    pulled, transposed = transposes(x)
    for name, found in zip(WRAPS, transposed, strict=True):
        np.testing.assert_allclose(found, pulled, rtol=1e-12, err_msg=name)


@needs_new_jax
def test_constants_in_loops_that_are_transposed(rank):
    """Refused before anything is sent; on one rank alone here, as no other one has to know."""
    loops = {
        "scan": lambda f, x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
        "while": lambda f, x: lax.while_loop(lambda s: s[1] < 2, lambda s: (f(s[0]), s[1] + 1), (x, 0))[0],
        "cond": lambda f, x: lax.cond(jnp.asarray(True), f, lambda x: x, x),
    }

    def refused(name):
        f = lambda x: x + jaxmpi.recv(jnp.zeros(3), 0, tag=1)  # noqa: E731
        with pytest.raises(NotImplementedError, match=r"recv cannot be transposed.*0 \* x"):
            jax.linear_transpose(lambda x: loops[name](f, x), jnp.ones(3))(jnp.ones(3))

    each(loops if rank == 0 else [], refused)


# --- replicated values ----------------------------------------------------------------------------------------------


def test_replicate(comm, rank, size):
    """A replicated parameter, used differently on each rank: the gradient is that of the whole, on all ranks."""
    data = np.arange(5.0) + rank
    everything = np.concatenate([np.arange(5.0) + r for r in range(size)])

    def loss(w):
        w = jaxmpi.replicate(w)
        return jaxmpi.allreduce(jnp.sum(jnp.sin(w * data)), MPI.SUM)

    for way in (EAGER, jaxmpi.jit):
        value, gradient = way(jax.value_and_grad(loss))(0.3)
        np.testing.assert_allclose(value, np.sum(np.sin(0.3 * everything)))
        np.testing.assert_allclose(gradient, np.sum(everything * np.cos(0.3 * everything)))
    second = jax.jit(jax.grad(jax.grad(loss)))(0.3)
    np.testing.assert_allclose(second, -np.sum(everything**2 * np.sin(0.3 * everything)))
    tree = jaxmpi.replicate({"w": jnp.ones(2), "b": 1.0})
    np.testing.assert_array_equal(tree["w"], np.ones(2))


@needs_new_jax
def test_replicate_of_what_one_rank_alone_uses_or_differentiates(comm, rank, size):
    pick = lambda u, w: u * 3 if rank == 0 else 0.0 * w  # noqa: E731
    unused = lambda w: jaxmpi.allreduce(pick(jaxmpi.replicate(w), w), MPI.SUM)  # noqa: E731
    assert jax.grad(unused)(2.0) == 3
    constant = lambda w: jaxmpi.allreduce(jaxmpi.replicate(2.0 if rank else w) * w, MPI.SUM)  # noqa: E731
    np.testing.assert_allclose(jax.grad(constant)(3.0), 3.0 * (1 + size) if rank == 0 else 2.0)


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


def test_invariant(comm, rank, size):
    """What every rank has been sent, and a loss of it that every rank computes: the derivatives of one loss, not N.
    `allreduce` of a sum with its convention is the sum whose derivative is the true adjoint, then `invariant`."""
    x, v = normal((2, 3), float, rank, 0), normal((2, 3), float, rank, 1)
    xs, vs = (jnp.asarray(comm.allgather(np.asarray(array))) for array in (x, v))
    one = lambda y: one_loss(jaxmpi.invariant(y).reshape(-1, 3))  # noqa: E731
    of_sum = lambda xs: one_loss(jnp.sum(jnp.sin(xs), axis=0))  # noqa: E731
    pairs = {
        "allgather": (lambda x: one(jaxmpi.allgather(x)), lambda xs: one_loss(xs.reshape(-1, 3))),
        **{
            f"bcast {r}": (lambda x, r=r: one(jaxmpi.bcast(x, r)), lambda xs, r=r: one_loss(xs[r]))
            for r in (0, size - 1)
        },
        "conventional sum": (lambda x: one_loss(jaxmpi.allreduce(jnp.sin(x), MPI.SUM)), of_sum),
        "true sum": (lambda x: one(jnp.sum(jaxmpi.allgather(jnp.sin(x)), axis=0)), of_sum),
    }

    @jax.jit
    def witnesses(xs, vs):
        return [(whole(xs), *jax.jvp(jax.grad(whole), (xs,), (vs,))) for _, whole in pairs.values()]

    expected = witnesses(xs, vs)

    def same(row):
        _, (value, gradient, *products), (of_all, first, second) = row
        np.testing.assert_allclose(value, of_all, rtol=1e-12)
        np.testing.assert_allclose(gradient, first[rank], rtol=1e-10)
        for product in products:
            np.testing.assert_allclose(product, second[rank], rtol=1e-10)

    found = jaxmpi.jit(lambda x, v: [(f(x), *products_with_hessian(f, x, v)) for f, _ in pairs.values()])(x, v)
    each(list(zip(pairs, found, expected, strict=True)), same, lambda row: row[0])


@pytest.mark.parametrize("shape", [(3,), (2, 0)], ids=str)
def test_invariant_of_dtypes(shape, comm, rank, size):
    """The identity in forward mode, and each transpose's transpose; a transpose divides."""
    names = list(TOLERANCE)
    drawn = [[normal(shape, name, seed, seed) for seed in range(3)] for name in names]

    def everything(x, t, w):
        pull = jax.linear_transpose(jaxmpi.invariant, x)
        push = jax.linear_transpose(lambda w: pull(w)[0], w)
        again = jax.linear_transpose(lambda t: push(t)[0], t)
        return jax.jvp(jaxmpi.invariant, (x,), (t,)), (pull(w)[0], push(t)[0], again(w)[0])

    def same(row):
        name, (x, t, w), ((y, tangent), transposes) = row
        np.testing.assert_array_equal(y, x)
        np.testing.assert_array_equal(tangent, t)
        for got, expected in zip(transposes, (w / size, t, w / size), strict=True):
            assert got.dtype == jnp.dtype(name)
            assert got.shape == shape
            close = 4 * float(jnp.finfo(got.dtype).eps)
            np.testing.assert_allclose(np.asarray(got, complex), np.asarray(expected, complex), rtol=close)

    found = jax.jit(lambda drawn: [everything(*arrays) for arrays in drawn])(drawn)
    each(list(zip(names, drawn, found, strict=True)), same, lambda row: row[0])


def test_invariant_under_vmap_and_of_a_constant(comm, rank, size):
    """On one rank alone the constant depends on what is differentiated."""
    x = normal((4, 3), float, rank, 0)
    xs = jnp.asarray(comm.allgather(np.asarray(x)))
    loss = lambda x: one_loss(jaxmpi.invariant(jaxmpi.allgather(x)))  # noqa: E731
    expected = jax.jit(jax.vmap(jax.grad(one_loss), 1, 1))(xs)[rank]
    np.testing.assert_allclose(jaxmpi.jit(jax.vmap(jax.grad(loss)))(x), expected, rtol=1e-12)
    np.testing.assert_array_equal(jax.vmap(jaxmpi.invariant, 1, 1)(xs[0]), xs[0])
    y = 2.0 * jnp.ones(2)
    of_constant = lambda x: jnp.sum(jaxmpi.invariant(x if rank == 0 else y) ** 2) + 0 * jnp.sum(x)  # noqa: E731
    for jit in (jax.jit, jax.checkpoint):
        np.testing.assert_allclose(jax.grad(jit(of_constant))(y), 2 * y / size * (rank == 0), rtol=1e-12)


def test_invariant_of_a_pytree_and_integers(comm, rank, size):
    tree = {"w": jnp.arange(2.0), "n": jnp.arange(3), "on": jnp.asarray(True), "b": 1.0}
    same = jaxmpi.invariant(tree)
    assert jax.tree.structure(same) == jax.tree.structure(tree)
    for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == jnp.asarray(b).dtype
    assert jaxmpi.invariant is jaxmpi.invariant

    def loss(x):
        y = jaxmpi.invariant({**tree, "w": jaxmpi.allgather(x)})
        return jnp.sum(y["w"] * y["b"]) * jnp.sum(y["n"])

    np.testing.assert_allclose(jax.grad(loss)(jnp.ones(2)), np.full(2, 3.0))
    half = comm.Split(rank % 2, rank)
    (gradient,) = jax.vjp(lambda x: jaxmpi.invariant(x, comm=half), 1.0)[1](1.0)
    np.testing.assert_allclose(gradient, 1 / half.size)

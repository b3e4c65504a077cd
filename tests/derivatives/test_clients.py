"""Programs of other libraries whose functions communicate: diffrax, equinox, lineax, and JAX's own solvers.
docs/tutorial.md and examples/ have one of optax.

Each client is a scalar of what a rank has of its own and of what all ranks share. The witness is the same program on
the gathered arrays in one process, without MPI: its value, its gradient, and its derivative in one direction.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI

import jaxmpi
from support.derivatives import normal

pytestmark = pytest.mark.skipif(not os.environ.get("JAXMPI_TEST_CLIENTS"), reason="`make test-clients` runs these")

# Most of the time here goes into compiling.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
jax_jit, our_jit = (functools.partial(jit, compiler_options=QUICK) for jit in (jax.jit, jaxmpi.jit))


def total(x):
    """The sum of all elements of all ranks, of which every rank has a copy."""
    return jaxmpi.allreduce(jnp.sum(x), MPI.SUM)


def check_client(ours, theirs, shapes, comm, jit, where="everywhere", modes=("reverse", "forward"), rtol=1e-8):
    """`ours(own, shared)` on all ranks against `theirs(owns, shared)` in one process, value and derivatives.

    `shapes` are those of `own` and `shared`. Where `where` is "rank 0", that rank alone differentiates: on the others
    what is differentiated is not what the program is given, but a constant of the same value.
    """
    rank, size = comm.rank, comm.size
    (own, v), (owns, vs) = [
        [f(lambda r, seed=seed: normal(shapes[0], float, r, seed)) for seed in (0, 1)]
        for f in (lambda g: g(rank), lambda g: jnp.stack([g(r) for r in range(size)]))
    ]
    shared, u = normal(shapes[1], float, 0, 2), normal(shapes[1], float, 0, 3)
    if where == "rank 0":
        f = ours if rank == 0 else lambda _, shared: ours(own, shared)
        g = lambda x, shared: theirs(owns.at[0].set(x[0]), shared)  # noqa: E731
        one = lambda f: lambda x: f(x, shared)  # noqa: E731
        f, g, mine, everything, v, vs = one(f), one(g), (own,), (owns,), (v,), (vs,)
    else:
        f, g, mine, everything, v, vs = ours, theirs, (own, shared), (owns, shared), (v, u), (vs, u)
    argnums = tuple(range(len(mine)))
    if not modes:
        np.testing.assert_allclose(jit(f)(*mine), jax_jit(g)(*everything), rtol=rtol)
    if "reverse" in modes:
        value, (gradient, *of_shared) = jit(jax.value_and_grad(f, argnums))(*mine)
        expected, (gradients, *expected_of_shared) = jax_jit(jax.value_and_grad(g, argnums))(*everything)
        np.testing.assert_allclose(value, expected, rtol=rtol)
        np.testing.assert_allclose(gradient, gradients[rank], rtol=rtol, atol=rtol)
        for a, b in zip(of_shared, expected_of_shared, strict=True):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)
    if "forward" in modes:
        pair = jit(lambda x, v: jax.jvp(f, x, v))(mine, v)
        np.testing.assert_allclose(pair, jax_jit(lambda x, v: jax.jvp(g, x, v))(everything, vs), rtol=rtol)


# --- diffrax --------------------------------------------------------------------------------------------------------

CELLS = 3


def flow(t, u, parameters):
    """Diffusion on a ring of cells, of which each rank has a part, with a source."""
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    left, right = (rank - 1) % size, (rank + 1) % size
    before = jaxmpi.sendrecv(u[-1], u[-1], left, right)
    after = jaxmpi.sendrecv(u[0], u[0], right, left)
    ring = jnp.concatenate([before[None], u, after[None]])
    return parameters[0] * (ring[2:] - 2 * u + ring[:-2]) + parameters[1] * jnp.sin(u + t)


def flow_together(t, u, parameters):
    return parameters[0] * (jnp.roll(u, 1) - 2 * u + jnp.roll(u, -1)) + parameters[1] * jnp.sin(u + t)


def of_state(x):
    """Going back, BacksolveAdjoint has the state, its cotangent, and those of the parameters, of which a rank has a
    part: steps are chosen by the first two."""
    return x[:2] if isinstance(x, tuple) else x


def rms(x):
    """The root mean square over all ranks: each takes the same steps by it."""
    leaves = jax.tree.leaves(of_state(x))
    count = sum(leaf.size for leaf in leaves) * MPI.COMM_WORLD.size
    return jnp.sqrt(sum(total(leaf**2) for leaf in leaves) / count)


def rms_together(x):
    leaves = jax.tree.leaves(of_state(x))
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in leaves) / sum(leaf.size for leaf in leaves))


def of_flows(solver, adjoint, steps):
    diffrax = pytest.importorskip("diffrax")

    def solve(vector_field, norm, prepare, finish):
        controller = diffrax.ConstantStepSize()
        if steps == "controlled":
            controller = diffrax.PIDController(rtol=1e-4, atol=1e-6, norm=norm)
        term, options = diffrax.ODETerm(vector_field), {"adjoint": getattr(diffrax, adjoint)(), "max_steps": 32}
        options["stepsize_controller"] = controller

        def loss(start, parameters):
            start, parameters = start.reshape(-1), prepare(parameters)
            solver_ = getattr(diffrax, solver)()
            return finish(diffrax.diffeqsolve(term, solver_, 0.0, 1.0, 0.25, start, parameters, **options).ys ** 2)

        return loss

    ours = solve(flow, rms, jaxmpi.replicate, total)
    return ours, solve(flow_together, rms_together, lambda p: p, jnp.sum), ((CELLS,), (2,))


ADJOINTS = [
    ("Tsit5", "RecursiveCheckpointAdjoint", "controlled", our_jit, "everywhere", "reverse"),
    ("Tsit5", "RecursiveCheckpointAdjoint", "constant", jax_jit, "rank 0", "reverse"),
    ("Tsit5", "DirectAdjoint", "controlled", our_jit, "rank 0", "reverse"),
    ("Dopri5", "BacksolveAdjoint", "controlled", jax_jit, "everywhere", "reverse"),
    ("Dopri5", "BacksolveAdjoint", "constant", our_jit, "rank 0", "reverse"),
    ("Tsit5", "ForwardMode", "controlled", jax_jit, "rank 0", "forward"),
]


# --- equinox --------------------------------------------------------------------------------------------------------


def test_equinox_modules(comm, rank, size):
    """A module with functions among its leaves goes through operations as a whole: one step of training on the data of
    all ranks, inside filter_jit and filter_grad, against all of the data in one process."""
    equinox = pytest.importorskip("equinox")
    make = lambda seed: equinox.nn.MLP(2, 1, 4, 2, activation=jax.nn.relu, key=jax.random.key(seed))  # noqa: E731
    xs, ys = normal((size, 6, 2), float, 0, 0), normal((size, 6, 1), float, 0, 1)

    def loss(model, x, y):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    @equinox.filter_jit
    def step(model, x, y):
        def whole(model):
            return jaxmpi.allreduce(loss(jaxmpi.replicate(model), x, y), MPI.SUM) / size

        gradient = equinox.filter_grad(whole)(model)
        mean = jaxmpi.allreduce(equinox.filter_grad(loss)(model, x, y), MPI.SUM)
        mean = jax.tree.map(lambda g: g / size, mean)
        return equinox.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradient)), gradient, mean

    started = jaxmpi.bcast(make(rank), 0)
    expected = make(0)
    assert jax.tree.structure(started) == jax.tree.structure(expected)
    assert started.activation is expected.activation
    assert started(xs[0, 0]).shape == (1,)
    stepped, gradient, mean = step(started, xs[rank], ys[rank])
    right = equinox.filter_grad(loss)(expected, xs.reshape(-1, 2), ys.reshape(-1, 1))
    right_step = equinox.apply_updates(expected, jax.tree.map(lambda g: -0.1 * g, right))
    for found, its in ((started, expected), (gradient, right), (mean, right), (stepped, right_step)):
        arrays, others = (jax.tree.leaves(equinox.filter(tree, equinox.is_array)) for tree in (found, its))
        for x, y in zip(arrays, others, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-9)
    template = equinox.filter_eval_shape(make, 0)
    got = jaxmpi.sendrecv(make(rank), template, (rank - 1) % size, (rank + 1) % size)
    np.testing.assert_array_equal(got.layers[0].weight, make((rank - 1) % size).layers[0].weight)


# --- linear systems -------------------------------------------------------------------------------------------------


def matvec_of(rows, symmetric):
    """The matrix 1 + R' R, plus a part that is not symmetric, whose rows are spread over the ranks."""

    def matvec(u):
        u = u if symmetric else jaxmpi.replicate(u)
        image = u / MPI.COMM_WORLD.size + rows.T @ (rows @ u)
        if not symmetric:
            image = image + rows[0] * u[1]
        return jaxmpi.allreduce(image, MPI.SUM)

    return matvec


def solve_together(rows, b, symmetric):
    flat = rows.reshape(-1, rows.shape[-1])
    matrix = jnp.eye(b.size) + flat.T @ flat
    if not symmetric:
        matrix = matrix.at[:, 1].add(jnp.sum(rows[:, 0], axis=0))
    return jnp.linalg.solve(matrix, b)


def solve_by_lineax(solver, symmetric):
    lineax = pytest.importorskip("lineax")
    tags = (lineax.positive_semidefinite_tag, lineax.symmetric_tag) if symmetric else ()
    options = {"restart": 8} if solver == "GMRES" else {}
    method = getattr(lineax, solver)(rtol=1e-12, atol=1e-12, **options)

    def solve(rows, b):
        operator = lineax.FunctionLinearOperator(matvec_of(rows, symmetric), jax.eval_shape(lambda: b), tags)
        return lineax.linear_solve(operator, b, method).value

    return solve


def solve_by_jax(solver, symmetric):
    method = getattr(jax.scipy.sparse.linalg, solver)
    return lambda rows, b: method(matvec_of(rows, symmetric), b, tol=1e-13, atol=1e-13)[0]


SOLVERS = {
    **{name: (solve_by_lineax, name) for name in ("CG", "GMRES", "BiCGStab")},
    **{name: (solve_by_jax, name) for name in ("cg", "gmres", "bicgstab")},
}


def solvers_of(name):
    """The solver of a name, over all ranks, and in one process."""
    by, solver = SOLVERS[name]
    symmetric = name.lower() == "cg"
    return by(solver, symmetric), lambda rows, b: solve_together(rows, b, symmetric)


SHAPES = (2, 5), (5,)


def of_solves(name, function=jnp.sin):
    ours, theirs = ((lambda rows, b, f=f: jnp.sum(function(f(rows, b)))) for f in solvers_of(name))
    return ours, theirs, SHAPES


def of_solves_inside(name, wrap):
    """In a loop with other communication before and after, in a branch, mapped over right-hand sides."""

    def loss(solve, everyone):
        def steps(rows, b):
            def step(u, k):
                before = everyone(rows * k)
                u = solve(rows, u + before)
                return u + 0.1 * everyone(jnp.cos(rows)), None

            return jnp.sum(lax.scan(step, b, jnp.arange(3.0))[0])

        def branches(rows, b):
            return jnp.sum(lax.cond(b[0] < 1e3, solve, lambda rows, b: b, rows, b) ** 2)

        def mapped(rows, b):
            return jnp.sum(jnp.sin(jax.vmap(solve, (None, 0))(rows, jnp.stack([b, 2 * b, b**2]))))

        def kept(rows, b):
            return jnp.sum(jax.checkpoint(lambda rows, b: jnp.sin(solve(rows, jnp.cos(b))))(rows, b))

        return {"scan": steps, "cond": branches, "vmap": mapped, "checkpoint": kept}[wrap]

    ours, theirs = solvers_of(name)
    return loss(ours, total), loss(theirs, jnp.sum), SHAPES


@pytest.mark.parametrize("where", ["everywhere", "rank 0"])
@pytest.mark.parametrize(("name", "jit"), [("CG", our_jit), ("cg", jax_jit)], ids=["CG", "cg"])
def test_linear_solve_whose_matrix_depends_on_one_rank(name, jit, where, comm, rank):
    """The right-hand side depends on what is differentiated on all ranks, the matrix on rank 0 alone."""
    rows = normal((2, 5), float, rank, 7)
    others = jnp.stack([normal((2, 5), float, r, 7) for r in range(comm.size)])
    ours, theirs = solvers_of(name)

    def f(own, shared):
        return jnp.sum(jnp.sin(ours(own if rank == 0 else rows, shared + total(own))))

    def g(owns, shared):
        return jnp.sum(jnp.sin(theirs(others.at[0].set(owns[0]), shared + jnp.sum(owns))))

    check_client(f, g, SHAPES, comm, jit, where, rtol=1e-7)


# --- all of them ----------------------------------------------------------------------------------------------------

EAGER = lambda f: f  # noqa: E731
SOLVED = {"rtol": 1e-7}
CLIENTS = [
    *((of_flows, how, jit, where, {"modes": (mode,)}) for *how, jit, where, mode in ADJOINTS),
    *((of_solves, (name,), jax_jit, "everywhere", SOLVED) for name in ("CG", "BiCGStab", "gmres")),
    *((of_solves, (name,), our_jit, "rank 0", SOLVED) for name in ("CG", "GMRES", "cg", "bicgstab")),
    *((of_solves, (name, EAGER), EAGER, "everywhere", {"modes": (), **SOLVED}) for name in ("CG", "cg")),
    *((of_solves_inside, ("CG", wrap), our_jit, "everywhere", SOLVED) for wrap in ("scan", "cond", "vmap")),
    *((of_solves_inside, ("cg", wrap), jax_jit, "everywhere", SOLVED) for wrap in ("scan", "vmap", "checkpoint")),
]
"""What makes a client and the witness, and with what; how it is compiled, where it is differentiated, and how."""


def name_of(row):
    make, arguments, _, where, _ = row
    return "-".join([make.__name__, *(getattr(a, "__name__", str(a)) for a in arguments), where])


@pytest.mark.parametrize("client", CLIENTS, ids=name_of)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_client(client, comm):
    make, arguments, jit, where, options = client
    check_client(*make(*arguments), comm, jit, where, **options)

"""Rows that move to new owners: random ones against NumPy, derivatives, errors that no rank waits for."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from mpi4py import MPI

import jaxmpi
from support import drawing
from support.rows import each
from support.table import NEW_JAX, draw, dtype_of, raised

pytestmark = pytest.mark.usefixtures("own_errors")
needs_derivatives = pytest.mark.skipif(not NEW_JAX, reason="this JAX has no derivatives of communication")

DTYPES = ("float64", "float32", "bfloat16", "float8_e5m2", "complex64", "complex128", "int8", "uint8", "int16", "int64")
DTYPES = (*DTYPES, "uint32", "bool")
ROWS = ((), (1,), (3,), (0,), (2, 2))
WAYS = {"eager": lambda f: f, "jit": jax.jit, "jaxmpi.jit": jaxmpi.jit}


@dataclass(frozen=True)
class Case:
    """The owners of each rank's rows; what is beyond `counts` is padding, whose owners are nonsense."""

    owners: tuple
    padding: tuple
    leaves: tuple
    dtype: str
    counted: bool
    spare: int
    way: str

    def given(self, rank):
        return len(self.owners[rank]) + (self.padding[rank] if self.counted else 0)

    def tree(self, rank):
        arrays = [
            draw((self.given(rank), *row), dtype_of(dtype), rank, seed) for seed, (dtype, row) in enumerate(self.leaves)
        ]
        return {"a": arrays[:1], "b": tuple(arrays[1:])}

    def new_owner(self, rank):
        beyond = [99 - 200 * (i % 2) for i in range(self.given(rank) - len(self.owners[rank]))]
        return np.asarray([*self.owners[rank], *beyond]).astype(self.dtype)

    def received(self, rank):
        return [sum(owner == rank for owner in owners) for owners in self.owners]

    def room(self, rank):
        return sum(self.received(rank)) + self.spare

    def expected(self, trees, rank):
        """By NumPy: of each rank its rows for this one in their order, and zeros."""

        def leaf(*xs):
            whole, at = np.zeros((self.room(rank), *xs[0].shape[1:]), xs[0].dtype), 0
            for x, owners in zip(xs, self.owners, strict=True):
                for row, to in zip(x, owners, strict=False):
                    if to == rank:
                        whole[at], at = row, at + 1
            return whole

        return jax.tree.map(leaf, *trees)

    def call(self, tree, owner, comm):
        more = {"count": jnp.asarray(len(self.owners[comm.rank]), jnp.int16)} if self.counted else {}
        return jaxmpi.migrate(tree, owner, rows=self.room(comm.rank), comm=comm, **more)


def cases(size, dtypes=DTYPES, arrays=5):
    anyone = st.integers(-1, size - 1)
    each = st.one_of(st.just(()), st.lists(anyone, max_size=7).map(tuple))
    to_one = anyone.flatmap(lambda to: st.tuples(*[st.lists(st.just(to), max_size=5).map(tuple)] * size))
    nothing_moves = st.tuples(*[st.lists(st.just(r), max_size=4).map(tuple) for r in range(size)])
    leaf = st.tuples(st.sampled_from(dtypes), st.sampled_from(ROWS))
    return st.builds(
        Case,
        st.one_of(st.tuples(*[each] * size), to_one, nothing_moves),
        st.tuples(*[st.integers(0, 3)] * size),
        st.lists(leaf, min_size=1, max_size=arrays).map(tuple),
        st.sampled_from(["int32", "int8", "int64"]),
        st.booleans(),
        st.integers(0, 2),
        st.sampled_from(list(WAYS)),
    )


@pytest.mark.seconds(600)
def test_random_rows(comm, rank, size):
    def check(case):
        trees = [case.tree(r) for r in range(size)]
        tree, owner = jax.tree.map(jnp.asarray, (trees[rank], case.new_owner(rank)))
        moved, count, received = WAYS[case.way](lambda tree, owner: case.call(tree, owner, comm))(tree, owner)
        np.testing.assert_array_equal(received, case.received(rank))
        assert count == sum(case.received(rank))
        assert received.dtype == count.dtype == np.int32
        expected = case.expected(trees, rank)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), moved) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, moved), expected)

    drawing.on_all_ranks(comm, cases(size), check, 20)


def float_case(case, rank):
    return jax.tree.map(jnp.asarray, case.tree(rank)), jnp.asarray(case.new_owner(rank))


def dot(a, b):
    return float(sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)))


@needs_derivatives
@pytest.mark.seconds(600)
def test_random_adjoints(comm, rank, size):
    """Dot products, exact since all numbers are small integers; of the adjoint of the adjoint too."""

    def check(case):
        tree, owner = float_case(case, rank)
        numbers = lambda like, seed: jax.tree.map(  # noqa: E731
            lambda x: jnp.asarray(draw(x.shape, x.dtype, rank, seed)), like
        )
        u, w = numbers(tree, 50), numbers(jax.eval_shape(lambda tree: case.call(tree, owner, comm)[0], tree), 60)

        @WAYS[case.way]
        def everything(tree, u, w):
            f = lambda tree: case.call(tree, owner, comm)[0]  # noqa: E731
            y, pull = jax.vjp(f, tree)
            again = jax.linear_transpose(lambda w: pull(w)[0], y)(u)[0]
            return jax.jvp(f, (tree,), (u,))[1], pull(w)[0], again

        dy, back, again = everything(tree, u, w)
        forth, behind = comm.allreduce(np.asarray([dot(dy, w), dot(u, back)]))
        assert forth == behind
        jax.tree.map(np.testing.assert_array_equal, again, dy)

    drawing.on_all_ranks(comm, cases(size, ("float64", "float32"), 3), check, 8)


@needs_derivatives
def test_random_batches(comm, rank, size):
    """One of two leaves is mapped, along any axis; owners are not."""

    def check(case):
        trees = [case.tree(r) for r in range(size)]
        tree, owner = float_case(case, rank)
        first, *_ = tree["a"]
        at = len(case.owners) % (first.ndim + 1)
        batch = jnp.stack([first, 2 * first], axis=at)
        call = jax.vmap(lambda x: case.call({**tree, "a": [x]}, owner, comm)[0]["a"][0], in_axes=at)
        expected = case.expected(trees, rank)["a"][0]
        np.testing.assert_array_equal(call(batch), np.stack([expected, 2 * expected]))

    drawing.on_all_ranks(comm, cases(size, ("float64",), 2), check, 8)


def test_mapped_owners_are_refused(comm, size):
    """At once, on all ranks that do so."""
    owners = jnp.zeros((2, 3), jnp.int32)
    with pytest.raises(NotImplementedError, match=r"migrate: jax\.vmap maps an operand that says how to communicate"):
        jax.vmap(lambda owner: jaxmpi.migrate(jnp.arange(3.0), owner, rows=3 * size)[0])(owners)


def test_loop_over_steps(comm, rank, size):
    """Particles that walk through all ranks; none is lost, none is there twice, and padding never counts."""
    room, steps = 5 * size, 7

    def step(state, i):
        particles, n = state
        owner = (particles["label"] * (i + 1) + rank) % size
        particles, n, received = jaxmpi.migrate(particles, owner, count=n)
        particles["visits"] = particles["visits"].at[:, rank].add(1)
        return (particles, n), received

    @jaxmpi.jit
    def walk(particles, n):
        return jax.lax.scan(step, (particles, n), jnp.arange(steps))

    label = jnp.zeros(room, jnp.int32).at[:5].set(5 * rank + jnp.arange(5, dtype=jnp.int32))
    first = {"label": label, "visits": jnp.zeros((room, size)), "alive": jnp.arange(room) < 5}
    (particles, n), received = walk(first, jnp.int32(5))
    where, path = np.repeat(np.arange(size), 5), np.zeros((5 * size, size))
    for i in range(steps):
        where = (np.arange(5 * size) * (i + 1) + where) % size
        path[np.arange(5 * size), where] += 1
    labels = np.asarray(particles["label"])[: int(n)]
    assert sorted(labels) == list(np.flatnonzero(where == rank))
    np.testing.assert_array_equal(particles["visits"][: int(n)], path[labels])
    np.testing.assert_array_equal(particles["alive"], np.arange(room) < int(n))
    assert received.shape == (steps, size)
    assert comm.allreduce(int(n)) == 5 * size


# --- what goes wrong -------------------------------------------------------------------------------------------------


COMPILED_OR_NOT = ("eager", "jaxmpi.jit")


@pytest.mark.parametrize("way", COMPILED_OR_NOT)
def test_owner_that_is_no_rank(way, rank, size):
    """Of the last rank: an error on all of them, which names it, and the next call is right."""
    call = WAYS[way](lambda tree, owner: jaxmpi.migrate(tree, owner, rows=3 * size))
    tree = {"x": jnp.arange(3.0), "i": jnp.arange(3), "f": jnp.arange(3, dtype=jnp.float32)}

    def check(wrong):
        owner = jnp.asarray([0, wrong if rank == size - 1 else 0, 0])
        error = raised(lambda: call(tree, owner))
        assert f"jaxmpi.migrate on rank {rank} of {size}: rank {size - 1}" in error
        assert f"has passed a new owner of a row that is neither a rank, 0 to {size - 1}, nor -1" in error
        assert ("(this one)" in error) == (rank == size - 1)
        moved, _, received = call(tree, jnp.zeros(3, owner.dtype))
        np.testing.assert_array_equal(received, [3 if rank == 0 else 0] * size)
        assert float(moved["x"].sum()) == (3 * size if rank == 0 else 0)

    each([size, -2, 2**31 - 1, -(2**31), 2**40, -(2**40)], check)


def test_wide_owners_of_numpy(rank, size):
    """Which JAX may cut to 32 bits."""

    def check(wrong):
        assert "neither a rank" in raised(lambda: jaxmpi.migrate(jnp.ones(2), np.array([0, wrong]), rows=2 * size))

    with jax.enable_x64(False) if hasattr(jax, "enable_x64") else jax.experimental.disable_x64():
        each([2**32, 2**32 - 1, -5, 2**63 - 1], check)
        np.testing.assert_array_equal(jaxmpi.migrate(jnp.ones(2), np.array([0, -1]), rows=size)[1], size * (rank == 0))


OTHER = {
    "order": lambda a, b: (b, a),
    "dtype": lambda a, b: (a, b.astype(jnp.float32)),
    "shape": lambda a, b: (a, b.reshape(2, 2)),
    "names": lambda a, b: {"a": a, "b": b},
    "fewer": lambda a, b: (a,),
}


@pytest.mark.ranks(2)
def test_other_arrays_on_a_rank(rank, size):
    """All ranks raise, and the next call is right."""
    call = jax.jit(lambda tree, owner: jaxmpi.migrate(tree, owner, rows=2 * size))
    arrays, owner = (jnp.arange(2, dtype=jnp.int32), jnp.arange(4.0).reshape(2, 2, 1)), jnp.zeros(2, jnp.int32)

    def check(other):
        error = raised(lambda: call(OTHER[other](*arrays) if rank == 1 else arrays, owner))
        assert "has passed other arrays than this rank" in error or "the ranks differ" in error, error
        moved, _, received = call(arrays, owner)
        np.testing.assert_array_equal(received, [2 if rank == 0 else 0] * size)
        assert float(moved[1].sum()) == (6 * size if rank == 0 else 0)

    each(OTHER, check)


@pytest.mark.parametrize("dtype", ["uint8", "uint64"])
def test_unsigned_owners(dtype, rank, size):
    """The largest is not -1."""
    owner = np.full(2, size - 1, dtype)
    received = jaxmpi.migrate(jnp.ones(2), owner, rows=2 * size)[2]
    np.testing.assert_array_equal(received, [2 * (rank == size - 1)] * size)
    owner[0] = np.iinfo(dtype).max
    assert "neither a rank" in raised(lambda: jaxmpi.migrate(jnp.ones(2), owner, rows=2 * size))


@pytest.mark.parametrize("way", COMPILED_OR_NOT)
def test_impossible_count(way, rank, size):
    call = WAYS[way](lambda x, count: jaxmpi.migrate(x, jnp.zeros(3, jnp.int32), rows=3 * size, count=count))

    def check(wrong):
        error = raised(lambda: call(jnp.arange(3.0), jnp.asarray(wrong if rank == 0 else 1)))
        assert f"jaxmpi.migrate on rank {rank} of {size}: rank 0" in error
        assert "has passed a count of rows that is negative, or" in error
        np.testing.assert_array_equal(call(jnp.arange(3.0), jnp.asarray(1))[2], [rank == 0] * size)

    each([-1, 4, 2**31 - 1, -(2**40)], check)


@pytest.mark.parametrize(("short", "way"), [(0, "jaxmpi.jit"), (-1, "eager")], ids=["first", "last"])
def test_one_rank_has_too_little_room(short, way, rank, size):
    """An error there; the others have their rows, and what follows is right."""
    short = range(size)[short] == rank
    x = jnp.arange(2.0 * size) + 100 * rank
    owner = jnp.repeat(jnp.arange(size), 2)
    tree = {"x": x, "i": x.astype(jnp.int32), "flag": x > 3, "f": x.astype(jnp.float32)}
    call = WAYS[way](lambda tree: jaxmpi.migrate(tree, owner, rows=2 * size - short))
    if short:
        text = f"rows sent to this rank: {2 * size}; its result has room for {2 * size - 1}"
        with pytest.raises(jax.errors.JaxRuntimeError, match=rf"jaxmpi\.migrate on rank {rank} of {size}: {text}"):
            jax.block_until_ready(call(tree))
    else:
        moved, *_ = call(tree)
        expected = (100 * np.arange(size)[:, None] + 2 * rank + np.arange(2)).ravel()
        for name, x in tree.items():
            wanted = expected > 3 if name == "flag" else expected.astype(x.dtype)
            np.testing.assert_array_equal(moved[name], wanted)
    y = jaxmpi.alltoallv(jnp.full(size, 7.0 + rank), [1] * size, [1] * size)
    np.testing.assert_array_equal(y, 7.0 + np.arange(size))


@pytest.mark.alone
def test_wrong_arguments():
    x, owner = jnp.arange(3.0), jnp.zeros(3, jnp.int32)
    for error, text, call in [
        (TypeError, "new_owner must be integers", lambda: jaxmpi.migrate(x, x)),
        (TypeError, "new_owner must be integers", lambda: jaxmpi.migrate(x, x > 1)),
        (ValueError, r"new_owner must be of shape \(3,\), a rank for each row of tree", lambda: jaxmpi.migrate(x, 0)),
        (ValueError, r"got shape \(2,\)", lambda: jaxmpi.migrate(x, owner[:2])),
        (ValueError, r"tree\['b'\] has 2 rows and tree\['a'\] 3", lambda: jaxmpi.migrate({"a": x, "b": x[:2]}, owner)),
        (ValueError, "tree is a scalar", lambda: jaxmpi.migrate(jnp.float32(1), owner)),
        (ValueError, "rows must be between 0", lambda: jaxmpi.migrate(x, owner, rows=-1)),
        (TypeError, "rows must be known", lambda: jax.jit(lambda n: jaxmpi.migrate(x, owner, rows=n))(3)),
        (ValueError, "count must be a scalar", lambda: jaxmpi.migrate(x, owner, count=owner)),
        (TypeError, "count must be", lambda: jaxmpi.migrate(x, owner, count=2.0)),
        (TypeError, "count must be integers, got dtype bool", lambda: jaxmpi.migrate(x, owner, count=x[0] < 1)),
        (TypeError, "tree is None", lambda: jaxmpi.migrate(None, owner)),
        (TypeError, "dtype float0", lambda: jaxmpi.migrate(np.zeros(3, jax.dtypes.float0), owner)),
    ]:
        with pytest.raises(error, match=text):
            call()


# --- other arrays ----------------------------------------------------------------------------------------------------


def test_no_arrays(rank, size):
    """Of an empty pytree, and of rows without elements, counts are told, and what is wrong with the rows is found."""
    tree, count, received = jaxmpi.migrate({"x": jnp.zeros((3, 0))}, (jnp.arange(3) + rank) % size, rows=4 * size)
    assert tree["x"].shape == (4 * size, 0)
    assert "room for 2" in raised(lambda: jaxmpi.migrate(jnp.zeros((3, 0)), jnp.full(3, rank), rows=2)[1])
    tree, count, received = jaxmpi.migrate({}, (jnp.arange(3) + rank) % size)
    assert tree == {}
    assert count == received.sum()
    assert int(jaxmpi.allreduce(count, MPI.SUM)) == 3 * size
    for which in (1, 2):  # the error is that of each result
        too_many = raised(lambda which=which: jaxmpi.migrate({}, jnp.zeros(3, int), rows=2)[which])
        assert ("room for 2" in too_many) == (rank == 0)
        assert "neither a rank" in raised(lambda which=which: jaxmpi.migrate({}, jnp.full(3, size))[which])


def test_random_keys(rank, size):
    keys = jax.random.split(jax.random.key(rank), 3)
    tree = {"key": keys, "i": jnp.arange(3), "b": jnp.arange(3) > 1}
    moved, *_ = jaxmpi.jit(lambda tree: jaxmpi.migrate(tree, jnp.zeros(3, jnp.int32), rows=3 * size))(tree)
    if rank == 0:
        expected = jnp.concatenate([jax.random.key_data(jax.random.split(jax.random.key(r), 3)) for r in range(size)])
        np.testing.assert_array_equal(jax.random.key_data(moved["key"]), expected)
        np.testing.assert_array_equal(moved["i"], np.tile(np.arange(3), size))
    assert moved["key"].dtype == keys.dtype


def test_bits_stay_what_they_are(rank, size):
    """Of all numbers, whatever travels beside them."""
    tree = {
        "nan": jnp.asarray(np.array([0x7FA00001, 0x7FC12345, 1], np.uint32).view(np.float32)),
        "narrow": jnp.asarray([-128, 127, -1], jnp.int8),
        "wide": jnp.asarray([-(2**63), 2**63 - 1, -2], jnp.int64),
        "true": jnp.asarray([True, False, True]),
        "unsigned": jnp.asarray([2**32 - 1, 0, 1], jnp.uint32),
    }
    moved, *_ = jax.jit(lambda tree: jaxmpi.migrate(tree, jnp.full(3, rank)))(tree)
    for name, x in tree.items():
        np.testing.assert_array_equal(np.asarray(moved[name]).view(np.uint8), np.asarray(x).view(np.uint8), name)


def test_calls_of_mpi(comm, rank, size):
    """One for each dtype with derivatives, one for all others, and the one that tells the counts."""
    x = jnp.arange(3.0)
    tree = {
        "a": x, "b": x[:, None], "c": x.astype(jnp.float32), "d": x.astype(jnp.int8), "e": x > 1, "f": x.astype(int)
    }  # fmt: skip
    jaxpr = str(jax.make_jaxpr(lambda tree: jaxmpi.migrate(tree, jnp.zeros(3, jnp.int32)))(tree))
    assert jaxpr.count("jaxmpi.migrate[") == 3
    assert jaxpr.count("jaxmpi.migrate_counts[") == 1


def test_other_communicator(comm, rank, size):
    reverse = comm.Split(0, -rank)
    moved, _, received = jaxmpi.migrate(jnp.full(2, float(rank)), jnp.zeros(2, jnp.int32), rows=2 * size, comm=reverse)
    if rank == size - 1:
        np.testing.assert_array_equal(moved, np.repeat(np.arange(size)[::-1], 2))
    np.testing.assert_array_equal(received, [2 * (rank == size - 1)] * size)

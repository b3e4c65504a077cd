"""Maps of random index sets, against what all ranks together know of them by NumPy.

hypothesis draws on rank 0 which rows there are, who owns them, and who reads which.
"""

import functools
import os
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from hypothesis import strategies as st
from mpi4py import MPI

import jaxmpi
from jaxmpi._mpi import private_comms
from jaxmpi._unstructured import directory, messages
from jaxmpi._unstructured.lookup import Lookup
from support.divided import LARGEST, Rows, for_each, on_first_ranks, some_rows
from support.rows import each
from support.table import NEW_JAX

EXAMPLES = int(os.environ.get("JAXMPI_TEST_MAPS", "40"))


@dataclass(frozen=True)
class Case(Rows):
    with_owners: bool

    def map(self, comm):
        owners = [self.owner()[i] for i in self.ghosts[comm.rank]] if self.with_owners else None
        return self.on(comm, owners)


def cases(size):
    return st.builds(lambda rows, with_owners: Case(*rows, with_owners), some_rows(size), st.booleans())


def check_map(case, comm):
    made = case.map(comm)
    rank, owner = comm.rank, case.owner()
    owned, ghosts = list(case.owned[rank]), case.of(rank)
    assert made.sizes == (len(owned), len(ghosts))
    assert made.owned.tolist() == owned
    assert made.ghosts.tolist() == ghosts
    assert made.owners.tolist() == [owner[i] for i in ghosts]
    assert (made.owned.dtype, made.ghosts.dtype, made.owners.dtype) == (np.int64, np.int64, np.int32)
    readers = {other for other in range(comm.size) if any(owner[i] == rank for i in case.of(other))}
    assert made.neighbors == tuple(sorted({owner[i] for i in ghosts} | readers - {rank}))
    local = np.arange(len(owned) + len(ghosts))
    np.testing.assert_array_equal(made.to_global(local), np.array(owned + ghosts, np.int64))
    np.testing.assert_array_equal(made.to_local(owned + ghosts), local)
    np.testing.assert_array_equal(made.to_local(made.to_global(local[None, ::-1])), local[None, ::-1])
    connections = made._connections
    for other, rows in connections.sends:  # what the others expect, in the order in which it lies there
        wanted = [i for i in case.of(other) if owner[i] == rank]
        assert [owned[row] for row in rows] == wanted
    sent = {other: len(rows) for other, rows in connections.sends}
    received = dict(connections.receives)
    assert [its.get(rank, 0) for its in comm.allgather(received)] == [sent.get(r, 0) for r in range(comm.size)]
    assert list(sent) == sorted(sent)
    assert list(received) == sorted(received)
    assert all([*sent.values(), *received.values()])


def check_equality(case, part):
    """Maps of the same rows are equal, and of others on any rank are not, on all ranks alike."""
    made, again = case.map(part), case.map(part)
    assert made == again
    assert hash(made) == hash(again)
    assert len(set(part.allgather(hash(made)))) == 1
    owned = list(case.owned[part.rank])
    if part.rank == part.size - 1:
        owned.append(next(i for i in range(len(case.owner()) + 1) if i not in case.owner()))
    assert made != jaxmpi.IndexMap(owned, case.ghosts[part.rank], comm=part)


def check_gather(case, comm):
    """Rows with and without ghosts, in one compiled program for each receiver: values, a batch, and what comes back."""
    made, rows = case.map(comm), sorted(case.owner())
    position = {index: i for i, index in enumerate(rows)}
    whole = np.random.default_rng(len(rows)).integers(0, 100, (len(rows), 3)).astype(np.float64)
    here = [position[index] for index in made.to_global(np.arange(sum(made.sizes)))]
    own = here[: made.sizes[0]]
    x = {"a": jnp.asarray(whole[here]), "b": jnp.asarray(whole[own, 0].astype(np.int8)), "c": jnp.ones((len(own), 0))}
    for root in (len(rows) % comm.size, None):

        def gather(x, root=root):
            return made.gather(x, root)

        receives = root in (None, comm.rank)
        weights = (1.0 + comm.rank) * jnp.asarray(whole if receives else 0 * whole[here])
        gradient = jax.grad(lambda x, w=weights, gather=gather: jnp.vdot(w, gather(x) ** 3))

        @jaxmpi.jit
        def everything(x, root=root, gather=gather, gradient=gradient):
            a = x["a"]
            batch = jax.vmap(gather, 1, 1)(jnp.stack([a, 2 * a], 1))
            second = jax.jvp(gradient, (a,), (a,))[1] if NEW_JAX and root is None else None
            return gather(x), batch, gradient(a) if NEW_JAX else None, second

        compiled, batch, first, second = everything(x)
        for found in (gather(x), compiled):
            right = {"a": whole, "b": whole[:, 0].astype(np.int8), "c": np.ones((len(rows), 0))} if receives else x
            for key, value in right.items():
                assert found[key].dtype == value.dtype
                np.testing.assert_array_equal(found[key], value)
        np.testing.assert_array_equal(batch[:, 1], 2 * (whole if receives else x["a"]))
        if not NEW_JAX:
            continue
        factor = sum(range(1, comm.size + 1)) if root is None else root + 1
        power = 3 * factor * whole[own] ** 3
        np.testing.assert_array_equal(first[: len(own)], power)
        if root is None:
            np.testing.assert_array_equal(first[len(own) :], 0)
            np.testing.assert_array_equal(second[: len(own)], 2 * power)


def test_what_cannot_be_gathered(comm, rank, size):
    made = jaxmpi.IndexMap(*ring(comm))
    owned, ghosts = made.sizes
    for wrong in (jnp.ones(owned + ghosts + 1), jnp.ones(())):
        with pytest.raises(ValueError, match=rf"IndexMap\.gather: tree\['u'\] has shape .* owns {owned} rows and has"):
            made.gather({"u": wrong})
    with pytest.raises(ValueError, match=r"IndexMap\.gather: root must be a rank"):
        made.gather(jnp.ones(owned), size)
    key = jax.random.split(jax.random.key(rank), owned)
    found = jax.random.key_data(made.gather(key, None))
    right = np.concatenate([jax.random.key_data(jax.random.split(jax.random.key(r), owned)) for r in range(size)])
    np.testing.assert_array_equal(found, right)


def check_raised(comm, call, kind=ValueError):
    """The text of an error that all ranks raise alike."""
    with pytest.raises(kind) as raised:
        call()
    texts = comm.allgather(str(raised.value))
    assert len(set(texts)) == 1, texts
    return texts[0]


def check_ghosts_without_owner(case, part):
    """The ghosts that are not owned any more are named, with who reads them."""
    read = sorted({i for rank in range(part.size) for i in case.of(rank)})
    lost = set(read[:: max(1, len(read) // 3)])
    ghosts = case.of(part.rank)
    owned = [i for i in case.owned[part.rank] if i not in lost]
    call = lambda: jaxmpi.IndexMap(owned, ghosts, comm=part)  # noqa: E731
    if not lost:
        call()
        return
    text = check_raised(part, call)
    first = min(lost)
    reader = next(rank for rank in range(part.size) if first in case.of(rank))
    assert f"no rank owns {first} (ghosts of rank {reader})" in text
    total = sum(i in lost for rank in range(part.size) for i in case.of(rank))
    assert (f"and {total - 5} more" in text) == (total > 5), text


def check_rows_owned_twice(case, part):
    rows = sorted(case.owner())
    if part.size == 1 or not rows:
        return
    row = rows[len(rows) // 2]
    first = case.owner()[row]
    second = (first + 1) % part.size
    owned = [*case.owned[part.rank], *[row] * (part.rank == second)]
    text = check_raised(part, lambda: jaxmpi.IndexMap(owned, case.ghosts[part.rank], comm=part))
    assert f"owned twice: {row} (by ranks {min(first, second)} and {max(first, second)})." in text


RANDOM = {
    "index sets": (check_map, 1),
    "equality": (check_equality, 4),
    "gathers": (check_gather, 8),
    "ghosts without owner": (check_ghosts_without_owner, 2),
    "rows owned twice": (check_rows_owned_twice, 2),
}
"""Of each check the part of the examples that it gets."""


@pytest.mark.seconds(300)
@for_each(RANDOM)
def test_random(what, comm, size):
    check, part = RANDOM[what]
    on_first_ranks(comm, cases(size), check, EXAMPLES // part)


def ring(comm):
    """Three rows on each rank, and the rows before and behind them as ghosts."""
    count = 3 * comm.size
    own = np.arange(3 * comm.rank, 3 * comm.rank + 3)
    return own, np.array([own[0] - 1, own[-1] + 1]) % count


WRONG = [
    ("owned", jnp.array([0.5, 1.5]), TypeError, "owned must be integers, got dtype float"),
    ("owned", np.array([True, False]), TypeError, "owned must be integers, got dtype bool"),
    ("ghosts", np.zeros((2, 2), int), ValueError, r"ghosts has shape (2, 2): pass one dimension"),
    ("ghosts", 5, ValueError, r"ghosts has shape (): pass one dimension"),
    ("ghosts", [3, -1, -2], ValueError, "ghosts has negative indices: -1, -2."),
    ("owned", [0, 7, 9, 7], ValueError, "owned has indices twice: 7."),
    ("owned", [2**63], ValueError, f"owned has {2**63}, and the largest index is 2^63 - 1"),
    ("ghosts", [2**70, 0], ValueError, f"ghosts has {2**70}, and"),
    ("ghosts", ["a", "b"], TypeError, "ghosts must be integers, got dtype <U1"),
    ("owned", None, TypeError, "owned is None: pass an array or a list of integers, an empty array if there are none"),
    ("ghosts", None, TypeError, "ghosts is None: pass an array"),
    ("owned", {0, 1}, TypeError, "owned is a set: pass an array or a list of integers, for example sorted(owned)"),
    ("ghosts", {0: 1}.keys(), TypeError, "ghosts is a dict_keys: pass an array or a list of integers, for example"),
    ("owned", np.ma.masked_equal([0, 1], 1), TypeError, "owned is a masked array: pass owned.compressed()"),
    ("ghosts", np.ma.masked_equal([0, 1], 1), TypeError, "ghosts is a masked array"),
    ("owners", [0], ValueError, "2 ghosts and 1 owners"),
    ("owners", [0, 99], ValueError, "owners has 99, and the ranks are 0 to"),
    ("owners", [0.5, 1], TypeError, "owners must be integers"),
]


def test_wrong_arguments(comm, rank, size):
    """An error of one rank is one of all, which names the rank; none is left waiting."""
    owned, ghosts = ring(comm)

    def check(row, by_all=False):
        name, value, kind, text = row
        arguments = {"owned": owned, "ghosts": ghosts}
        if name == "owners":
            arguments["owners"] = ghosts // 3
        wrong = by_all or rank == size - 1
        if wrong:
            arguments[name] = value
        with pytest.raises(kind) as raised:
            jaxmpi.IndexMap(**arguments)
        assert f"IndexMap: {'' if wrong else f'on rank {size - 1}: '}{text}" in str(raised.value)

    each(WRONG, check, lambda row: row[3])
    check(WRONG[0], by_all=True)


def test_traced_arguments(comm):
    owned, ghosts = ring(comm)
    for call in (lambda x: jaxmpi.IndexMap(x, ghosts), lambda x: jaxmpi.IndexMap(owned, x)):
        with pytest.raises(TypeError, match="is traced"):
            jax.jit(call)(jnp.asarray(owned))
    made = jaxmpi.IndexMap(owned, ghosts)
    for method in (made.to_local, made.to_global):
        with pytest.raises(TypeError, match="is traced"):
            jax.jit(method)(jnp.asarray(owned))


@pytest.mark.ranks(2)
def test_owners_on_some_ranks(comm, rank):
    owned, ghosts = ring(comm)
    with pytest.raises(ValueError, match=r"1 of . ranks have passed owners"):
        jaxmpi.IndexMap(owned, ghosts, owners=ghosts // 3 if rank == 0 else None)


@pytest.mark.ranks(2)
def test_wrong_owners(comm, rank, size):
    owned, ghosts = ring(comm)
    owners = ghosts // 3
    unowned = 3 * size + 5
    text = check_raised(comm, lambda: jaxmpi.IndexMap(owned, [*ghosts, unowned], owners=[*owners, (rank + 1) % size]))
    assert f"owners is wrong for {unowned} (rank 0 says that rank 1 owns it)" in text
    with pytest.raises(
        ValueError, match=f"this is rank {rank}, and owners and owned disagree whether it owns {unowned}"
    ):
        jaxmpi.IndexMap(owned, [unowned], owners=[rank])
    with pytest.raises(ValueError, match="two ranks for ghosts that are there twice: "):
        jaxmpi.IndexMap(owned, [ghosts[0]] * 2, owners=[0, 1])


def test_nothing_anywhere(comm):
    made = jaxmpi.IndexMap([], [])
    assert (made.sizes, made.neighbors) == ((0, 0), ())
    assert made.to_local([]).shape == made.to_global(np.zeros((0, 2), int)).shape[:1] == (0,)
    assert repr(made) == "IndexMap(owned 0, ghosts 0, neighbors ())"


def test_indices_are_not_those_of_the_caller(comm):
    """A map keeps its indices, whatever becomes of the array that was passed; they cannot be written."""
    owned, ghosts = ring(comm)
    given = owned.copy()
    made = jaxmpi.IndexMap(given, ghosts)
    given[:] = 0
    assert made.owned.tolist() == owned.tolist()
    for array in (made.owned, made.ghosts):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0


def test_dtypes_of_indices(comm):
    owned, ghosts = ring(comm)
    for dtype in (np.int8, np.uint16, np.int32, np.uint64):
        made = jaxmpi.IndexMap(owned.astype(dtype), jnp.asarray(ghosts.astype(dtype)))
        assert made == jaxmpi.IndexMap(owned, ghosts), dtype
        assert made.to_local(owned.astype(dtype)).dtype == np.int32


def test_rows_that_are_not_there(comm, rank, size):
    owned, ghosts = ring(comm)
    made = jaxmpi.IndexMap(owned, ghosts)
    with pytest.raises(ValueError, match=f"rank {rank} neither owns {4 * size + 3} nor has it among its ghosts"):
        made.to_local([owned[0], 4 * size + 3])
    with pytest.raises(ValueError, match="neither owns -1 nor"):
        made.to_local(-1)
    count = sum(made.sizes)
    for wrong in (-1, count):
        with pytest.raises(ValueError, match=f"no rows {wrong}: the local numbers of rank {rank} are 0 to {count - 1}"):
            made.to_global([0, wrong])


def test_pad(comm):
    made = jaxmpi.IndexMap(*ring(comm))
    owned, ghosts = made.sizes
    padded = made.pad(
        {"a": jnp.ones(owned), "b": jnp.ones((owned, 2), int), "key": jax.random.split(jax.random.key(0), owned)}
    )
    assert [x.shape for x in jax.tree.leaves(padded)] == [(owned + ghosts,), (owned + ghosts, 2), (owned + ghosts,)]
    assert padded["b"][owned:].sum() == 0
    assert padded["b"][:owned].sum() == 2 * owned
    for wrong in (jnp.ones(owned + 1), jnp.ones(())):
        with pytest.raises(ValueError, match=f"tree has shape .* owns {owned} rows"):
            made.pad(wrong)


def test_static_argument(comm):
    traced = []

    @functools.partial(jax.jit, static_argnums=0)
    def rows(made, x):
        traced.append(made)
        return x * sum(made.sizes)

    for _ in range(2):
        rows(jaxmpi.IndexMap(*ring(comm)), 1.0)
    assert len(traced) == 1
    rows(jaxmpi.IndexMap(ring(comm)[0][::-1], []), 1.0)
    assert len(traced) == 2


# --- communicators -------------------------------------------------------------------------------------------------


def test_communicators(comm, rank, size):
    owned, ghosts = ring(comm)
    part = comm.Dup()
    made = jaxmpi.IndexMap(owned, ghosts, comm=part)
    assert made.comm is part
    assert made != jaxmpi.IndexMap(owned, ghosts, comm=comm)
    clone = part.Get_attr(private_comms._attribute())
    part.Free()
    assert clone == MPI.COMM_NULL
    with pytest.raises(ValueError, match=r"comm is MPI\.COMM_NULL"):
        jaxmpi.IndexMap(owned, ghosts, comm=part)
    with pytest.raises(TypeError, match="comm must be an mpi4py communicator"):
        jaxmpi.IndexMap(owned, ghosts, comm=3)
    reversed_ = comm.Split(0, -rank)
    back = jaxmpi.IndexMap(owned, ghosts, comm=jaxmpi.static(reversed_))
    assert back.owners.tolist() == [size - 1 - i // 3 for i in back.ghosts]
    reversed_.Free()
    alone = jaxmpi.IndexMap([3, 1], [1, 3], comm=MPI.COMM_SELF)
    assert alone.sizes == (2, 0)


def test_topologies(comm, size):
    owned, ghosts = ring(comm)
    for part in (comm.Create_cart([size]), comm.Create_dist_graph_adjacent([comm.rank], [comm.rank])):
        assert jaxmpi.IndexMap(owned, ghosts, comm=part).sizes == (3, len(set(ghosts.tolist()) - set(owned.tolist())))
        part.Free()


@pytest.mark.ranks(2)
def test_messages_of_the_program(comm, rank, size):
    """A receive of anything that is posted while the map is made gets what the program sends later."""
    for part in (comm.Dup(), comm):
        found = np.zeros(1, np.int64)
        pending = part.Irecv(found, MPI.ANY_SOURCE, MPI.ANY_TAG)
        jaxmpi.IndexMap(*ring(comm), comm=part)
        part.Send(np.array([17 + rank]), (rank + 1) % size, 1)
        pending.Wait()
        assert found[0] == 17 + (rank - 1) % size


def test_operations_under_way(comm, rank, size):
    """What was called before on the communicator is done before the clone is made, also if its result is not needed."""
    part = comm.Dup()
    for _ in range(3):
        x = jax.jit(lambda x: jaxmpi.allreduce(x, MPI.SUM, comm=part))(jnp.ones(100_000))
    made = jaxmpi.IndexMap(*ring(comm), comm=part)
    assert x[0] == size
    assert made.sizes[0] == 3
    part.Free()


# --- the parts of which it is made ---------------------------------------------------------------------------------


@pytest.mark.alone
def test_by_rank():
    for ranks in [], [3], [2, 2, 0, 40_000, 2, 0]:
        found = messages.by_rank(np.array(ranks, np.int64), np.arange(len(ranks)))
        assert {rank: its.tolist() for rank, its in found.items()} == {
            rank: [i for i, its in enumerate(ranks) if its == rank] for rank in sorted(set(ranks))
        }


@pytest.mark.alone
def test_lookup():
    for values in [], [5], [3, 4, 5], [5, 3, 4], [9, 2, LARGEST], [0, 10, 20], [LARGEST, 0]:
        wanted = np.array([-(2**63), -1, *range(12), LARGEST])
        found = Lookup.from_list(np.array(values, np.int64)).positions(wanted)
        assert found.tolist() == [values.index(i) if i in values else -1 for i in wanted.tolist()], values


@pytest.mark.alone
def test_a_directory_is_divided_evenly():
    """Of so many ranks with consecutive rows: each has a handful of homes, and no home has much more than the mean."""
    each_rank = 1000
    for size in (2, 100, 1024):
        index = np.arange(size * each_rank)
        huge = np.sort(np.random.default_rng(0).integers(0, 2**62, index.size))
        for gaps, indices in (("none", index), ("even", 64 * index), ("huge", huge)):
            homes = directory._homes(indices, directory._shift(index.size, size), size)
            assert np.bincount(homes, minlength=size).max() <= 5 * each_rank, (size, gaps)
            if gaps == "none":
                assert max(len(set(its)) for its in homes.reshape(size, each_rank)) <= 9, size


# --- matrices and graphs -------------------------------------------------------------------------------------------


def laplacian(n):
    line = scipy.sparse.diags([-1.0, 2.0, -1.0], [-1, 0, 1], shape=(n, n))
    return scipy.sparse.csr_matrix(scipy.sparse.kronsum(line, line))


def random_matrix(n):
    """A tenth of the entries, without symmetry."""
    rng = np.random.default_rng(0)
    return scipy.sparse.csr_matrix(rng.integers(1, 9, (n, n)) * (rng.random((n, n)) < 0.1).astype(float))


MATRICES = {"laplacian": laplacian(12), "random": random_matrix(97), "empty": scipy.sparse.csr_matrix((5, 5))}


def divided(comm, matrix, way):
    """The rows of this rank: of consecutive ones the last rank has none, if it can; else they are drawn."""
    n, size = matrix.shape[0], comm.size
    if way == "consecutive":
        most = -(-n // max(1, size - 1))
        return np.arange(min(n, comm.rank * most), min(n, (comm.rank + 1) * most))
    owner = np.random.default_rng(1).integers(0, size, n)
    return np.random.default_rng(2).permutation(np.flatnonzero(owner == comm.rank))


@pytest.mark.parametrize("way", ["consecutive", "drawn"])
@pytest.mark.parametrize("name", MATRICES)
def test_csr(name, way, comm):
    """The product with a sparse matrix, in compiled code, and with its transpose, by the derivative, against scipy."""
    matrix = MATRICES[name]
    rows = divided(comm, matrix, way)
    part = matrix[rows]
    made, local = jaxmpi.IndexMap.from_csr(part.indptr, part.indices, rows=None if way == "consecutive" else rows)
    assert made.owned.tolist() == rows.tolist()
    assert local.dtype == np.int32
    assert set(made.ghosts.tolist()) == set(part.indices.tolist()) - set(rows.tolist())
    of_row = np.repeat(np.arange(len(rows)), np.diff(part.indptr))

    @jaxmpi.jit
    def times(x):
        x = made.exchange(made.pad(x))
        return jax.ops.segment_sum(jnp.asarray(part.data) * x[local], of_row, len(rows))

    whole = np.random.default_rng(3).integers(-9, 9, matrix.shape[0]).astype(float)
    x = jnp.asarray(whole[rows])
    np.testing.assert_array_equal(times(x), (matrix @ whole)[rows])
    if NEW_JAX:
        np.testing.assert_array_equal(jax.vjp(times, x)[1](x)[0], (matrix.T @ whole)[rows])


WRONG_CSR = [
    ({"indptr": [0, 1, 2]}, "indptr must rise from 0 to the number of indices, 3"),
    ({"indptr": [0, 2, 1, 3]}, "indptr must rise"),
    ({"indptr": [1, 3]}, "indptr must rise"),
    ({"indptr": []}, "indptr must rise"),
    ({"indices": [0, -1, 2]}, "indices has negative indices: -1"),
    ({"rows": [0]}, "1 rows, and indptr is of 2"),
]


def check_wrong(call, arguments, rows, on_this_rank):
    """What one rank has passed wrongly is an error on all ranks."""

    def check(row):
        wrong, text = row
        with pytest.raises((ValueError, TypeError), match=rf"IndexMap\.{call}: ") as raised:
            getattr(jaxmpi.IndexMap, call)(**arguments | (wrong if on_this_rank else {}))
        assert text in str(raised.value)

    each(rows, check, lambda row: row[1])


def test_wrong_csr(rank, size):
    arguments = {"indptr": [0, 1, 3], "indices": [0, 1, 0], "rows": [2 * rank, 2 * rank + 1]}
    check_wrong("from_csr", arguments, WRONG_CSR, rank == size - 1)


@pytest.mark.ranks(2)
def test_csr_that_does_not_fit_other_ranks(comm, rank, size):
    """Errors that are found together name the function that was called, and its arguments."""
    beyond = 2 * size + 3
    with pytest.raises(ValueError, match=r"^IndexMap\.from_csr: ") as raised:
        jaxmpi.IndexMap.from_csr([0, 1, 2], [0, beyond], comm=comm)
    assert f"no rank owns {beyond} (indices of rank 0), {beyond} (indices of rank 1)" in str(raised.value)
    assert "by rows=" in str(raised.value)
    with pytest.raises(ValueError, match=r"^IndexMap\.from_csr: ") as raised:
        jaxmpi.IndexMap.from_csr([0, 1], [0], rows=[0], comm=comm)
    assert "owned twice: 0 (by ranks 0 and 1)" in str(raised.value)
    assert "Leave each out of rows on all ranks but one" in str(raised.value)
    with pytest.raises(ValueError, match=r"^IndexMap\.from_csr: .*rows has indices twice: 5"):
        jaxmpi.IndexMap.from_csr([0, 1, 1], [0], rows=[5, 5] if rank else [0, 1], comm=comm)


@pytest.mark.ranks(2)
def test_rows_on_some_ranks(comm, rank):
    with pytest.raises(ValueError, match=r"1 of . ranks have passed no rows"):
        jaxmpi.IndexMap.from_csr([0, 1], [rank], rows=[rank] if rank else None)


@pytest.mark.parametrize("parts", [False, True])
def test_edges(parts, comm, rank, size):
    """Messages along edges, added up at their receivers, against one process."""
    rng = np.random.default_rng(0)
    count, vertices = 400, 50
    senders, receivers = rng.integers(0, vertices, (2, count))
    owner = rng.integers(0, size, vertices)
    values, weights = rng.integers(0, 9, vertices), rng.integers(0, 9, count)
    given = np.flatnonzero((owner[receivers] == rank) | (rng.integers(0, 2, count) > 0)) if parts else np.arange(count)
    made, local_senders, local_receivers, edges = jaxmpi.IndexMap.from_edges(senders[given], receivers[given], owner)
    assert made.owned.tolist() == np.flatnonzero(owner == rank).tolist()
    assert given[edges].tolist() == np.flatnonzero(owner[receivers] == rank).tolist()
    h = values[made.to_global(np.arange(sum(made.sizes)))]
    found = np.zeros(made.sizes[0], int)
    np.add.at(found, local_receivers, weights[given][edges] * h[local_senders])
    right = np.zeros(vertices, int)
    np.add.at(right, receivers, weights * values[senders])
    assert found.tolist() == right[made.owned].tolist()


def test_wrong_edges(rank, size):
    rows = [
        ({"senders": [0]}, "1 senders and 2 receivers"),
        ({"receivers": [0, 9]}, "receivers has 9, and owner is of 2 vertices"),
        ({"owner": [0, 99]}, "owner has 99, and the ranks are"),
        ({"senders": [0.5, 1]}, "senders must be integers"),
    ]
    arguments = {"senders": [0, 1], "receivers": [1, 0], "owner": [0, size - 1]}
    check_wrong("from_edges", arguments, rows, rank == size - 1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("other", [[1, 0, 0, 0], [0, 1, 0, 1], [0, 1, 0]])
def test_ranks_that_differ_about_owners(other, comm, rank):
    """Of a vertex that is a ghost, of one without edges, of how many there are."""
    with pytest.raises(ValueError, match=r"IndexMap\.from_edges: owner is not the same on all ranks"):
        jaxmpi.IndexMap.from_edges([0, 1], [1, 0], other if rank == comm.size - 1 else [0, 1, 0, 0], comm=comm)


@pytest.mark.seconds(300)
def test_many_rows(comm, rank, size):
    """A hundred thousand on each rank that it owns, as many ghosts among all rows."""
    count = 100_000
    index = np.random.default_rng(0).permutation(count * size) * 7
    owned = index[count * rank : count * (rank + 1)]
    chosen = np.random.default_rng(rank + 1).integers(0, index.size, count)
    made = jaxmpi.IndexMap(owned, index[chosen])
    unique = np.unique(chosen)
    unique = unique[unique // count != rank]
    order = np.lexsort((index[unique], unique // count))
    np.testing.assert_array_equal(made.ghosts, index[unique[order]])
    np.testing.assert_array_equal(made.owners, unique[order] // count)
    np.testing.assert_array_equal(
        made.to_local(index[chosen[chosen // count == rank]]), chosen[chosen // count == rank] % count
    )
    for other, rows in made._connections.sends:
        its = np.unique(np.random.default_rng(other + 1).integers(0, index.size, count))
        its = its[its // count == rank]
        np.testing.assert_array_equal(owned[rows], np.sort(index[its]))


def test_a_freed_communicator(comm):
    part = comm.Dup()
    made = jaxmpi.IndexMap(*ring(comm), comm=part)
    x = jnp.ones(sum(made.sizes))
    made.exchange(x).block_until_ready()
    part.Free()
    for name in ("exchange", "accumulate", "start"):
        with pytest.raises(ValueError, match=rf"IndexMap\.{name}: the communicator of the map has been freed"):
            getattr(made, name)(x)


def test_rows_that_are_too_few(comm):
    made = jaxmpi.IndexMap(*ring(comm))
    for call in (made.exchange, made.accumulate, made.start):
        with pytest.raises(ValueError, match=r"IndexMap\.\w+: .*3 that it owns"):
            call(jnp.ones(17))

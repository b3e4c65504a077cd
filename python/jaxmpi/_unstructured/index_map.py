"""Maps of rows that have global indices: which this rank owns, and of which it has copies."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxmpi._mpi import agreement, communicators, survival
from jaxmpi._mpi.private_comms import clone_of
from jaxmpi._mpi.watch import waiting
from jaxmpi._operations.by_counts import allgatherv, gatherv
from jaxmpi._operations.requests import Request
from jaxmpi._primitive import arguments, keys
from jaxmpi._primitive import counts as by_counts
from jaxmpi._unstructured import arguments as given
from jaxmpi._unstructured import directory, graphs
from jaxmpi._unstructured import ghosts as patterns
from jaxmpi._unstructured.lookup import Lookup, distinct


class IndexMap(communicators.Local):
    """Rows of arrays that are divided among the ranks by global indices, and copies of rows of other ranks.

    Each row of a global array has an index and is owned by one rank: the vertices of a mesh, the rows of a sparse
    matrix, the nodes of a graph. A rank has its own rows in any order, and behind them its ghosts, copies of rows that
    others own. Where a row lies in the arrays of a rank is its local number:

        0 to owned - 1                  the rows that this rank owns, in the order in which they were given
        owned to owned + ghosts - 1     its ghosts, by the ranks that own them, and of one rank by their global indices

    The map finds out which rank owns each ghost, and which ranks have copies of rows of this one. `exchange` then
    brings the rows of the owners to the ghosts, and `accumulate` adds the ghosts to the rows of their owners.

    All ranks of the communicator make the map together, outside of compiled functions; it is found by a directory that
    is divided among them, so that time, memory and messages of a rank grow with its own indices and neighbours. A map
    may be a static argument of `jax.jit`.

    The idea is that of PETSc's VecScatter and PetscSF, of DOLFINx's IndexMap and of Import and Export in Tpetra.

    Args:
      owned: the global indices of the rows that this rank owns, one dimension of integers, in any order and with any
        gaps, none of them on two ranks. Empty on a rank that owns nothing.
      ghosts: the global indices of the rows that this rank reads besides, in any order. What is repeated is kept once,
        and what this rank owns is left out.
      owners: the rank that owns each of the ghosts, on all ranks or on none, if that is known: nothing then needs to be
        looked up. Whether those ranks own the ghosts is checked all the same, but not whether a row is owned twice.
      comm: an intra-communicator; a clone of COMM_WORLD where it is None.

    Raises:
      ValueError: no rank owns a ghost, a row is owned twice, or `owners` is wrong: on all ranks alike. A negative
        index, one beyond int64, an array with another number of dimensions, `owners` on some of the ranks alone.
      TypeError: arrays that are traced, or not of integers. An error of an argument on one rank is raised on that one,
        and on all others with the number of the rank: none is left waiting.
    """

    def __init__(self, owned: Any, ghosts: Any, *, owners: Any = None, comm: MPI.Comm | None = None):
        self._make(owned, ghosts, owners, comm, given.Names())

    def _make(self, owned: Any, ghosts: Any, owners: Any, comm: MPI.Comm | None, names: given.Names) -> None:
        with _together(comm, names.operation) as (clone, known):
            self._comm, rank, size = known, known.rank, known.size
            found, failure = agreement.capture(lambda: given.rows(owned, ghosts, owners, names, rank, size))
            count = 0 if found is None else len(found.owned)
            total, with_owners = agreement.sums(clone, names.operation, failure, count, owners is not None)
            if with_owners not in (0, size):
                raise ValueError(
                    f"IndexMap: {with_owners} of {size} ranks have passed owners: pass them on all ranks, also an "
                    "empty array where there are no ghosts, or on none."
                )
            assert found is not None
            self._connections = directory.connect(clone, names, found, total)
        self._total = total
        self._mpi = communicators.default_mpi() if comm is None else comm
        self._pattern = patterns.pattern(self._connections, rank)
        self._owned, self._lookup = found.owned, found.lookup
        for array in (self._owned, self.ghosts):
            array.setflags(write=False)

    @classmethod
    def from_csr(
        cls, indptr: Any, indices: Any, *, rows: Any = None, comm: MPI.Comm | None = None
    ) -> "tuple[IndexMap, np.ndarray]":
        """The map of a square sparse matrix of which each rank has some rows, and its columns by their local numbers.

        A vector that is multiplied by the matrix is divided as the rows are. The columns that belong to rows of other
        ranks become ghosts: after `exchange` an array of `map.sizes` rows has all that this rank's rows are multiplied
        with. Within a row the order of the entries is kept, so the local columns need not ascend.

        All ranks of the communicator call it.

        Args:
          indptr: where each row of this rank begins in `indices`, and the end of the last; as in `scipy.sparse` of the
            rows of this rank alone (`A[first:end].indptr`).
          indices: the columns of the entries, global indices.
          rows: the global index of each row of this rank. None: those of rank 0 are the first, then those of rank 1.
          comm: an intra-communicator; a clone of COMM_WORLD where it is None.

        Returns:
          `(map, local)`: the map, which owns `rows`, and the local number of each column, of the shape of `indices`.

        Raises: what `IndexMap` raises, and ValueError, on all ranks, if `indptr` or `rows` does not fit.
        """
        operation = "IndexMap.from_csr"
        with _together(comm, operation) as (clone, _):
            found, failure = agreement.capture(lambda: graphs.csr(indptr, indices, rows, operation))
            (some_without,) = agreement.sums(clone, operation, failure, rows is None)
            if some_without not in (0, clone.size):
                raise ValueError(
                    f"{operation}: {some_without} of {clone.size} ranks have passed no rows: all or none do."
                )
            assert found is not None
            count, columns, owned = found
            if owned is None:
                first = clone.exscan(count) or 0
                owned = np.arange(first, first + count)
        made = cls.__new__(cls)
        made._make(owned, columns, None, comm, given.Names(operation, "rows", "indices", _UNOWNED_COLUMN))
        return made, made.to_local(columns)

    @classmethod
    def from_edges(
        cls, senders: Any, receivers: Any, owner: Any, *, comm: MPI.Comm | None = None
    ) -> "tuple[IndexMap, np.ndarray, np.ndarray, np.ndarray]":
        """The map of a graph whose vertices are divided among the ranks, and the edges of this rank by local numbers.

        An edge lives on the rank that owns its receiver, where its message is added up: its receiver is one of this
        rank's own rows, its sender one of these or a ghost. So a step of a graph network is an `exchange` of the
        vertices, messages computed from the senders and the receivers of the edges, and a sum over the receivers
        (`jax.ops.segment_sum(messages, receivers, owned)`), which needs no other rank.

        All ranks of the communicator call it.

        Args:
          senders, receivers: the vertices at both ends of each edge, global indices, as in jraph. All edges, or some of
            them, among which must be those whose receiver this rank owns. Others are left out.
          owner: the rank that owns each vertex, for all vertices of the graph, the same on all ranks, such as METIS
            gives. (Where no rank can hold that, `IndexMap(owned, senders)` and `to_local` do the same.)
          comm: an intra-communicator; a clone of COMM_WORLD where it is None.

        Returns:
          `(map, senders, receivers, edges)`: the map, which owns the vertices of this rank in ascending order; the
          local numbers of the ends of this rank's edges; and which of the given edges those are, for what belongs to
          edges: `features[edges]`.

        Raises: what `IndexMap` raises, and ValueError, on all ranks, if the arrays do not fit each other, or ranks
        have other owners of a vertex.
        """
        operation = "IndexMap.from_edges"
        with _together(comm, operation) as (clone, known):
            rank, size = known.rank, known.size
            found, failure = agreement.capture(lambda: graphs.edges(senders, receivers, owner, operation, rank, size))
            told = 0 if found is None else directory.digest_of(found[-1])
            (total,) = agreement.sums(clone, operation, failure, told)
        assert found is not None
        if total != told * size % (1 << 64):
            raise ValueError(
                f"{operation}: owner is not the same on all ranks: pass the rank of each vertex of the whole graph, as "
                "rank 0 has it: comm.bcast(owner)."
            )
        edges, sources, targets, owners = found
        needed = distinct(sources)
        needed = needed[owners[needed] != rank]
        made = cls.__new__(cls)
        made._make(np.flatnonzero(owners == rank), needed, owners[needed], comm, given.Names(operation))
        return made, made.to_local(sources), made.to_local(targets), edges

    def __repr__(self) -> str:
        owned, ghosts = self.sizes
        return f"IndexMap(owned {owned}, ghosts {ghosts}, neighbors {self.neighbors})"

    def __eq__(self, other: object) -> bool:
        """Whether another map has the same rows on each rank, on the same communicator: as a static argument of
        `jax.jit` it is the same."""
        if not isinstance(other, IndexMap):
            return NotImplemented
        return (self._comm, self._connections.signature) == (other._comm, other._connections.signature)

    def __hash__(self) -> int:
        return hash(self._connections.signature)

    # --- what it is ------------------------------------------------------------------------------------------------

    @property
    def comm(self) -> MPI.Comm:
        """The communicator."""
        return self._mpi

    @property
    def sizes(self) -> tuple[int, int]:
        """How many rows this rank owns, and how many ghosts it has: arrays have as many rows as these together."""
        return self._connections.owned, len(self._connections.ghosts)

    @property
    def owned(self) -> np.ndarray:
        """The global indices of the rows that this rank owns, int64, by their local numbers. It cannot be written."""
        return self._owned

    @property
    def ghosts(self) -> np.ndarray:
        """The global indices of the ghosts, int64, by their local numbers. It cannot be written."""
        return self._connections.ghosts

    @property
    def owners(self) -> np.ndarray:
        """The rank that owns each ghost, int32, in the order of `ghosts`."""
        ranks, counts = zip(*self._connections.receives, strict=True) if self._connections.receives else ((), ())
        return np.repeat(np.array(ranks, np.int32), counts)

    @property
    def neighbors(self) -> tuple[int, ...]:
        """The ranks that own ghosts of this rank, or have ghosts that it owns, in ascending order."""
        return tuple(sorted({rank for its in (self._connections.receives, self._connections.sends) for rank, _ in its}))

    def to_local(self, indices: Any) -> np.ndarray:
        """The local numbers of rows.

        Args:
          indices: global indices of rows that this rank owns or has as ghosts, integers of any shape, not traced.

        Returns:
          An array of that shape, of int32 where that holds all local numbers, else int64. It is computed here alone;
          other ranks need not call it.

        Raises:
          ValueError: a row is neither owned nor a ghost here. TypeError: not integers, or traced.
        """
        wanted = given.integers(indices, "IndexMap.to_local", "indices", any_shape=True)
        owned, ghosts = self.sizes
        flat = wanted.reshape(-1)
        local = self._lookup.positions(flat)
        others = np.flatnonzero(local < 0)
        at = self._lookup_of_ghosts.positions(flat[others])
        if len(unknown := flat[others][at < 0]):
            raise ValueError(
                f"IndexMap.to_local: rank {self._comm.rank} neither owns {given.some(distinct(unknown))} nor has it "
                "among its ghosts. Pass what is read here as ghosts when the map is made."
            )
        local[others] = owned + at
        return local.reshape(wanted.shape).astype(np.int32 if owned + ghosts < 2**31 else np.int64)

    def to_global(self, rows: Any) -> np.ndarray:
        """The global indices of local numbers: the inverse of `to_local`.

        Args:
          rows: local numbers, integers of any shape, not traced.

        Returns:
          An int64 array of that shape. It is computed here alone; other ranks need not call it.

        Raises:
          ValueError: a number is negative or too large. TypeError: not integers, or traced.
        """
        wanted = given.integers(rows, "IndexMap.to_global", "rows", any_shape=True)
        count = sum(self.sizes)
        if len(beyond := wanted[(wanted < 0) | (wanted >= count)]):
            raise ValueError(
                f"IndexMap.to_global: there are no rows {given.some(distinct(beyond))}: the local numbers of rank "
                f"{self._comm.rank} are 0 to {count - 1}."
            )
        return self._indices[wanted]

    @functools.cached_property
    def _indices(self) -> np.ndarray:
        return np.concatenate([self._owned, self.ghosts])

    @functools.cached_property
    def _lookup_of_ghosts(self) -> Lookup:
        return Lookup.of(self.ghosts)

    def _check_alive(self, operation: str) -> None:
        communicators.check_alive(self._mpi, operation, "map")

    # --- rows and ghosts -------------------------------------------------------------------------------------------

    def exchange(self, tree: Any) -> Any:
        """Replaces the ghosts by the rows of which they are copies: one operation, one message to each neighbour.

        All ranks of the map call it. It is linear, and its transpose is `accumulate`, so derivatives of any order are
        operations of the same kind. Under `jax.vmap` a batch travels in the same messages.

        Args:
          tree: an array of shape (owned + ghosts, ...) of any dtype that can be communicated, or a pytree of such, of
            any dtypes and trailing shapes. `pad` makes it of the rows that this rank owns.

        Returns:
          The arrays with their ghosts replaced, of the same structure, shapes and dtypes; own rows are not changed.

        Raises:
          ValueError: an array has another number of rows, or the communicator has been freed. TypeError: a dtype cannot
            be communicated. Both while tracing, before anything is sent.
          jax.errors.JaxRuntimeError: at run time, on each rank that receives something that is not of the same call:
            the ranks passed other arrays or use other maps, or called in another order. With `JAXMPI_CHECK=1` on all
            ranks, before anything is sent.
        """
        self._check_alive("IndexMap.exchange")
        return patterns.exchange(self._pattern, self._comm, tree)

    def accumulate(self, tree: Any, op: MPI.Op = MPI.SUM) -> Any:
        """Adds the ghosts to the rows of which they are copies, and clears them: one operation, one message to each
        neighbour.

        All ranks of the map call it. What comes from several ranks is added in the order of the ranks, so results are
        the same in every run, to the last bit. It is linear, and its transpose is `exchange`. Under `jax.vmap` a batch
        travels in the same messages.

        Args:
          tree: an array of shape (owned + ghosts, ...) of a dtype that can be added, or a pytree of such, of any dtypes
            and trailing shapes.
          op: MPI.SUM; or MPI.MAX or MPI.MIN, by which a row becomes the largest or the smallest of itself and its
            copies. These two leave the ghosts as they are, and have no derivatives: in a function that is
            differentiated pass `jax.lax.stop_gradient(x)`.

        Returns:
          The arrays with own rows to which the ghosts of other ranks have been added, and with ghosts that are zero; of
          the same structure, shapes and dtypes.

        Raises: what `exchange` raises; ValueError for another reduction.
        """
        self._check_alive("IndexMap.accumulate")
        return patterns.accumulate(self._pattern, self._comm, tree, op)

    def start(self, tree: Any) -> Request:
        """Starts an exchange: rows are on their way while something else is computed.

        Args: those of `exchange`. 100 arrays at most.

        Returns:
          A `Request`; `jaxmpi.notoken.wait(request)` gives what `exchange` would. It holds the arrays too, so it is
          a pytree with these.

        Raises: what `exchange` raises while tracing; its errors at run time are raised by `wait`.
        """
        self._check_alive("IndexMap.start")
        return patterns.start(self._pattern, self._comm, tree)

    def gather(self, tree: Any, root: int | None = 0) -> Any:
        """Puts the rows of all ranks into one array, in the ascending order of their global indices.

        All ranks of the map call it. Each call sends the global indices too, and the ranks that receive sort them. It
        is linear: its transpose returns each row to the rank that owns it, and adds what all receivers send. Under
        `jax.vmap` a batch travels in the same messages.

        Args:
          tree: an array of shape (owned, ...) or (owned + ghosts, ...), whose ghosts are left out, of any dtype that
            can be communicated; or a pytree of such. Trailing shapes and dtypes are the same on all ranks.
          root: rank that receives, static; None: all ranks.

        Returns:
          On root arrays with a row for each index that a rank owns, of the same structure and dtypes. Gaps between
          indices have no rows. On other ranks `tree` itself.

        Raises:
          ValueError: an array has another number of rows, there are more than 2^31 - 1 in all, or the communicator has
          been freed. TypeError: a dtype cannot be communicated. Both while tracing, before anything is sent; other
          ranks then wait.
        """
        function = "IndexMap.gather"
        self._check_alive(function)
        root = None if root is None else arguments.rank(root, self._comm, function, "root")
        arrays, names, structure = arguments.leaves(tree, function, "tree")
        owned, ghosts = self.sizes
        for x, name in zip(arrays, names, strict=True):
            if x.ndim == 0 or x.shape[0] not in (owned, owned + ghosts):
                raise ValueError(
                    f"{function}: {name} has shape {x.shape}, and rank {self._comm.rank} owns {owned} rows and has "
                    f"{ghosts} ghosts: pass the rows that it owns along the first axis, or both."
                )
        if self._total > by_counts.MOST:
            raise ValueError(
                f"{function}: the ranks own {self._total} rows, and MPI counts {by_counts.MOST}: jaxmpi.io.save writes "
                "them without gathering them."
            )

        def join(tree: Any) -> Any:
            if root is None:
                return allgatherv(tree, owned, rows=self._total, comm=self._mpi)[0]
            return gatherv(tree, owned, root, rows=self._total, comm=self._mpi)[0]

        words = np.stack([self._owned >> 32, self._owned & 0xFFFFFFFF], 1).astype(np.uint32)
        words, joined = join(jnp.asarray(words)), join([x[:owned] for x in arrays])
        if root not in (None, self._comm.rank):
            return jax.tree.unflatten(structure, arrays)
        order = jnp.lexsort((words[:, 1], words[:, 0]))
        return jax.tree.unflatten(structure, [x[order] for x in joined])

    def pad(self, tree: Any) -> Any:
        """Arrays of the rows that this rank owns, with zeros in the place of its ghosts, which `exchange` fills.

        Args:
          tree: an array of shape (owned, ...), or a pytree of such.

        Returns:
          Arrays of shape (owned + ghosts, ...), of the same structure and dtypes.

        Raises:
          ValueError: an array has another number of rows.
        """
        arrays, names, structure = arguments.leaves(tree, "IndexMap.pad", "tree")
        owned, ghosts = self.sizes
        for x, name in zip(arrays, names, strict=True):
            if x.ndim == 0 or x.shape[0] != owned:
                raise ValueError(
                    f"IndexMap.pad: {name} has shape {x.shape}, and rank {self._comm.rank} owns {owned} rows: pass "
                    "them alone, along the first axis."
                )
        padded = [keys.pad(x, [(0, ghosts), *[(0, 0)] * (x.ndim - 1)]) for x in arrays]
        return jax.tree.unflatten(structure, padded)


_UNOWNED_COLUMN = (
    "The matrix is square: each column is the global index of a row, which one rank has. Pass the rows that are "
    "missing, or say in rows= which those of this rank are."
)


@contextlib.contextmanager
def _together(comm: MPI.Comm | None, operation: str) -> Iterator[tuple[MPI.Intracomm, communicators.Communicator]]:
    """The clone on which ranks agree about the arguments of a function. Within it, a rank that waits is reported."""
    known = communicators.resolve(comm, operation)
    its = communicators.default_mpi() if comm is None else comm
    with survival.failing(its, operation), waiting(known, operation):
        yield clone_of(its), known

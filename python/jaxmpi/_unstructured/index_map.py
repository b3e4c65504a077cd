"""Maps of rows with global indices: the rows that this rank owns, and the rows of which it has copies."""

import contextlib
import dataclasses
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
from jaxmpi._operations.exchanges import index_accumulate_p, index_exchange_p, index_start_p, start_exchange
from jaxmpi._operations.requests import Request
from jaxmpi._primitive import arguments, keys
from jaxmpi._primitive import counts as by_counts
from jaxmpi._primitive.params import Planned
from jaxmpi._unstructured import arguments as checks
from jaxmpi._unstructured import directory
from jaxmpi._unstructured import ghosts as patterns
from jaxmpi._unstructured.lookup import Lookup, distinct


class IndexMap(communicators.Local):
    """Rows of arrays that are divided among the ranks by global indices, and copies of rows of other ranks.

    Each row of a global array has an index and is owned by one rank: the vertices of a mesh, the rows of a sparse
    matrix, the nodes of a graph. A rank has its own rows in any order, and behind them the ghosts: copies of rows that
    others own. The local number of a row is its place in the arrays of a rank:

        0 to owned - 1                  the rows that this rank owns, in the order of `owned`.
        owned to owned + ghosts - 1     the ghosts, sorted by the ranks that own them, then by global index.

    The map finds the owner of each ghost, and the ranks that have copies of this rank's rows. `exchange` then brings
    the rows of the owners to the ghosts, and `accumulate` adds the ghosts to the rows of the owners.

    All ranks of the communicator make the map together, outside of compiled functions. They use a directory that is
    divided among them, so that time, memory and messages of a rank grow with its own indices and neighbours. A map may
    be a static argument of `jax.jit`.

    The idea comes from PETSc's VecScatter and PetscSF, from DOLFINx's IndexMap and from Import and Export in Tpetra.

    Args:
      owned: the global indices of the rows that this rank owns, one dimension of integers, in any order and with any
        gaps. No index may be on two ranks. Empty on a rank that owns nothing.
      ghosts: the global indices of the other rows that this rank reads, in any order. Repeated indices count once, and
        rows that this rank owns are left out.
      owners: the rank that owns each of the ghosts, if it is known, on all ranks or on none. Then the map need not look
        up owners. It still checks that these ranks own the ghosts, but not whether a row is owned twice.
      comm: an intra-communicator. None: a clone of COMM_WORLD.

    Raises:
      ValueError: no rank owns a ghost, a row is owned twice, or `owners` is wrong: on all ranks. A negative index, one
        beyond int64, an array with another number of dimensions, `owners` on some of the ranks alone.
      TypeError: arrays that are traced, or not of integers. An error of an argument on one rank is raised on this rank,
        and on all others with the number of the rank. No rank is left waiting.
    """

    _numbering: Any = None
    """The order of the rows in files, of `jaxmpi._files.rows`, when it is known."""

    def __init__(self, owned: Any, ghosts: Any, *, owners: Any = None, comm: MPI.Comm | None = None):
        self._make(owned, ghosts, owners, comm, checks.Names())

    def _make(self, owned: Any, ghosts: Any, owners: Any, comm: MPI.Comm | None, names: checks.Names) -> None:
        with _together(comm, names.operation) as (clone, known):
            self._comm, rank, size = known, known.rank, known.size
            local, failure = agreement.capture(lambda: checks.rows(owned, ghosts, owners, names, rank, size))
            count = 0 if local is None else len(local.owned)
            total, with_owners = agreement.sums(clone, names.operation, failure, count, owners is not None)
            if with_owners not in (0, size):
                raise ValueError(
                    f"IndexMap: {with_owners} of {size} ranks have passed owners: pass them on all ranks, also an "
                    "empty array where there are no ghosts, or on none."
                )
            assert local is not None
            self._connections = directory.connect(clone, names, local, total)
        self._total = total
        self._mpi = communicators.default_mpi() if comm is None else comm
        self._pattern = patterns.pattern(self._connections, rank)
        self._owned, self._lookup = local.owned, local.lookup
        for array in (self._owned, self.ghosts):
            array.setflags(write=False)

    @classmethod
    def from_csr(
        cls, indptr: Any, indices: Any, *, rows: Any = None, comm: MPI.Comm | None = None
    ) -> "tuple[IndexMap, np.ndarray]":
        """Make the map of a square sparse matrix of which each rank has some rows. Return the columns by local numbers.

        A vector that is multiplied by the matrix is divided like the rows. The columns that belong to rows of other
        ranks become ghosts. After `exchange` an array of `map.sizes` rows has all entries that this rank's rows are
        multiplied with. Within a row the order of the entries is kept, so the local columns need not ascend.

        All ranks of the communicator call it.

        Args:
          indptr: where each row of this rank begins in `indices`, and the end of the last; as in `scipy.sparse` of the
            rows of this rank alone (`A[first:end].indptr`).
          indices: the columns of the entries, global indices.
          rows: the global index of each row of this rank. None: the rows of rank 0 come first, then those of rank 1.
          comm: an intra-communicator. None: a clone of COMM_WORLD.

        Returns:
          `(map, local)`: the map, which owns `rows`, and the local number of each column, of the shape of `indices`.

        It raises the errors of `IndexMap`, and a ValueError on all ranks if `indptr` or `rows` does not fit.
        """
        operation = "IndexMap.from_csr"
        with _together(comm, operation) as (clone, _):
            block, failure = agreement.capture(lambda: checks.csr(indptr, indices, rows, operation))
            (some_without,) = agreement.sums(clone, operation, failure, rows is None)
            if some_without not in (0, clone.size):
                raise ValueError(
                    f"{operation}: {some_without} of {clone.size} ranks have passed no rows: all or none do."
                )
            assert block is not None
            count, columns, owned = block
            if owned is None:
                first = clone.exscan(count) or 0
                owned = np.arange(first, first + count)
        new_map = cls.__new__(cls)
        unowned = (
            "The matrix is square: each column is the global index of a row, which one rank has. Pass the rows that "
            "are missing, or give the indices of this rank's rows by rows=."
        )
        new_map._make(owned, columns, None, comm, checks.Names(operation, "rows", "indices", unowned))
        return new_map, new_map.to_local(columns)

    @classmethod
    def from_edges(
        cls, senders: Any, receivers: Any, owner: Any, *, comm: MPI.Comm | None = None
    ) -> "tuple[IndexMap, np.ndarray, np.ndarray, np.ndarray]":
        """Make the map of a graph whose vertices are divided among the ranks. Return the edges of this rank by local
        numbers.

        An edge belongs to the rank that owns its receiver, where its message is added up. So the receiver is one of
        this rank's own rows, the sender one of these or a ghost. A step of a graph network has three parts: an
        `exchange` of the vertices, messages computed from the senders and the receivers of the edges, and a sum over
        the receivers. The sum, `jax.ops.segment_sum(messages, receivers, owned)`, needs no other rank.

        All ranks of the communicator call it.

        Args:
          senders, receivers: the vertices at both ends of each edge, global indices, as in jraph. All edges, or some of
            them, which must include all edges whose receiver this rank owns. Others are left out.
          owner: the rank that owns each vertex, for all vertices of the graph, the same on all ranks, as METIS gives
            it. (If no rank can hold this, `IndexMap(owned, senders)` and `to_local` do the same.)
          comm: an intra-communicator. None: a clone of COMM_WORLD.

        Returns:
          `(map, senders, receivers, edges)`. The map owns the vertices of this rank in ascending order. `senders` and
          `receivers` are the local numbers of the ends of this rank's edges. `edges` are the positions of these edges
          in the arguments, for data of edges: `features[edges]`.

        It raises the errors of `IndexMap`, and a ValueError on all ranks if the arrays do not fit each other, or
        if ranks have different owners of a vertex.
        """
        operation = "IndexMap.from_edges"
        with _together(comm, operation) as (clone, known):
            rank, size = known.rank, known.size
            own, failure = agreement.capture(lambda: checks.edges(senders, receivers, owner, operation, rank, size))
            digest = 0 if own is None else directory.digest_of(own[-1])
            (total,) = agreement.sums(clone, operation, failure, digest)
        assert own is not None
        if total != digest * size % (1 << 64):
            raise ValueError(
                f"{operation}: owner is not the same on all ranks: pass the rank of each vertex of the whole graph, as "
                "rank 0 has it: comm.bcast(owner)."
            )
        edges, sources, targets, owners = own
        needed = distinct(sources)
        needed = needed[owners[needed] != rank]
        new_map = cls.__new__(cls)
        new_map._make(np.flatnonzero(owners == rank), needed, owners[needed], comm, checks.Names(operation))
        return new_map, new_map.to_local(sources), new_map.to_local(targets), edges

    def __repr__(self) -> str:
        owned, ghosts = self.sizes
        return f"IndexMap(owned {owned}, ghosts {ghosts}, neighbors {self.neighbors})"

    def __eq__(self, other: object) -> bool:
        """Return whether another map has the same rows on each rank, on the same communicator. `jax.jit` takes it as
        the same static argument."""
        if not isinstance(other, IndexMap):
            return NotImplemented
        return (self._comm, self._connections.signature) == (other._comm, other._connections.signature)

    def __hash__(self) -> int:
        return hash(self._connections.signature)

    # --- sizes and indices -----------------------------------------------------------------------------------------

    @property
    def comm(self) -> MPI.Comm:
        """The communicator."""
        return self._mpi

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of rows that this rank owns, and the number of ghosts. Arrays have as many rows as the sum."""
        return self._connections.owned, len(self._connections.ghosts)

    @property
    def owned(self) -> np.ndarray:
        """The global indices of the rows that this rank owns, int64, in the order of local numbers. Read-only."""
        return self._owned

    @property
    def ghosts(self) -> np.ndarray:
        """The global indices of the ghosts, int64, in the order of local numbers. Read-only."""
        return self._connections.ghosts

    @property
    def owners(self) -> np.ndarray:
        """The rank that owns each ghost, int32, in the order of `ghosts`."""
        ranks, counts = zip(*self._connections.receives, strict=True) if self._connections.receives else ((), ())
        return np.repeat(np.array(ranks, np.int32), counts)

    @property
    def neighbors(self) -> tuple[int, ...]:
        """The ranks that own ghosts of this rank, or have ghosts that it owns, in ascending order."""
        return tuple(sorted({*dict(self._connections.receives), *dict(self._connections.sends)}))

    def to_local(self, indices: Any) -> np.ndarray:
        """Return the local numbers of rows.

        Args:
          indices: global indices of rows that this rank owns or has as ghosts, integers of any shape, not traced.

        Returns:
          An array of the same shape, of int32 if that holds all local numbers, else int64. No other rank need call it.

        Raises:
          ValueError: a row is neither owned nor a ghost here.
          TypeError: not integers, or traced.
        """
        wanted = checks.integers(indices, "IndexMap.to_local", "indices", any_shape=True)
        owned, ghosts = self.sizes
        flat = wanted.reshape(-1)
        local = self._lookup.positions(flat)
        others = np.flatnonzero(local < 0)
        at = self._lookup_of_ghosts.positions(flat[others])
        if len(unknown := flat[others][at < 0]):
            raise ValueError(
                f"IndexMap.to_local: rank {self._comm.rank} neither owns {checks.some(distinct(unknown))} nor has it "
                "among its ghosts. Make the map with all rows that this rank reads as ghosts."
            )
        local[others] = owned + at
        return local.reshape(wanted.shape).astype(np.int32 if owned + ghosts < 2**31 else np.int64)

    def to_global(self, rows: Any) -> np.ndarray:
        """Return the global indices of local numbers: the inverse of `to_local`.

        Args:
          rows: local numbers, integers of any shape, not traced.

        Returns:
          An int64 array of the same shape. No other rank need call it.

        Raises:
          ValueError: a number is negative or too large.
          TypeError: not integers, or traced.
        """
        wanted = checks.integers(rows, "IndexMap.to_global", "rows", any_shape=True)
        count = sum(self.sizes)
        if len(beyond := wanted[(wanted < 0) | (wanted >= count)]):
            raise ValueError(
                f"IndexMap.to_global: there are no rows {checks.some(distinct(beyond))}: the local numbers of rank "
                f"{self._comm.rank} are 0 to {count - 1}."
            )
        return self._indices[wanted]

    @functools.cached_property
    def _indices(self) -> np.ndarray:
        return np.concatenate([self._owned, self.ghosts])

    @functools.cached_property
    def _lookup_of_ghosts(self) -> Lookup:
        return Lookup.from_list(self.ghosts)

    def _check_alive(self, operation: str) -> None:
        communicators.check_alive(self._mpi, operation, "map")

    # --- rows and ghosts -------------------------------------------------------------------------------------------

    def exchange(self, tree: Any) -> Any:
        """Replace the ghosts by the rows that they copy: one operation, one message to each neighbour.

        All ranks of the map call it. It is linear, and its transpose is `accumulate`, so derivatives of any order are
        operations of the same kind. Under `jax.vmap` a batch travels in the same messages.

        Args:
          tree: an array of shape (owned + ghosts, ...) of any dtype that can be communicated, or a pytree of arrays
            with any dtypes and trailing shapes. `pad` makes it from the rows that this rank owns.

        Returns:
          The arrays with new ghosts, of the same structure, shapes and dtypes. Own rows do not change.

        Raises:
          ValueError: an array has another number of rows, or the communicator has been freed. While tracing, before
            anything is sent.
          TypeError: a dtype cannot be communicated. At the same time.
          jax.errors.JaxRuntimeError: at run time, on each rank that receives a message of another call: the ranks
            passed other arrays, use other maps, or called in another order. With `JAXMPI_CHECK=1` on all ranks, before
            anything is sent.
        """
        arrays, structure, params = self._checked("IndexMap.exchange", tree)
        return jax.tree.unflatten(structure, index_exchange_p.apply_to_all(params, arrays))

    def accumulate(self, tree: Any, op: MPI.Op = MPI.SUM) -> Any:
        """Add the ghosts to the rows that they copy, and clear the ghosts: one operation, one message to each
        neighbour.

        All ranks of the map call it. Contributions of several ranks are added in the order of the ranks, so results are
        the same in every run, to the last bit. It is linear, and its transpose is `exchange`. Under `jax.vmap` a batch
        travels in the same messages.

        Args:
          tree: an array of shape (owned + ghosts, ...) of a dtype that can be added, or a pytree of arrays with any
            dtypes and trailing shapes.
          op: MPI.SUM; or MPI.MAX or MPI.MIN, which replace a row by the largest or the smallest of the row and its
            copies. These two leave the ghosts as they are, and have no derivatives: in a function that is
            differentiated pass `jax.lax.stop_gradient(x)`.

        Returns:
          The arrays, of the same structure, shapes and dtypes. Ghosts of other ranks have been added to own rows, and
          ghosts are zero.

        It raises the errors of `exchange`, and a ValueError for another reduction.
        """
        operation = "IndexMap.accumulate"
        reduction = arguments.reduction(op, operation)
        if reduction.name not in ("SUM", "MAX", "MIN"):
            raise ValueError(f"{operation}: op must be MPI.SUM, MPI.MAX, MPI.MIN, got {reduction.name}.")
        check = lambda x, *names: arguments.reducible(x, reduction, *names)  # noqa: E731
        arrays, structure, params = self._checked(operation, tree, check, reduction.name)
        return jax.tree.unflatten(structure, index_accumulate_p.apply_to_all(params, arrays))

    def start(self, tree: Any) -> Request:
        """Start an exchange: rows travel while the program computes.

        The arguments are as for `exchange`, with 100 arrays at most.

        Returns:
          A `Request`. `jaxmpi.wait(request)` returns the result of the `exchange`. It holds the arrays too, so
          it is a pytree with these.

        It raises the errors of `exchange` that come while tracing. `wait` raises the errors at run time.
        """
        arrays, structure, params = self._checked("IndexMap.start", tree)
        return start_exchange("IndexMap.start", params, arrays, structure, index_start_p)

    def _checked(
        self, operation: str, tree: Any, check: Any = arguments.array, op: str | None = None
    ) -> tuple[list[Any], Any, Planned]:
        """Return the arrays, the structure, and the parameters of an exchange, or of the adjoint with a reduction."""
        self._check_alive(operation)
        arrays, names, structure = self._leaves(operation, tree, sum(self.sizes), check=check)
        pattern = self._pattern if op is None else dataclasses.replace(self._pattern, op=op)
        per_array = tuple((-x.ndim, name) for x, name in zip(arrays, names, strict=True))
        return arrays, structure, Planned(self._comm, pattern, per_array, op is not None)

    def gather(self, tree: Any, root: int | None = 0) -> Any:
        """Put the rows of all ranks into one array, in the ascending order of their global indices.

        All ranks of the map call it. Each call sends the global indices too, and the receivers sort them. It is linear:
        its transpose returns each row to the rank that owns it, and adds the contributions of all receivers. Under
        `jax.vmap` a batch travels in the same messages.

        Args:
          tree: an array of shape (owned, ...) or (owned + ghosts, ...), whose ghosts are left out, of any dtype that
            can be communicated; or a pytree of arrays. Trailing shapes and dtypes are the same on all ranks.
          root: rank that receives, static. None: all ranks.

        Returns:
          On root, arrays with a row for each index that a rank owns, of the same structure and dtypes. Gaps between
          indices have no rows. On other ranks `tree` itself.

        Raises:
          ValueError: an array has another number of rows, there are more than 2^31 - 1 in all, or the communicator has
            been freed. While tracing, before anything is sent; other ranks then wait.
          TypeError: a dtype cannot be communicated. At the same time.
        """
        function = "IndexMap.gather"
        self._check_alive(function)
        root = None if root is None else arguments.rank(root, self._comm, function, "root")
        arrays, _, structure = self._leaves(function, tree, self.sizes[0], sum(self.sizes))
        owned = self.sizes[0]
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
        """Return arrays of the rows that this rank owns, with zeros as ghosts. `exchange` fills the ghosts.

        Args:
          tree: an array of shape (owned, ...), or a pytree of these.

        Returns:
          Arrays of shape (owned + ghosts, ...), of the same structure and dtypes.

        Raises:
          ValueError: an array has another number of rows.
        """
        arrays, _, structure = self._leaves("IndexMap.pad", tree, self.sizes[0])
        padded = [keys.pad(x, [(0, self.sizes[1]), *[(0, 0)] * (x.ndim - 1)]) for x in arrays]
        return jax.tree.unflatten(structure, padded)

    def _leaves(
        self, operation: str, tree: Any, *counts: int, check: Any = arguments.array
    ) -> tuple[list[Any], list[str], Any]:
        """Return arrays with one of these numbers of rows, the names and the structure. Raise ValueError for others."""
        arrays, names, structure = arguments.leaves(tree, operation, "tree", check)
        owned, ghosts = self.sizes
        for x, name in zip(arrays, names, strict=True):
            if x.ndim == 0 or x.shape[0] not in counts:
                raise ValueError(
                    f"{operation}: {name} has shape {x.shape}, and rank {self._comm.rank} owns {owned} rows and has "
                    f"{ghosts} ghosts: the first axis must have this rank's {' or '.join(map(str, counts))} rows, "
                    f"beginning with the {owned} that it owns."
                )
        return arrays, names, structure


@contextlib.contextmanager
def _together(comm: MPI.Comm | None, operation: str) -> Iterator[tuple[MPI.Intracomm, communicators.Communicator]]:
    """Yield the clone on which ranks agree about the arguments of a function. Meanwhile report a rank that waits."""
    known = communicators.resolve(comm, operation)
    mpi_comm = communicators.default_mpi() if comm is None else comm
    with survival.failing(mpi_comm, operation), waiting(known, operation):
        yield clone_of(mpi_comm), known

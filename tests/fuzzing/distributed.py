"""Runs a program on this rank: operations of jaxmpi inside of jit, loops, checkpoints and rules of JAX."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI

import jaxmpi
from fuzzing import vectors
from fuzzing.programs import LENGTH, OF_MAPS, RETURNED, TAKING, Call, Comm, Local, Map, Wait


@functools.cache
def ring():
    """All ranks, periodic: as a grid, and as a communicator with neighbours."""
    size = MPI.COMM_WORLD.size
    grid = jaxmpi.Grid(size, size * (LENGTH - 2), periodic=True)
    return grid, MPI.COMM_WORLD.Create_cart([size], periods=[True])


@functools.cache
def index_map(rows):
    """All ranks make it together, before anything is traced: they do not all trace as far."""
    return jaxmpi.IndexMap(*rows.of(MPI.COMM_WORLD.rank))


@functools.cache
def grids(division):
    """The grids of a redistribution."""
    return [jaxmpi.Grid(tuple(map(len, blocks)), blocks) for blocks in (division.source, division.target)]


def prepare(division):
    """Makes what the ranks make together."""
    (index_map if isinstance(division, Map) else grids)(division)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["requests", "kept"], meta_fields=["comm"])
@dataclass(frozen=True)
class Flying:
    """What has been started: requests, of which the last is of the result; or without that `kept` is the result."""

    requests: Any
    kept: Any
    comm: Comm


class Distributed:
    """`rank` of `size`. `extra` is a zero that is added to all constants (it may be mapped), or None. `compiled`:
    all of the program is traced by `jax.jit`."""

    def __init__(self, rank, size, extra=None, compiled=False):
        self.rank, self.size, self.extra, self.compiled = rank, size, extra, compiled
        self.grid, self.ring = ring()

    def __call__(self, program, x, number):
        self.compiled = isinstance(lax.optimization_barrier(jnp.int32(0)), jax.core.Tracer)
        return self.run(program.body, list(x), number)[0]

    def run(self, body, values, number, given=()):
        """The result of a body, and what is in flight. `number` is the same on all ranks, and chooses branches."""
        values = list(values)
        flying = {-1 - i: its for i, its in enumerate(given)}
        for statement in body.statements:
            values.append(self.step(statement, values, flying, number))
        result = values[body.result]
        returned = [flying[key] for key in body.returned]
        return vectors.with_everything(result, values) if body.everything else result, returned

    def step(self, statement, values, flying, number):
        match statement:
            case Local("constant"):
                return self.constant(len(values))
            case Local("stop", (i,), ranks):
                return lax.stop_gradient(values[i]) if self.rank in ranks else values[i]
            case Local(kind, operands):
                return vectors.LOCAL[kind](*(values[i] for i in operands))
            case Comm():
                x = values[statement.operand]
                if self.rank in statement.constant_on:
                    x = self.constant(len(values))
                x = vectors.tie(x) if statement.ties else x
                if statement.also >= 0:
                    here = self.rank in statement.also_constant_on
                    x = (x, self.constant(len(values) + 1) if here else values[statement.also])
                if not statement.starts:
                    return self.seen(statement, self.communicate(statement, x), values)
                flying[len(values)] = self.begin(statement, x)
                return values[statement.operand]
            case Wait() if self.rank in statement.forgotten_on:
                return values[0]
            case Wait(keys, after):
                of = values[after] if after >= 0 else None
                results, of = self.finish([flying[key] for key in keys], of)
                if after >= 0:
                    values[after] = of
                seen = [self.seen(flying[key].comm, y, values) for key, y in zip(keys, results, strict=True)]
                return vectors.together(seen)
            case Call():
                y, returned = self.call(statement, values, flying, number)
                flying |= {len(values) + RETURNED * i: its for i, its in enumerate(returned)}
                return values[0] if self.rank in statement.dropped_on + statement.silent_on else y

    def seen(self, comm, y, values):
        """What a program makes of the result of an operation, for one operand or two."""
        y = y[0] + 0.5 * y[1] if comm.also >= 0 else y
        return values[0] if self.rank in comm.dropped_on else jnp.tanh(y) if comm.squash else y

    def constant(self, salt):
        constant = jnp.asarray(vectors.constant(self.rank, salt))
        return constant if self.extra is None else constant + self.extra

    # --- operations ------------------------------------------------------------------------------------------------

    def communicate(self, comm, x):
        """The result of an operation, as vectors of floating-point numbers, one for each of `x`."""
        y = getattr(self, f"_{comm.name}")(comm, self._as_sent(comm, x))
        return self._as_vectors(comm, self._combined(comm, y))

    def _as_sent(self, comm, x):
        return jax.tree.map(vectors.to_integer, x) if self.rank in comm.integer_on else x

    def _as_vectors(self, comm, y):
        if comm.name in ("pair", "sendrecv"):  # between two ranks, who may have sent something else each
            return jax.tree.map(lambda y: vectors.from_integer(y) if jnp.issubdtype(y.dtype, jnp.integer) else y, y)
        return jax.tree.map(vectors.from_integer, y) if comm.integer_on else y

    def _template(self, comm, x, dtype=None, length=LENGTH):
        return jax.tree.map(lambda leaf: self._template_of(comm, leaf, dtype or leaf.dtype, length), x)

    def _template_of(self, comm, x, dtype, length):
        if comm.template == "own":
            return x.astype(dtype)[:length]
        if self.extra is not None:
            return (jnp.zeros(length) + self.extra).astype(dtype)
        return jnp.zeros(length, dtype) if comm.template == "zeros" else jax.ShapeDtypeStruct((length,), dtype)

    def _stack(self, x):
        return jax.tree.map(lambda leaf: jnp.stack([leaf * (j + 1) for j in range(self.size)]), x)

    def _combined(self, comm, y):
        """Vectors made of what an operation returns: of stacks, of rows, or of blocks."""
        if comm.name in ("gather", "gatherv") and self.rank != comm.root:
            return self._padded(y, LENGTH)
        if comm.name in ("allgather", "alltoall", "gather", "neighbors"):
            return jax.tree.map(vectors.combine, y)
        if comm.name not in ("allgatherv", "alltoallv", "gatherv", "migrate", "redistribute", *OF_MAPS):
            return y
        return jax.tree.map(lambda leaf: vectors.combine_rows(leaf.ravel(), self.size), y)

    def _allgather(self, comm, x):
        return jaxmpi.allgather(x)

    def _allreduce(self, comm, x):
        return self._or_start(comm)(self._many(comm, x), getattr(MPI, comm.op))

    def _alltoall(self, comm, x):
        return self._or_start(comm)(self._stack(self._many(comm, x)))

    def _exchange(self, comm, x):
        return (self.grid.start if comm.starts else self.grid.exchange)(self._many(comm, x))

    def _neighbors(self, comm, x):
        return jaxmpi.neighbor_alltoall(jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), x), comm=self.ring)

    def _reduce_scatter(self, comm, x):
        return jaxmpi.reduce_scatter(self._stack(x), getattr(MPI, comm.op))

    def _exscan(self, comm, x):
        return jaxmpi.exscan(x, MPI.SUM)

    # Arrays divided by rows: of counts known while tracing, or at run time, of arrays with rows that do not count.

    def _counts(self, comm):
        return [vectors.rows(rank, comm.root) for rank in range(self.size)]

    def _parts(self, counts, x):
        """One behind the other the parts for all ranks, each of so many elements."""
        stacked = self._stack(x)
        return jax.tree.map(lambda leaf: jnp.concatenate([leaf[j, :n] for j, n in enumerate(counts)]), stacked)

    def _padded(self, x, length):
        return jax.tree.map(lambda leaf: vectors.padded(leaf, length), x)

    def _allgatherv(self, comm, x):
        counts = self._counts(comm)
        own = counts[self.rank]
        if comm.ring:
            return jaxmpi.allgatherv(jax.tree.map(lambda leaf: leaf[:own], x), counts)
        return jaxmpi.allgatherv(x, jnp.int32(own))[0]

    def _alltoallv(self, comm, x):
        sent = [vectors.rows(self.rank + 2 * j, comm.root) for j in range(self.size)]
        x = self._parts(sent, x)
        if comm.ring:
            received = [vectors.rows(i + 2 * self.rank, comm.root) for i in range(self.size)]
            return jaxmpi.alltoallv(x, sent, received)
        most = self.size * LENGTH
        return jaxmpi.alltoallv(self._padded(x, most), jnp.asarray(sent), rows=most)[0]

    def _gatherv(self, comm, x):
        counts = self._counts(comm)
        own = counts[self.rank]
        if comm.ring:
            return jaxmpi.gatherv(jax.tree.map(lambda leaf: leaf[:own], x), counts, comm.root)
        return jaxmpi.gatherv(x, jnp.int32(own), comm.root)[0]

    def _scatterv(self, comm, x):
        counts = self._counts(comm)
        root = self.rank == comm.root
        length = LENGTH if not comm.ring else counts[self.rank]
        x = self._parts(counts, x) if root else self._template(comm, x, length=length)
        if comm.ring:
            return self._padded(jaxmpi.scatterv(x, counts, comm.root), LENGTH)
        x = self._padded(x, self.size * LENGTH) if root else x
        return jaxmpi.scatterv(x, jnp.asarray(counts) if root else None, comm.root, rows=LENGTH)[0]

    # Rows that have global indices.

    def _as_rows(self, comm, x):
        count = sum(index_map(comm.map).sizes)
        return jax.tree.map(lambda leaf: vectors.as_rows(leaf, self.size, count), x)

    def _index_exchange(self, comm, x):
        rows = index_map(comm.map)
        return (rows.start if comm.starts else rows.exchange)(self._as_rows(comm, self._many(comm, x)))

    def _index_accumulate(self, comm, x):
        return index_map(comm.map).accumulate(self._as_rows(comm, x))

    # Rows that get new owners, and blocks of other grids.

    def _migrate(self, comm, x):
        owners = np.array(vectors.owners(self.rank, comm.root, comm.peer, self.size), np.int32)
        own, most = owners.size, self.size * LENGTH
        if comm.ring:
            x = jax.tree.map(lambda leaf: leaf[:own], x)
            return jaxmpi.migrate(x, owners, rows=most)[0]
        padding = np.full(LENGTH - own, self.size, np.int32)  # what is not read may be anything
        owners, count = lax.optimization_barrier((jnp.concatenate([owners, padding]), jnp.int32(own)))
        return jaxmpi.migrate(x, owners, rows=most, count=count)[0]

    def _redistribute(self, comm, x):
        source, target = comm.division.widths
        widths = {"axes": tuple(range(len(comm.division.source))), "source_width": source, "target_width": target}
        from_grid, to_grid = grids(comm.division)
        shape = [size + 2 * source for size in from_grid.local_shape]
        count = math.prod(shape)
        rows = jax.tree.map(lambda leaf: vectors.as_rows(leaf, self.size, count), self._many(comm, x))
        blocks = jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), rows)
        function = jaxmpi.iredistribute if comm.starts else jaxmpi.redistribute
        return function(blocks, from_grid, to_grid, **widths)

    def _barrier(self, comm, x):
        jaxmpi.barrier()
        return x

    def _bcast(self, comm, x):
        x = x if self.rank == comm.root else self._template(comm, x)
        return self._or_start(comm)(self._many(comm, x), comm.root)

    def _gather(self, comm, x):
        return jaxmpi.gather(x, comm.root)

    def _invariant(self, comm, x):
        return jaxmpi.invariant(x)

    def _at_run_time(self, comm, *ends):
        """Ranks and tags; those of some messages are traced, where anything is. What is started outside of a loop that
        is not compiled itself knows them, and a request that the loop carries must know as much inside."""
        known = comm.tag != 5 or (comm.starts and not self.compiled)
        return ends if known else lax.optimization_barrier(tuple(map(jnp.int32, ends)))

    def _pair(self, comm, x):
        source, dest = (comm.root, comm.peer) if self.size > 1 else (MPI.PROC_NULL, MPI.PROC_NULL)
        source, dest, tag = self._at_run_time(comm, source, dest, max(comm.tag, 0))
        dtype = jnp.int32 if comm.root in comm.integer_on else jnp.float64
        if self.rank == comm.root:
            jaxmpi.send(x, dest, tag=tag)
        if self.rank == comm.peer or self.size == 1:
            return jaxmpi.recv(self._template(comm, x, dtype), source, tag=tag)
        return x

    def _reduce(self, comm, x):
        return jaxmpi.reduce(x, getattr(MPI, comm.op), comm.root)

    def _replicate(self, comm, x):
        return jaxmpi.replicate(x)

    def _scan(self, comm, x):
        return jaxmpi.scan(x, getattr(MPI, comm.op))

    def _scatter(self, comm, x):
        root = self.rank == comm.root
        return jaxmpi.scatter(self._stack(x) if root else self._template(comm, x), comm.root)

    def _sendrecv(self, comm, x):
        source, dest, template, tag = self._round(comm, x)
        tags = {} if comm.tag < 0 else {"sendtag": tag, "recvtag": tag}
        return jaxmpi.sendrecv(x, template, source, dest, **tags)

    def _round(self, comm, x):
        """Source, destination, template and tag of a message round the ring."""
        source, dest = self.rank - comm.peer, self.rank + comm.peer
        integer = source % self.size in comm.integer_on
        if not comm.ring:
            source, dest = (r if 0 <= r < self.size else MPI.PROC_NULL for r in (source, dest))
        elif self.size:
            source, dest = source % self.size, dest % self.size
        template = self._template(comm, x, jnp.int32 if integer else jnp.float64)
        source, dest, tag = self._at_run_time(comm, source, dest, comm.tag)
        return source, dest, template, tag

    # --- what is started, and waited for -----------------------------------------------------------------------------

    def begin(self, comm, x):
        """A message may be several requests, or none; of other operations that is one."""
        x = self._as_sent(comm, x)
        if comm.name in ("barrier", "pair", "sendrecv"):
            requests, kept = getattr(self, f"_start_{comm.name}")(comm, x)
        else:
            requests, kept = [getattr(self, f"_{comm.name}")(comm, x)], None
        return Flying(requests, kept, comm.form())

    def finish(self, flying, after):
        """The results of some, and `after`, which is computed first."""
        requests = [its.requests for its in flying]
        match requests:
            case [[one]] if flying[0].comm.name == "exchange":
                results = self.grid.finish(one, after=after)
            case [[one]]:
                results = jaxmpi.wait(one, after=after)
            case _:
                results = jaxmpi.waitall(requests, after=after)
        results, after = results if after is not None else (results, None)
        results = [[results]] if len(flying) == len(requests[0]) == 1 else results
        return [self._result(its, got) for its, got in zip(flying, results, strict=True)], after

    def _result(self, flying, got):
        comm = flying.comm
        if flying.kept is not None:
            return self._as_vectors(comm, flying.kept)
        y = self._one(comm, got[-1], {"alltoall": 1, "index_exchange": 1, "redistribute": -1}.get(comm.name, 0))
        return self._as_vectors(comm, self._combined(comm, y))

    def _many(self, comm, x):
        if not comm.long:
            return x
        struct = lambda leaf: jax.eval_shape(vectors.many, leaf)  # noqa: E731
        return jax.tree.map(lambda leaf: (struct if isinstance(leaf, jax.ShapeDtypeStruct) else vectors.many)(leaf), x)

    def _one(self, comm, x, axis=0):
        return jax.tree.map(lambda leaf: leaf.take(-1, axis), x) if comm.long else x

    def _or_start(self, comm):
        return getattr(jaxmpi, f"i{comm.name}" if comm.starts else comm.name)

    def _start_barrier(self, comm, x):
        return [jaxmpi.ibarrier()], x

    def _start_pair(self, comm, x):
        source, dest = (comm.root, comm.peer) if self.size > 1 else (MPI.PROC_NULL, MPI.PROC_NULL)
        source, dest, tag = self._at_run_time(comm, source, dest, comm.tag)
        dtype = jnp.int32 if comm.root in comm.integer_on else jnp.float64
        template = self._many(comm, self._template(comm, x, dtype))
        receives = self.rank == comm.peer or self.size == 1
        requests, received = [], x
        blocks = self.rank in comm.blocking_on
        if self.rank == comm.root:
            if blocks:
                jaxmpi.send(self._many(comm, x), dest, tag=tag)
            else:
                requests.append(jaxmpi.isend(self._many(comm, x), dest, tag=tag))
        if receives and blocks:
            received = self._one(comm, jaxmpi.recv(template, source, tag=tag))
        elif receives:
            requests.append(jaxmpi.irecv(template, source, tag=tag))
        return requests, None if receives and not blocks else received

    def _start_sendrecv(self, comm, x):
        source, dest, template, tag = self._round(comm, x)
        template, x = self._many(comm, template), self._many(comm, x)
        if self.rank in comm.blocking_on:
            return [], self._one(comm, jaxmpi.sendrecv(x, template, source, dest, sendtag=tag, recvtag=tag))
        if comm.peer % 2:
            receive = jaxmpi.irecv(template, source, tag=tag)
            return [jaxmpi.isend(x, dest, tag=tag), receive], None
        send = jaxmpi.isend(x, dest, tag=tag)
        return [send, jaxmpi.irecv(template, source, tag=tag)], None

    # --- structure -------------------------------------------------------------------------------------------------

    def call(self, call, values, flying, number):
        salts = range(len(values), len(values) + len(call.operands) + len(call.closed))
        operands = [values[i] for i in call.operands + call.closed]
        if self.rank in call.constant_on:
            operands = [self.constant(salt) for salt in salts]
        args, closed = operands[: len(call.operands)], operands[len(call.operands) :]
        if call.kind in TAKING:
            given = [flying[key] for key in call.given]
            name = {"jaxmpi.jit": "jit", "scan": "scan_loop"}.get(call.kind, call.kind)  # scan is an operation, too
            return getattr(self, f"_{name}")(call, args, closed, number, given)
        return getattr(self, "_" + call.kind)(call, args, closed, number), []

    def _function(self, call, closed, number, body=0):
        """A body as a function of what is in flight and the call's operands, with what this rank does otherwise."""

        def function(given, *args):
            if self.rank in call.integer_in:
                args = [vectors.from_integer(x) for x in args]
            y, returned = self.run(call.bodies[body], [*args, *closed], number, given)
            if self.rank in call.stopped_on:
                y = lax.stop_gradient(y)
            if self.rank in call.silent_on:
                return (), returned
            return vectors.to_integer(y) if self.rank in call.integer_out else y, returned

        return function

    def _called(self, wrap, call, args, closed, number, given=()):
        args = [vectors.to_integer(x) for x in args] if self.rank in call.integer_in else args
        y, returned = wrap(self._function(call, closed, number))(given, *args)
        restored = self.rank in call.integer_out and self.rank not in call.silent_on
        return vectors.from_integer(y) if restored else y, returned

    def _jit(self, call, *rest):
        return self._called(jax.jit if call.kind == "jit" else jaxmpi.jit, call, *rest)

    def _call(self, *call):
        return self._called(lambda f: f, *call)[0]

    def _checkpoint(self, call, *rest):
        policy = getattr(jax.checkpoint_policies, call.policy) if call.policy else None
        policy = policy("kept") if "names" in call.policy else policy
        return self._called(functools.partial(jax.checkpoint, policy=policy), call, *rest)[0]

    def _cond(self, call, args, closed, number, given):
        def wrap(_):
            branches = [self._function(call, closed, number, body) for body in range(len(call.bodies))]
            chosen = (number + call.offset) % len(branches)
            if call.kind == "cond":
                return lambda *args: lax.cond(chosen == 0, *branches, *args)
            return lambda *args: lax.switch(chosen, branches, *args)

        return self._called(wrap, call, args, closed, number, given)

    _switch = _cond

    def _ends(self, call, y):
        """Loops have a carried value, so what functions do is done after them."""
        return lax.stop_gradient(y) if self.rank in call.stopped_on else y

    def _scan_loop(self, call, args, closed, number, given):
        carry, *more = args
        rows = [jnp.stack(vectors.rows_of(x, call.length)) for x in more]

        def step(carry, row):
            number, *more = row
            y, flying = self.run(call.bodies[0], [carry[0], *more, *closed], number, carry[1])
            return (y, [] if call.stacks else flying), (jnp.sin(y), flying if call.stacks else [])

        (carry, flying), (ys, stacked) = lax.scan(
            step, (carry, given), (jnp.arange(call.length), *rows), reverse=call.reverse
        )
        if call.stacks:
            flying = [jax.tree.map(lambda leaf, i=i: leaf[i], its) for i in range(call.length) for its in stacked]
        return self._ends(call, jnp.tanh(carry + jnp.sum(ys, axis=0))), flying

    def _fori(self, call, args, closed, number, given):
        carry, *more = args
        step = lambda i, carry: self.run(call.bodies[0], [carry[0], *more, *closed], i, carry[1])  # noqa: E731
        carry, flying = lax.fori_loop(0, call.length, step, (carry, list(given)))
        return self._ends(call, carry), flying

    def _while(self, call, args, closed, number, given):
        carry, *more = args
        step = lambda c: (c[0] + 1, *self.run(call.bodies[0], [c[1], *more, *closed], c[0], c[2]))  # noqa: E731
        _, carry, flying = lax.while_loop(lambda c: c[0] < call.length, step, (0, carry, list(given)))
        return self._ends(call, carry), flying

    # --- rules of the user's own -----------------------------------------------------------------------------------

    def _ruled(self, call):
        """A function of an extra zero, if there is one, and operands: rules cannot close over traced values."""

        def function(extra, *args):
            return type(self)(self.rank, self.size, extra, self.compiled)._function(call, [], 0)((), *args)[0]

        return function

    def _custom_jvp(self, call, args, closed, number):
        function = self._ruled(call)
        ruled = jax.custom_jvp(function)
        ruled.defjvp(lambda primals, tangents: jax.jvp(function, primals, tangents))
        return ruled(self.extra, *args)

    def _hand_jvp(self, call, args, closed, number):
        apply = self._ruled(call)
        ruled = jax.custom_jvp(lambda extra, x: apply(extra, jnp.sin(x)))

        @ruled.defjvp
        def rule(primals, tangents):
            extra, x = primals
            return ruled(extra, x), apply(extra, jnp.cos(x) * tangents[1])

        return jnp.tanh(ruled(self.extra, *args))

    def _jvp_alone(self, call, args, closed, number):
        apply = self._ruled(call)
        ruled = jax.custom_jvp(lambda extra, x: x)
        ruled.defjvp(lambda primals, tangents: (ruled(*primals), apply(primals[0], tangents[1])))
        return ruled(self.extra, *args)

    def _vjp_alone(self, call, args, closed, number):
        apply = self._ruled(call)
        ruled = jax.custom_vjp(lambda extra, x: x)

        def backward(extra, cotangent):
            return jax.tree.map(jnp.zeros_like, extra), *jax.vjp(lambda t: apply(extra, t), cotangent)[1](cotangent)

        ruled.defvjp(lambda extra, x: (ruled(extra, x), extra), backward)
        return ruled(self.extra, *args)

    def _custom_vjp(self, call, args, closed, number):
        function = self._ruled(call)
        ruled = jax.custom_vjp(function)
        ruled.defvjp(lambda *args: jax.vjp(function, *args), lambda pull, cotangent: pull(cotangent))
        return ruled(self.extra, *args)

    def _custom_vmap(self, call, args, closed, number):
        function = self._ruled(call)
        ruled = jax.custom_batching.custom_vmap(function)

        @ruled.def_vmap
        def rule(axis_size, batched, *args):
            axes = jax.tree.map(lambda mapped: 0 if mapped else None, batched)
            mapped = any(jax.tree.leaves(batched))
            return jax.vmap(function, in_axes=axes, axis_size=axis_size)(*args), mapped

        return ruled(self.extra, *args)

    # --- solvers ---------------------------------------------------------------------------------------------------

    def _solve(self, call, args, closed, number):
        b, w, symmetric = args[0], jnp.tanh(args[1]), call.kind == "symmetric"

        def matvec(u):
            return 2 * u + vectors.WEAK * w * self.run(call.bodies[0], [w * u if symmetric else u], 0)[0]

        return lax.custom_linear_solve(matvec, b, _richardson, transpose_solve=_richardson, symmetric=symmetric)

    _symmetric = _solve

    def _root(self, call, args, closed, number):
        b, w = args[0], jnp.tanh(args[1])

        def residual(u):
            return u - jnp.sin(b) - vectors.WEAK * w * jnp.tanh(self.run(call.bodies[0], [u], 0)[0])

        def solve(f, u):
            return lax.fori_loop(0, vectors.STEPS, lambda i, u: u - f(u), u)

        def tangent_solve(g, y):
            once = lambda g, y: lax.fori_loop(0, vectors.STEPS, lambda i, u: u + y - g(u), y)  # noqa: E731
            return lax.custom_linear_solve(g, y, once, transpose_solve=once) if call.offset else once(g, y)

        return lax.custom_root(residual, jnp.zeros(LENGTH) if self.extra is None else 0 * b, solve, tangent_solve)


def _richardson(matvec, b):
    return lax.fori_loop(0, vectors.STEPS, lambda i, u: u + (b - matvec(u)) / 2, b / 2)


class Deaf(Distributed):
    """The same structure where nothing is communicated: what JAX refuses here, it refuses without us."""

    def communicate(self, comm, x):
        if self.rank in comm.integer_on:
            return jax.tree.map(lambda x: vectors.from_integer(vectors.to_integer(x)), x)
        return jax.tree.map(lambda x: 0.5 * x, x)

    def begin(self, comm, x):
        return Flying([], self._as_sent(comm, x), comm.form())

    def _result(self, flying, got):
        return self.communicate(replace(flying.comm, integer_on=()), self._as_vectors(flying.comm, flying.kept))

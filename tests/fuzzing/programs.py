"""Random programs as plain data: all ranks make the same from the same seed, with what differs between ranks in it.

A program is a `Body`: statements, each of which appends one value to the environment, a vector of `LENGTH` numbers on
each rank. Operands are positions in the environment. `Ranks` name the ranks on which something is otherwise.

An operation that `starts` something appends its operand, and a `Wait` appends the result. What is in flight has a key:
the position of the start; in the body of a call -1, -2, ... for what the call was given; and for what a call returns
its position, plus RETURNED for each after the first.
"""

import itertools
import random
from dataclasses import dataclass, fields, replace
from typing import Union

import jax

LENGTH = 3
INPUTS = 2
Ranks = tuple[int, ...]
Statement = Union["Local", "Comm", "Wait", "Call"]

OPERATIONS = ("allgather", "allreduce", "alltoall", "barrier", "bcast", "gather", "pair", "reduce", "replicate", "scan")
OPERATIONS += ("scatter", "sendrecv", "exchange", "neighbors", "reduce_scatter", "exscan")
OF_ROWS = ("allgatherv", "alltoallv", "gatherv", "scatterv")
"""With `ring` of counts that are known while tracing, otherwise at run time."""
OPERATIONS += OF_ROWS
OF_MAPS = ("index_exchange", "index_accumulate")
"""With a map of rows that have global indices."""
OPERATIONS += OF_MAPS
OPERATIONS += ("migrate", "redistribute")
"""`invariant` is drawn in the place of some of `replicate`."""
STARTED = ("allreduce", "alltoall", "barrier", "bcast", "exchange", "index_exchange", "pair", "redistribute")
STARTED += ("sendrecv",)
"""What can be started and waited for."""
REDUCING = ("allreduce", "reduce", "scan", "reduce_scatter")
LINEAR = ("allgather", "alltoall", "bcast", "gather", "reduce", "scan", "scatter", "sendrecv", "exchange", "neighbors")
LINEAR += ("reduce_scatter", "exscan", *OF_ROWS, *OF_MAPS, "migrate", "redistribute")
LOCAL = {"sin": 1, "tanh": 1, "affine": 1, "roll": 1, "name": 1, "product": 2, "sum": 2, "dot": 2, "stop": 1}

FUNCTIONS = ("jit", "jaxmpi.jit", "checkpoint")
LOOPS = ("scan", "fori", "while")
BRANCHES = ("cond", "switch")
LINEAR_RULES = ("hand_jvp", "jvp_alone", "vjp_alone")  # the last two communicate in their rules alone
RULES = ("custom_jvp", "custom_vjp", "custom_vmap", *LINEAR_RULES)
SOLVERS = ("solve", "symmetric", "root")
KINDS = FUNCTIONS + LOOPS + BRANCHES + RULES + SOLVERS
TAKING = ("jit", "jaxmpi.jit", *LOOPS, *BRANCHES)
"""What may be given, and return, what is in flight."""
RETURNED = 1000
FORWARD_ONLY = ("while", "custom_vmap")  # JAX does not transpose them
REVERSE_ONLY = ("custom_vjp", "vjp_alone")


def _policies():
    """Names of the policies of `jax.checkpoint` that this JAX has and that stay on one device."""
    plain = ["nothing_saveable", "everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable"]
    named = ["save_only_these_names", "save_any_names_but_these", "save_anything_except_these_names"]
    return ["", *(name for name in plain + named if hasattr(jax.checkpoint_policies, name))]


@dataclass(frozen=True)
class Local:
    """Mathematics of one rank. `stop` lets no derivative through on `ranks`; a `constant` has no operand."""

    kind: str
    operands: tuple[int, ...]
    ranks: Ranks = ()


@dataclass(frozen=True)
class Map:
    """The arguments of an `IndexMap` on each rank: global indices, in any order and with gaps. Among the ghosts are
    repeated ones, and rows that the rank owns. Empty, a map without rows."""

    owned: tuple[tuple[int, ...], ...] = ()
    ghosts: tuple[tuple[int, ...], ...] = ()

    def of(self, rank):
        return (self.owned[rank], self.ghosts[rank]) if self.owned else ((), ())


Blocks = tuple[tuple[int, ...], ...]
"""Along each axis of a grid the cells of each process; the last axis of the processes varies fastest."""


@dataclass(frozen=True)
class Division:
    """The arguments of a redistribution: the blocks of two grids, and the widths of the halos in their arrays."""

    source: Blocks = ()
    target: Blocks = ()
    widths: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Comm:
    """An operation, whose result is made a vector again. A `pair` is send on `root` and recv on `peer`."""

    name: str
    operand: int
    op: str = "SUM"
    root: int = 0
    peer: int = 1
    """How far a sendrecv sends; the receiver of a pair."""
    ring: bool = True
    tag: int = -1
    template: str = "own"
    """What a rank passes whose operand is not read: its `own` operand, `zeros`, or a `struct`."""
    ties: bool = False
    squash: bool = True
    constant_on: Ranks = ()
    dropped_on: Ranks = ()
    integer_on: Ranks = ()
    """Who sends integers: everybody, or for messages between two ranks some."""
    also: int = -1
    """Another operand that is communicated with it, in a pytree; -1: none."""
    also_constant_on: Ranks = ()
    starts: bool = False
    """What follows is of what is waited for later. Messages: on these ranks it is the blocking operation after all."""
    blocking_on: Ranks = ()
    long: bool = False
    """Many copies of the vector are sent: more than a library sends at once."""
    map: Map = Map()
    division: Division = Division()

    def form(self):
        """What is the same for all that may take each other's place in a loop or a branch."""
        return replace(self, operand=0, also=min(self.also, 0), constant_on=(), also_constant_on=(), ties=False)

    def alike(self):
        """The same for all that MPI may not tell apart."""
        if self.name in ("pair", "sendrecv"):
            return ("message", self.tag)
        return "exchange" if self.name in ("exchange", "index_exchange", "redistribute") else "collective"


@dataclass(frozen=True)
class Wait:
    """Waits for what has these keys, one or several. `after` is an operand that is computed first; -1: none."""

    starts: tuple[int, ...]
    after: int = -1
    forgotten_on: Ranks = ()
    """Who never waits for them."""


@dataclass(frozen=True)
class Call:
    """A nested function, loop, choice or solver."""

    kind: str
    operands: tuple[int, ...]
    bodies: tuple["Body", ...]
    closed: tuple[int, ...] = ()
    policy: str = ""
    length: int = 2
    offset: int = 0
    """Of the number that chooses a branch."""
    reverse: bool = False
    constant_on: Ranks = ()
    """Where all operands are constants."""
    dropped_on: Ranks = ()
    """Where the result is not used."""
    silent_on: Ranks = ()
    """Where the function has no result."""
    stopped_on: Ranks = ()
    integer_in: Ranks = ()
    integer_out: Ranks = ()
    given: tuple[int, ...] = ()
    """The keys of what is in flight and is passed; a loop carries it."""
    stacks: bool = False
    """What each step of a scan returns in flight is stacked, and waited for after the loop."""


@dataclass(frozen=True)
class Body:
    statements: tuple[Statement, ...]
    result: int
    everything: bool = False
    """Every value goes into the result."""
    returned: tuple[int, ...] = ()
    """The keys of what is in flight at its end."""


@dataclass(frozen=True)
class Program:
    seed: int
    size: int
    body: Body
    forward: bool
    """Whether it can be differentiated forwards; and in reverse:"""
    reverse: bool


@dataclass(frozen=True)
class Options:
    """What programs may contain."""

    kinds: tuple[str, ...] = KINDS
    differ: float = 0.25
    """How likely a statement is to be otherwise on some ranks."""
    used: bool = False
    """Every result is used on every rank, and no message has halves: what JAX 0.6 needs."""
    documented: bool = False
    """Nothing that docs/autodiff.md excludes."""
    started: float = 0.5
    """How likely it is that an operation that can be started is, and is waited for later."""
    forgotten: float = 0.0
    """How likely it is that some ranks never wait for one."""
    operations: tuple[str, ...] = OPERATIONS
    """Which, where it may be any of these."""


def generate(seed: int, size: int, options: Options = Options()) -> Program:
    return _Generator(seed, size, options).program()


class _Generator:
    def __init__(self, seed, size, options):
        self.random = random.Random(f"{seed} {size}")
        self.seed, self.size, self.options = seed, size, options
        direction = self.random.choice(["both", "both", "both", "forward", "reverse"])
        banned = {"both": FORWARD_ONLY + REVERSE_ONLY, "forward": REVERSE_ONLY, "reverse": FORWARD_ONLY}[direction]
        self.kinds = [kind for kind in options.kinds if kind not in banned]
        if not self.kinds and options.kinds:  # a request for one kind counts
            self.kinds = list(options.kinds)
            direction = "forward" if self.kinds[0] in FORWARD_ONLY else "reverse"
        self.direction = direction
        self.tags = 10
        self.started = set()

    def program(self):
        body = self.body(INPUTS, depth=0, size=self.random.randint(2, 6))
        return Program(self.seed, self.size, body, self.direction != "reverse", self.direction != "forward")

    def chance(self, probability):
        return self.random.random() < probability

    def ranks(self, probability=None):
        """Some of the ranks, mostly none."""
        if not self.chance(self.options.differ if probability is None else probability):
            return ()
        return tuple(rank for rank in range(self.size) if self.chance(0.5))

    def body(self, known, depth, size, kinds=None, given=(), wanted=()):
        """A body on `known` values, which is given what is in flight, of these forms, and returns what is wanted."""
        kinds = self.kinds if kinds is None else kinds
        flying = {-1 - i: form for i, form in enumerate(given)}
        statements = [] if known else [Local("constant", ())]
        known = max(known, 1)
        calls = 0
        for _ in range(size):
            call = self.chance((0.4, 0.3, 0.15, 0)[depth]) or (depth == 0 and not calls and len(statements) >= 2)
            if flying and self.chance(0.25):
                statements.append(self.wait(flying, known))
            elif call and kinds:
                call, forms = self.call(known, depth, kinds, flying)
                statements.append(call)
                flying |= {known + RETURNED * i: form for i, form in enumerate(forms)}
                calls += 1
            elif self.chance(0.6):
                comm = self.comm(self.one(known), known=known)
                statements.append(comm)
                if comm.starts:
                    flying[known] = comm.form()
            else:
                statements.append(self.local(known))
            known += 1
        returned = []
        for form in wanted:
            found = [key for key, its in flying.items() if its == form and self.chance(0.5)]
            if found:
                returned.append(found[0])
                del flying[found[0]]
            else:
                statements.append(self.again(form, known))
                returned.append(known)
                known += 1
        while flying:
            statements.append(self.wait(flying, known))
            known += 1
        result = known - 1 if self.chance(0.7) else self.random.randrange(known)
        return Body(tuple(statements), result, self.options.used or self.chance(0.2), tuple(returned))

    def wait(self, flying, known):
        """For something that is in flight, which it then is no longer."""
        chosen = self.random.sample(sorted(flying), min(len(flying), self.random.choice([1, 1, 1, 2])))
        keys = [self.first_like(flying, form) for form in [flying[key] for key in chosen]]
        after = self.one(known) if self.chance(0.3) else -1
        return Wait(tuple(keys), after, self.ranks(self.options.forgotten) if self.options.forgotten else ())

    def first_like(self, flying, form):
        """What is waited for first where this might be, as it must be in reverse mode; it is no longer in flight."""
        first = min(k for k in flying if flying[k].alike() == form.alike())
        del flying[first]
        return first

    def again(self, form, known):
        """Another start of the same form."""
        also = self.one(known) if form.also >= 0 else -1
        more = {"constant_on": self.ranks(), "also_constant_on": self.ranks()}
        return replace(form, operand=self.one(known), also=also, **more)

    def one(self, known):
        """An operand, rather a late one."""
        return known - 1 if self.chance(0.6) else self.random.randrange(known)

    def local(self, known):
        kind = self.random.choice([k for k in LOCAL if not (self.options.used and k == "stop")])
        operands = tuple(self.one(known) for _ in range(LOCAL[kind]))
        return Local(kind, operands, tuple(r for r in range(self.size) if self.chance(0.5)) if kind == "stop" else ())

    def comm(self, operand, names=OPERATIONS, known=0):
        names = [n for n in names if n in self.options.operations] or names
        name = self.random.choice([n for n in names if not (self.options.used and n == "pair")])
        root = self.random.randrange(self.size)
        peer = self.random.randrange(1, max(self.size, 2))
        if name == "replicate" and root > 0:
            name = "invariant"
        if name == "pair" and self.size > 1:
            peer = (root + peer) % self.size
        floating = name in ("barrier", "invariant", "replicate")
        integers = () if floating or not self.chance(0.12) else tuple(range(self.size))
        if integers and name in ("pair", "sendrecv"):
            integers = self.ranks(1)
        comm = Comm(
            name,
            operand,
            op=self.random.choice(["SUM", "SUM", "PROD", "MAX", "MIN"]) if name in REDUCING else "SUM",
            root=root,
            peer=peer,
            ring=self.chance(0.7),
            tag=self.random.choice([-1, 2, 5]),
            template=self.random.choice(["own", "zeros", "struct"]),
            ties=name in REDUCING and self.chance(0.1),
            constant_on=self.ranks(),
            dropped_on=() if self.options.used else self.ranks(),
            integer_on=integers,
            also=self.one(known) if known > 0 and self.chance(0.3) else -1,
            also_constant_on=self.ranks(),
            map=self.map() if name in OF_MAPS else Map(),
            division=self.division() if name == "redistribute" else Division(),
        )
        if not (known > 0 and name in STARTED and self.chance(self.options.started)):
            return comm
        return self.starting(comm)

    def map(self):
        """As many rows as the vectors of all ranks have at most, owned by some of the ranks."""
        rows = self.random.sample(range(100), self.random.randint(0, LENGTH * self.size))
        ranks = self.random.sample(range(self.size), self.random.randint(1, self.size))
        owners = [self.random.choice(ranks) for _ in rows]
        owned = tuple(
            tuple(row for row, owner in zip(rows, owners, strict=True) if owner == rank) for rank in range(self.size)
        )
        counts = [self.random.randint(0, len(rows)) if self.chance(0.8) else 0 for _ in range(self.size)]
        return Map(owned, tuple(tuple(self.random.choices(rows, k=count)) if count else () for count in counts))

    def division(self):
        """Blocks, with halo, of at most as many cells as the vectors of all ranks have."""
        if self.chance(0.5):
            width = (self.random.randrange(2), self.random.randrange(2))
            cells = self.random.randint(1, max(1, LENGTH * self.size - 2 * max(width)))
            return Division((self.cut(cells, self.size),), (self.cut(cells, self.size),), width)
        first = self.random.randint(1, LENGTH * self.size)
        shape = first, self.random.randint(1, LENGTH * self.size // first)
        source, target = (
            tuple(self.cut(cells, count) for cells, count in zip(shape, self.processes(), strict=True))
            for _ in range(2)
        )
        return Division(source, target)

    def processes(self):
        first = self.random.choice([n for n in range(1, self.size + 1) if self.size % n == 0])
        return first, self.size // first

    def cut(self, cells, count):
        """So many cells in so many parts, some of which may have none."""
        ends = sorted(self.random.randint(0, cells) for _ in range(count - 1))
        return tuple(end - start for start, end in itertools.pairwise([0, *ends, cells]))

    def starting(self, comm):
        comm = replace(comm, starts=True, long=self.chance(0.15), tag=self.random.choice([1, 3, 4, 5]))
        only = self.options.documented  # what is alike is waited for in the order of its starts: so nothing is
        if comm.name in ("pair", "sendrecv") and self.chance(1 if only else 0.3):
            # Where ranks wait at different places, the messages of derivatives are told apart by their tags alone.
            self.tags += 1
            comm = replace(comm, tag=self.tags, blocking_on=self.ranks(1))
        if only and comm.alike() in self.started:
            comm = replace(
                comm, name="allreduce", op="SUM", map=Map(), division=Division()
            )  # whose adjoint communicates nothing
        self.started.add(comm.alike())
        return comm

    def call(self, known, depth, kinds, flying):
        """A call, and the forms of what it returns in flight."""
        kind = self.random.choice(kinds)
        if kind in SOLVERS:
            return self.solver(kind, known), []
        if kind in LINEAR_RULES:
            return self.linear_rule(kind, known), []
        inner = kinds
        if kind in ("custom_jvp", "custom_vmap"):  # differentiated forwards in reverse mode too
            inner = [k for k in kinds if k not in REVERSE_ONLY]
        elif kind in ("scan", "fori"):  # JAX itself takes second derivatives there as if it were that of its function
            inner = [k for k in kinds if k != "jvp_alone"]
        bare = kind in FUNCTIONS and self.chance(0.15) and not self.options.documented
        operands = () if bare else tuple(self.one(known) for _ in range(self.random.randint(1, 2)))
        closes = kind not in RULES and not bare and self.chance(0.4)
        closed = tuple(self.one(known) for _ in range(self.random.randint(1, 2))) if closes else ()
        count = {"cond": 2, "switch": 3}.get(kind, 1)
        parameters = len(operands) + len(closed)
        given, forms, wanted, stacks = self.passed(kind, known, flying)
        length = self.random.choice([1, 2, 2, 3])
        bodies = tuple(
            self.body(parameters, depth + 1, self.random.randint(1, 3), inner, forms, wanted) for _ in range(count)
        )
        call = Call(
            kind,
            operands,
            bodies,
            closed,
            policy=self.random.choice(_policies()) if kind == "checkpoint" else "",
            length=length,
            offset=self.random.randrange(3),
            reverse=self.chance(0.5),
            given=given,
            stacks=stacks,
        )
        return self.varied(call), wanted * (length if stacks else 1)

    def passed(self, kind, known, flying):
        """Of what is in flight that which a call is given: its keys and forms; and the forms of what it returns."""
        if kind not in TAKING:
            return (), [], [], False
        keys = tuple(key for key in sorted(flying) if self.chance(0.4))
        forms = [flying.pop(key) for key in keys]
        stacks = kind == "scan" and not keys and self.chance(0.5)
        if kind in LOOPS and not stacks:
            return keys, forms, forms, False
        fresh = [replace(self.comm(0, STARTED, known), starts=False) for _ in range(self.random.choice([0, 0, 1, 2]))]
        fresh = [self.starting(comm).form() for comm in fresh]
        if stacks:  # waited for in any order, on all ranks alike
            fresh = [replace(form, blocking_on=()) for form in fresh]
            if self.options.documented:
                fresh = [replace(form, name="allreduce", op="SUM", map=Map(), division=Division()) for form in fresh]
        kept = [form for form in forms if self.chance(0.3)]
        return keys, forms, [*fresh, *kept], stacks

    def varied(self, call):
        """A call, otherwise on some ranks."""
        ours = self.options
        rule = call.kind in RULES
        call = replace(call, constant_on=() if rule and ours.documented else self.ranks())
        if ours.used:
            return call
        call = replace(call, dropped_on=self.ranks(), stopped_on=self.ranks(ours.differ / 2))
        if call.kind in FUNCTIONS + BRANCHES and not ours.documented:
            everywhere = tuple(range(self.size))
            call = replace(
                call,
                silent_on=self.ranks(ours.differ / 2),
                integer_in=everywhere if self.chance(0.05) else self.ranks(ours.differ / 2),
                integer_out=everywhere if self.chance(0.05) else self.ranks(ours.differ / 2),
            )
        return call

    def linear_rule(self, kind, known):
        # A template in a rule written by hand must depend on the tangent, as docs/autodiff.md says.
        statements = self.linear(0, 1, template="own")
        body = Body(statements, len(statements))
        call = Call(kind, (self.one(known),), (body,))
        # What is done to the result would be done to its tangent too, by the rule.
        return call if self.options.documented else replace(self.varied(call), stopped_on=())

    def solver(self, kind, known):
        if kind == "symmetric":
            statements = [Comm("replicate", 0, squash=False), Comm("allreduce", 1, squash=False)]
        else:
            statements = [*self.linear(0, 1)]
            if self.chance(0.5):
                first = len(statements)
                statements += self.linear(0, first + 1)
                statements.append(Local("plus", (first, len(statements))))
        call = Call(kind, (self.one(known), self.one(known)), (Body(tuple(statements), len(statements)),))
        call = replace(call, offset=self.random.randrange(2))
        return call if self.options.documented else replace(call, constant_on=self.ranks(), dropped_on=self.ranks())

    def linear(self, operand, at, **more):
        """An operation that is linear in its operand on all ranks: one statement at this position, or two."""
        plain = {"op": "SUM", "ties": False, "squash": False, "constant_on": (), "dropped_on": (), "integer_on": ()}
        template = "own" if self.options.documented or self.chance(0.8) else "zeros"
        comm = replace(self.comm(operand, LINEAR), **{"template": template, "also": -1, **plain, **more})
        if comm.name not in STARTED or not self.chance(self.options.started):
            return (comm,)
        return replace(comm, starts=True, tag=2), Wait((at,))


def parameters(call):
    """How many values the bodies of a call are given."""
    return 1 if call.kind in (*SOLVERS, *LINEAR_RULES) else len(call.operands) + len(call.closed)


def divisions(body):
    """The maps, and the divisions of redistributions, of a body and of those inside, in order."""
    for statement in body.statements:
        if getattr(statement, "name", "") in OF_MAPS:
            yield statement.map
        if getattr(statement, "name", "") == "redistribute":
            yield statement.division
        for inner in getattr(statement, "bodies", ()):
            yield from divisions(inner)


def forgets(body):
    """Whether a rank does not wait for all that it starts."""
    inner = [body for statement in body.statements for body in getattr(statement, "bodies", ())]
    return any(getattr(statement, "forgotten_on", ()) for statement in body.statements) or any(map(forgets, inner))


def sound(body):
    """Whether everything that is started is waited for once."""
    try:
        return _returned(body, INPUTS, []) == []
    except (KeyError, ValueError):
        return False


def _returned(body, known, given):
    """The forms of what a body returns in flight; an error if something is waited for twice, or never."""
    flying = {-1 - i: form for i, form in enumerate(given)}
    for position, statement in enumerate(body.statements, known):
        if isinstance(statement, Comm) and statement.starts:
            flying[position] = statement.form()
        elif isinstance(statement, Wait):
            for key in statement.starts:
                del flying[key]
        elif isinstance(statement, Call):
            forms = [flying.pop(key) for key in statement.given]
            returned, *others = [_returned(inner, parameters(statement), forms) for inner in statement.bodies]
            loops = statement.kind in LOOPS and not statement.stacks
            if any(other != returned for other in others) or (loops and returned != forms):
                raise ValueError("they must be alike")
            returned = returned * (statement.length if statement.stacks else 1)
            flying |= {position + RETURNED * i: form for i, form in enumerate(returned)}
    returned = [flying.pop(key) for key in body.returned]
    if flying:
        raise ValueError("not all is waited for")
    return returned


# --- printing ----------------------------------------------------------------------------------------------------


def show(body, known=INPUTS, indent=""):
    """The lines of a body: of each statement its kind or name, its operands, and what differs from the default."""
    lines = []
    for position, statement in enumerate(body.statements, known):
        names = [field.name for field in fields(statement) if getattr(statement, field.name) != field.default]
        shown = [f"{name}={getattr(statement, name)}" for name in names if name not in ("bodies", "kind", "name")]
        kind = getattr(statement, "kind", getattr(statement, "name", "wait"))
        lines.append(f"{indent}v{position} = {kind}({', '.join(shown)})")
        for inner in getattr(statement, "bodies", ()):
            lines += [f"{indent}  of v0 to v{parameters(statement) - 1}:"]
            lines += show(inner, parameters(statement), indent + "    ")
    everything = " + 0.1 * everything" if body.everything else ""
    return [*lines, f"{indent}return v{body.result}{everything}", *[f"{indent}  and r{key}" for key in body.returned]]

"""How the groups of devices are read from a program's text, against counting them one by one."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from jaxmpi._sharded.replica_groups import Unreadable, _checked, _groups, _Reader, collectives
from support.launch import launch
from support.rows import each

pytestmark = pytest.mark.alone


NOTED = [
    ("{}", [(0, 1, 2, 3)]),
    ("[2,2]<=[2,2]T(1,0)", [(0, 2), (1, 3)]),
    ("mesh['a'=4] {'a':(2)2,'a':(1)2}", [(0, 2, 1, 3)]),
    ("mesh['a'=2,'b'=2] {'b','a'}", [(0, 2, 1, 3)]),
    ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [(0, 2), (1, 3)]),
    ("mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b','a'}", [(3, 2, 1, 0)]),
    ("mesh[a=2,axis_1=2] {a}", [(0, 2), (1, 3)]),
]


def groups_in(text, ids):
    """The groups that XLA writes behind `replica_groups=`, of so many ids."""
    read = _Reader(text)
    groups = _checked(_groups(read), ids)
    if read.next:
        raise read.unlike("the end")
    return groups


def test_notations():
    each(NOTED, lambda row: _equal(groups_in(row[0], 4), row[1]), lambda row: row[0])


def _equal(found, expected):
    assert found == expected


# --- random groups: what a text means is counted by XLA's definitions, one device after the other ---


def divided(rng, number, most=4):
    """Random sizes, some of them 1, with this product."""
    sizes = []
    while number > 1 and len(sizes) < most - 1:
        sizes.append(rng.choice([n for n in range(1, number + 1) if number % n == 0]))
        number //= sizes[-1]
    sizes.append(number)
    return sizes


def coordinates(position, sizes):
    found = []
    for size in reversed(sizes):
        position, digit = divmod(position, size)
        found.insert(0, digit)
    return found


def random_iota(rng, count):
    """The text of 0, 1, … with the axes in another order, and its numbers."""
    sizes = divided(rng, count)
    order = rng.sample(range(len(sizes)), len(sizes))
    numbers = []
    for place in itertools.product(*(range(sizes[axis]) for axis in order)):
        index = dict(zip(order, place, strict=True))
        number = 0
        for axis, size in enumerate(sizes):
            number = number * size + index[axis]
        numbers.append(number)
    turned = f"T({','.join(map(str, order))})" if order != sorted(order) or rng.random() < 0.3 else ""
    return f"[{','.join(map(str, sizes))}]{turned}", numbers


def by_lists(rng, count):
    ids, groups = rng.sample(range(count), count), []
    while ids:
        groups.append(tuple(ids[: (size := rng.randint(1, len(ids)))]))
        ids = ids[size:]
    return "{" + ",".join(f"{{{','.join(map(str, group))}}}" for group in groups) + "}", groups


def by_rows(rng, count):
    text, numbers = random_iota(rng, count)
    size = rng.choice([n for n in range(1, count + 1) if count % n == 0])
    groups = [tuple(numbers[i : i + size]) for i in range(0, count, size)]
    return f"[{count // size},{size}]<={text}", groups


NAMES = ["x", "axis_0", "a.b", "<axis> def", "c=2, d] {e", "ü/(1)2:", 'd"', "device_ids"]


def random_parts(rng, sizes):
    """Axes and parts of axes: (axis, product of the sizes before it, size), such that none overlap."""
    parts = []
    for axis, size in enumerate(sizes):
        if rng.random() < 0.4:
            parts.append((axis, None, size))
            continue
        before = 1
        for factor in divided(rng, size):
            if factor > 1 and rng.random() < 0.5:
                parts.append((axis, before, factor))
            before *= factor
    return rng.sample(parts, len(parts))


def by_mesh(rng, count):
    sizes = divided(rng, count)
    names = rng.sample(NAMES, len(sizes))
    ids, where = list(range(count)), ""
    if rng.random() < 0.6:
        text, ids = random_iota(rng, count)
        if rng.random() < 0.5:
            ids = rng.sample(range(count), count)
            text = ",".join(map(str, ids))
        where = f", device_ids=({text})"
    parts = random_parts(rng, sizes)
    found = {}
    for position, device in enumerate(ids):
        rest, digits = coordinates(position, sizes), []
        for axis, before, size in parts:
            behind = sizes[axis] // ((before or 1) * size)
            digits.append(rest[axis] // behind % size)
        for (axis, before, size), digit in zip(parts, digits, strict=True):
            rest[axis] -= digit * (sizes[axis] // ((before or 1) * size))
        found.setdefault(tuple(rest), {})[tuple(digits)] = device
    groups = [tuple(group[place] for place in sorted(group)) for _, group in sorted(found.items())]
    axes = ",".join(f"'{name}'={size}" for name, size in zip(names, sizes, strict=True))
    over = ",".join(f"'{names[axis]}'" + (f":({before}){size}" if before else "") for axis, before, size in parts)
    return f"mesh[{axes}]{where} {{{over}}}", groups


NOTATIONS = {"lists": by_lists, "rows": by_rows, "mesh": by_mesh}


def test_random_groups():
    def check(notation):
        rng = random.Random(17)
        for _ in range(300):
            count = rng.choice([1, 2, 3, 4, 6, 8, 12, 16, 24, 36])
            text, expected = NOTATIONS[notation](rng, count)
            assert sorted(groups_in(text, count)) == sorted(expected), text

    each(NOTATIONS, check)


def test_changed_texts():
    """Of what is cut, doubled or exchanged, nothing is read but a division of the ids; most is not read at all."""
    rng, read = random.Random(18), 0
    for _ in range(1000):
        count = rng.choice([4, 6, 8, 12])
        text, _ = NOTATIONS[rng.choice(list(NOTATIONS))](rng, count)
        i, j = sorted(rng.sample(range(len(text) + 1), 2))
        text = rng.choice(
            [text[:i] + text[j:], text[:i] + text[i:j] * 2 + text[j:], text[:i] + rng.choice("09,'{]T(:") + text[j:]]
        )
        try:
            groups = groups_in(text, count)
        except Unreadable:
            continue
        assert sorted(itertools.chain(*groups)) == list(range(count)), text
        read += 1
    assert read < 200


UNREADABLE = [
    "",
    "somewhat",
    "{{0,1},{2}}",
    "{{0,1},{2,3}",
    "{0,1,2,3}",
    "[2,2]<=[5]",
    "[4]<=[4]",
    "[2,2]<=[2,2]T(1,1)",
    "[2,2]<=[4]S",
    "mesh['a'=2] {'a'}",
    "mesh['a'=2,'a'=2] {'a'}",
    "mesh['a'=4] {'b'}",
    "mesh['a'=4] {'a','a'}",
    "mesh['a'=4] {'a','a':(1)2}",
    "mesh['a'=4] {'a':(3)2}",
    "mesh['a'=4] {'a':2}",
    "mesh['a'=4]",
    "mesh['a'=4], device_ids=(0,1,2,2) {'a'}",
    "mesh['a'=4], device_ids=[4] {'a'}",
    "mesh['a'=4], ids=([4]) {'a'}",
    "mesh['d'ef'=4] {'d'ef'}",
    "maximal_mesh[device_id=5] {}",
    "@mesh<a=4> {a}",
]


def test_what_is_not_read():
    def check(text):
        with pytest.raises(Unreadable):
            groups_in(text, 4)

    each(UNREADABLE, check)


# --- instructions: their attributes in any order, beside others that hold the same characters ---

HEADER = "HloModule m, is_scheduled=true, entry_computation_layout={(f32[4]{0:T(8)}, /*index=1*/s32[])->f32[8]{0}}"
BESIDE = [
    "dimensions={0}",
    "to_apply=%region_0.3.clone",
    "constrain_layout=true",
    "sharding={mesh['a'=2,'b c'=2], [{'a'}, {?}]}",
    r"""metadata={op_name="jit(f)/a \"b\", replica_groups={{0}}, {[(" source_file="x.py" source_line=3}""",
    'backend_config={"outer_dimension_partitions":["2"],"x":{"y":-1.5e3}}',
    'frontend_attributes={a="channel_id=7, use_global_device_ids=true"}',
]
SHAPES = ["f32[4,2]{1,0}", "f32[]", "(f32[4]{0:T(8,128)(2,1)}, /*index=5*/s32[2,2]{1,0})", "((u8[3]), u32[])"]
OPERANDS = ["%p", "f32[4]{0} %p.1, /*index=1*/%all-gather.2", "", "(f32[2], f32[]) %t"]


def positions(opcode, channel, flattened, group_of, replicas, partitions):
    """By XLA's definitions: the group of each device, which is (replica, partition)."""
    found = set()
    for replica, partition in itertools.product(range(replicas), range(partitions)):
        if flattened:
            members = [divmod(i, partitions) for i in group_of(replica * partitions + partition)]
        elif channel and opcode in ("all-reduce", "all-gather", "reduce-scatter"):
            members = [(r, p) for r in group_of(replica) for p in range(partitions)]
        elif channel:
            members = [(replica, p) for p in group_of(partition)]
        else:
            members = [(r, partition) for r in group_of(replica)]
        found.add(tuple(r * partitions + p for r, p in members))
    return sorted(found)


def random_instruction(rng):
    opcode = rng.choice(["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"])
    replicas, partitions = rng.choice([1, 1, 2, 3]), rng.choice([1, 2, 4, 6])
    permute = opcode == "collective-permute"
    channel = rng.random() < 0.7
    flattened = channel and opcode in ("all-reduce", "all-gather", "reduce-scatter") and rng.random() < 0.6
    of_replicas = not channel or opcode in ("all-reduce", "all-gather", "reduce-scatter")
    count = replicas * partitions if flattened else replicas if of_replicas else partitions
    text, groups = NOTATIONS[rng.choice(list(NOTATIONS))](rng, count)
    if permute or rng.random() < 0.1:
        text, groups = "{}", [tuple(range(count))]
    attributes = [f"replica_groups={text}"]
    if permute:
        attributes = [f"source_target_pairs={{{','.join(f'{{{i},{count - 1 - i}}}' for i in range(count))}}}"]
    attributes += ["channel_id=3"] * channel + ["use_global_device_ids=true"] * flattened
    attributes += rng.sample(BESIDE, rng.randint(0, 4))
    rng.shuffle(attributes)
    start = rng.choice(["", "-start"])
    line = (
        f"  {rng.choice(['', 'ROOT '])}{rng.choice(['%', ''])}{opcode}.7 = {rng.choice(SHAPES)} {opcode}{start}"
        f"({rng.choice(OPERANDS)}), {', '.join(attributes)}"
    )
    members = {i: group for group in groups for i in group}
    expected = positions(opcode, channel, flattened, members.__getitem__, replicas, partitions)
    counts = [f"replica_count={replicas}"] * (replicas > 1) + [f"num_partitions={partitions}"] * (partitions > 1)
    return ", ".join([HEADER, *counts]), line, opcode, replicas * partitions, expected


AROUND = r"""
FileNames
1 "all-reduce(it's.py"

%region_0.3 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0), metadata={op_name="x = f32[] all-reduce(y), replica_groups={{9}}"}
  ROOT %s = f32[] add(%a, %all-reduce.5), metadata={op_name="replica_groups=\""}
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %d = f32[4]{0} all-gather-done(%all-gather-start), metadata={op_name="z"}
LINE
}
"""


def test_random_instructions():
    rng = random.Random(19)
    for _ in range(600):
        header, line, opcode, devices, expected = random_instruction(rng)
        ((found, where),) = collectives(header + AROUND.replace("LINE", line), devices)
        assert where == line
        assert (found.opcode, sorted(found.groups)) == (opcode, expected), line
        assert f" = {found.shapes} {opcode}" in line


GOOD = "  %x = f32[4]{0} all-reduce(%p), channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true"


PROGRAMS = [
    (HEADER, GOOD),
    (HEADER + ", num_partitions=8", GOOD),
    (HEADER + ", replica_count=2, num_partitions=4", GOOD),
    ("HloModul m, num_partitions=4", GOOD),
    ("", GOOD),
    (HEADER + ", num_partitions=4", GOOD.replace("{{0,1},{2,3}}", "mesh['d'ef'=4] {'d'ef'}")),
    (HEADER + ", num_partitions=4", GOOD.replace("{{0,1},{2,3}}", "mesh['a\nb'=4] {'a\nb'}")),
    (HEADER + ", num_partitions=4", GOOD.replace("{{0,1},{2,3}}", "{{0,1},{2,3}}x")),
    (HEADER + ", num_partitions=4", GOOD.replace(", channel_id", " channel_id")),
    (HEADER + ", num_partitions=4", GOOD.replace(", use_global_device_ids=true", "")),
    (HEADER + ", num_partitions=4", GOOD.replace("(%p)", "(%p")),
    (HEADER + ", num_partitions=4", GOOD.replace("(%p)", "(%p]")),
    (HEADER + ", num_partitions=4", GOOD.replace("all-reduce", "all-reduce{1}")),
    (HEADER + ", num_partitions=4", "  %x = f32[] collective-permute(%p), channel_id=1, source_target_pairs={{0,4}}"),
    (HEADER + ", num_partitions=4", "  %x = f32[] collective-permute(%p), channel_id=1, source_target_pairs={{0}}"),
]


def test_programs_that_are_not_read():
    def check(row):
        header, line = row
        with pytest.raises(Unreadable):
            list(collectives(f"{header}\n\nENTRY %main {{\n{line}\n}}\n", 4))

    each(PROGRAMS, check)


def test_unknown_collectives_are_found():
    """By their name, or by saying who takes part."""
    for opcode, attribute in (
        ("collective-broadcast", ""),
        ("ragged-all-to-all", ""),
        ("gather-some", "replica_groups={}"),
    ):
        line = f"  %x = f32[4]{{0}} {opcode}(%p)" + (f", {attribute}" if attribute else "")
        ((found, _),) = collectives(f"{HEADER}, replica_count=4\n{line}\n", 4)
        assert (found.opcode, found.groups) == (opcode, [(0, 1, 2, 3)])


@pytest.mark.sampled
def test_groups_of_a_program_of_xla():
    """Read from what XLA has written for programs of 8 devices of one process."""
    done = launch(1, __file__, JAX_NUM_CPU_DEVICES="8", XLA_FLAGS="", PYTHONPATH=str(Path(__file__).parents[1]))
    assert done.stdout.count("alike;") == 11


def _compare():
    """For meshes and axes: the groups in XLA's text are those that the mesh says, in its order."""
    import jax
    from jax import lax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from jaxmpi._jax import internals
    from jaxmpi._sharded.hlo import groups_of

    for sizes in ((8,), (2, 4), (4, 2), (2, 2, 2)):
        names = "abc"[: len(sizes)]
        mesh = Mesh(np.array(jax.devices()).reshape(sizes), tuple(names))
        numbers = np.arange(8).reshape(sizes)
        for axis in (*names, names) if len(sizes) > 1 else names:
            over = [names.index(name) for name in axis]
            rest = [i for i in range(len(sizes)) if i not in over]
            expected = numbers.transpose(*rest, *over).reshape(-1, int(np.prod([sizes[i] for i in over])))
            spec = P(tuple(names))
            unchecked = {"check_vma" if hasattr(jax, "shard_map") else "check_rep": False}

            def total(x, axis=axis):
                return lax.psum(x, tuple(axis))

            body = internals.shard_map(total, mesh=mesh, in_specs=spec, out_specs=spec, **unchecked)
            x = jax.device_put(np.arange(16.0), NamedSharding(mesh, spec))
            text = jax.jit(body).lower(x).compile().as_text()
            assert groups_of(text, 8) == sorted(map(tuple, expected.tolist())), (sizes, axis, text)
            print("alike;")


if __name__ == "__main__":
    _compare()

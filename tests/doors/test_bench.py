"""`python -m jaxmpi.bench`: right data, mistakes that it must find, its arguments and figures."""

import dataclasses
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmpi import bench
from jaxmpi._bench import data, operations, options, report
from jaxmpi._bench.operations import OPERATIONS, Case
from jaxmpi._bench.timing import Sample, is_donated, ratio, take_turns
from jaxmpi_launch import mpiexec
from support.launch import launch
from support.rows import each, row_by_row, rows
from support.table import CASES

SHORT = ("--rounds", "2", "--seconds", "1e-9")


@pytest.fixture
def run(capsys, rank):
    """Runs it in this process; returns the exit code and what rank 0 has printed: the others print nothing."""

    def call(*arguments):
        try:
            code = bench.main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
        told = capsys.readouterr()
        assert rank == 0 or (told.out, told.err) == ("", "")
        return code, told.out, told.err

    return call


def rows_of(out, dtype="float32"):
    """The numbers in the tables."""
    return [line.split() for line in out.splitlines() if f" {dtype} " in line and line.split()[0].isdecimal()]


def possible(size):
    return [name for name, row in OPERATIONS.items() if row.least <= size]


# --- right data, and wrong data --------------------------------------------------------------------------------------


SOME = ("allreduce", "alltoall", "bcast", "gather", "sendrecv", "send", "grid_exchange", "barrier")
"""Of each kind of which _bench/programs.py knows one."""


@pytest.mark.parametrize("how", ["loop", "call", "eager"])
def test_all_operations(run, rank, size, how, tmp_path):
    """Of the ways of calling, one has all operations, others have some."""
    names = [name for name in possible(size) if how == "call" or name in SOME]
    code, out, _ = run(*names, "--bytes", 1000, "--how", how, *SHORT, "--json", tmp_path / "figures.json")
    assert code == 0
    if rank > 0:
        return
    assert len(rows_of(out)) == len(names)
    assert f"{size} ranks on 1 host" in out or size == 1
    written = json.loads((tmp_path / "figures.json").read_text())
    assert (written["ranks"], written["how"], written["dtype"], written["device"]) == (size, how, "float32", "cpu")
    assert [row["operation"] for row in written["rows"]] == names
    for row in written["rows"]:
        moves = row["operation"] != "barrier"
        assert row["wrong"] == (0 if moves else None)
        assert row["bytes"] == 4 * row["count"]
        assert 850 < row["bytes"] <= 1000 or not moves
        assert 0 < row["microseconds_min"] <= row["microseconds_median"] <= row["microseconds_max"]
        assert len(row["microseconds_by_round"]) == 2
        bandwidth = row["algorithm_bandwidth_gigabytes_per_second"]
        if moves:
            assert bandwidth == pytest.approx(row["bytes"] / row["microseconds_median"] / 1e3)


DTYPES = ("scan bfloat16", "scan complex64", "bcast bool", "alltoall float8_e8m0fnu")


@row_by_row("case", DTYPES)
def test_dtypes(case, run, rank):
    name, dtype = case.split()
    code, out, _ = run(name, "--dtype", dtype, "--bytes", 4096, *SHORT)
    assert code == 0
    assert rank > 0 or [row[-1] for row in rows_of(out, dtype)] == ["0"]


def _adds(case, x, right):
    y = right(case, x)
    return y.reshape(-1).at[2].add(1).reshape(y.shape) if case.rank == case.size - 1 else y


def _rolls(case, x, right):
    return jnp.roll(right(case, x), 1, axis=-1)


MISTAKES = [
    ("allreduce", _adds, "loop"),
    ("alltoall", _rolls, "call"),
    ("bcast", _rolls, "eager"),
    ("grid_exchange", _adds, "call"),
]


@row_by_row("case", MISTAKES, lambda row: f"{row[0]}-{row[2]}")
def test_mistakes_are_found(case, run, rank, monkeypatch):
    name, mistake, how = case
    right = OPERATIONS[name]
    wrong = dataclasses.replace(right, call=lambda case, x: mistake(case, x, right.call))
    with monkeypatch.context() as patch:
        patch.setitem(operations.OPERATIONS, name, wrong)
        code, out, _ = run(name, "--bytes", 1600, "--how", how, *SHORT)
    assert code == 1
    assert rank > 0 or int(rows_of(out)[0][-1]) > 0
    assert rank > 0 or "WRONG DATA" in out


def witness(name, rank, ranks, elements, dtype="float32"):
    case = Case(rank, ranks, elements)
    added = ranks if OPERATIONS[name].reduced(case) else 1
    return data.Oracle(OPERATIONS[name], case, data.Numbers.for_operands(np.dtype(dtype), added))


def after(its, run, turns):
    """The operand of the last one of so many turns, and the elements that it has been changed at."""
    x = its.operand(run)
    for where, what in list(zip(its.changed(turns), its.changes(run, turns), strict=True))[: turns - 1]:
        x[tuple(slice(start, start + size) for start, size in zip(where, what.shape, strict=True))] = what
    return x


@pytest.mark.alone
@rows("cases", [c for c in CASES if c.name in OPERATIONS and c.rows is None])
def test_witness(cases):
    """The data of each rank is what the suites' table says of all operands, and one wrong element is one."""

    def check(row):
        case, ranks, turns = row
        each_rank = [witness(case.name, rank, ranks, 10) for rank in range(ranks)]
        xs = [after(its, 3, turns) for its in each_rank]
        assert ranks == 1 or not np.array_equal(xs[0].reshape(-1)[:10], xs[1].reshape(-1)[:10])
        assert not np.array_equal(xs[0], each_rank[0].operand(4))
        for rank, its in enumerate(each_rank):
            result = np.array(case.expected(xs, rank, 0))
            if case.name == "exscan" and rank == 0:  # where the benchmark hands its operand on
                result = np.array(xs[0])
            assert its.wrong(result, 3, turns) == 0
            # The element that is kept in the last turn is in the result.
            at = tuple(its.watched(turns, result.shape)[-1])
            kept = np.full(turns, result[at])
            others = its.wrong_kept(kept, 3, turns, result.shape)
            kept[-1] += 1
            assert its.wrong_kept(kept, 3, turns, result.shape) == others + 1
            result[at] += 1
            assert its.wrong(result, 3, turns) == 1
            left_out = its.operation.changed(its.case)[0] + turns % its.operation.changed(its.case)[2]
            result.reshape(-1)[left_out] += 1
            before = its.wrong(result, 3, turns)
            assert its.wrong(result, 3, turns, changed=True) == before - 1

    each([*itertools.product(cases, (1, 2, 3, 9), (1, 2, 7, 40))], check)


@pytest.mark.alone
@row_by_row("dtype", ("float32", "int8", "float16", "bfloat16", "complex64"))
def test_sums_are_exact(dtype):
    """In any order, and in the dtype itself; all ranks count."""
    each_rank = [witness("allreduce", rank, 5, 300, dtype) for rank in range(5)]
    xs = [its.operand(1) for its in each_rank]
    assert len({x.tobytes() for x in xs}) == 5
    for order in (xs, xs[::-1]):
        total = order[0]
        for x in order[1:]:
            total = total + x
        assert each_rank[2].wrong(total.astype(xs[0].dtype), 1, 1) == 0
    for less in range(5):
        total = sum(x for rank, x in enumerate(xs) if rank != less).astype(xs[0].dtype)
        assert each_rank[2].wrong(total, 1, 1) > 0


@pytest.mark.alone
def test_count_wrong():
    """An old result, one element, another shape and another dtype are found. Rounding is allowed if asked for."""
    right = np.arange(1, 1 << 17, dtype=np.float32)
    assert data.count_wrong(right * 2, right, scale=2.0) == 0
    assert data.count_wrong(right, right, scale=2.0) == right.size
    assert data.count_wrong(right[1:], right) == data.count_wrong(right.astype(np.float64), right) == right.size
    found = right.copy()
    found[70_000:70_003] *= np.float32([1 + 1e-6, 1 + 1e-3, np.nan])
    assert data.count_wrong(found, right) == 3
    assert data.count_wrong(found, right, tolerance=1e-5) == 2


# --- the figures -----------------------------------------------------------------------------------------------------


BANDWIDTHS = [
    ("all_reduce_perf", 2, 4.0),
    ("all_reduce_perf", 4, 6.0),
    ("all_reduce_perf", 8, 7.0),
    ("all_gather_perf", 4, 3.0),
    ("alltoall_perf", 4, 3.0),
    ("gather_perf", 4, 3.0),
    ("scatter_perf", 8, 3.5),
    ("reduce_scatter_perf", 4, 3.0),
    ("osu_alltoallv", 4, 3.0),
    ("broadcast_perf", 4, 4.0),
    ("reduce_perf", 4, 4.0),
    ("sendrecv_perf", 4, 4.0),
    ("scan", 4, 4.0),
    ("osu_latency", 4, 4.0),
    ("osu_bw", 2, 4.0),
    ("neighbor_alltoall", 4, 4.0),
    ("neighbor_alltoall", 2, 2.0),  # two of the four neighbours are the rank itself
    ("all_reduce_perf", 1, 0.0),
    ("broadcast_perf", 1, 0.0),
    ("alltoall_perf", 1, 0.0),
]


@pytest.mark.alone
def test_bandwidth():
    """Of 8 GB in 2 s, with the factors of nccl-tests."""

    def check(row):
        name, ranks, bus = row
        operation = operations.named(name)
        case = Case(0, ranks, 2_000_000_000 // operation.parts(ranks))
        figures = report.figures_of(operation, case, np.dtype(np.float32), Sample([1.0, 2.0, 5.0], 0))
        assert figures["bytes"] == 8_000_000_000
        assert figures["algorithm_bandwidth_gigabytes_per_second"] == pytest.approx(4.0)
        assert figures["bus_bandwidth_gigabytes_per_second"] == pytest.approx(bus)
        assert (figures["microseconds_min"], figures["microseconds_max"]) == (1e6, 5e6)

    each(BANDWIDTHS, check)


@pytest.mark.alone
def test_bandwidth_of_halos():
    """Of blocks of 10 x 10 cells: those of the halo that come from others."""
    for ranks, cells in (1, 0), (2, 12 + 12), (4, 4 * 10 + 4), (6, 44):
        case = Case(0, ranks, 12 * 12)
        figures = report.figures_of(OPERATIONS["grid_exchange"], case, np.dtype(np.int8), Sample([1e-9], 0))
        assert figures["bus_bandwidth_gigabytes_per_second"] == pytest.approx(cells), ranks
        ranks_of_cells, _ = operations._around(case, np.arange(144))
        assert np.count_nonzero(ranks_of_cells) == cells, ranks


NAMES = [
    ("osu_latency", "pingpong"),
    ("osu_bw", "send"),
    ("osu_bibw", "sendrecv"),
    ("osu_barrier", "barrier"),
    ("osu_neighbor_allgather", "neighbor_allgather"),
    ("osu_alltoallv", "alltoallv"),
    ("all_reduce_perf", "allreduce"),
    ("broadcast_perf", "bcast"),
]


@pytest.mark.alone
def test_names_of_other_tools():
    for theirs, ours in NAMES:
        assert operations.named(theirs) is OPERATIONS[ours], theirs
        assert bench._heading(theirs, OPERATIONS[ours], "").startswith(f"{ours} ({theirs})")


@pytest.mark.alone
def test_sizes():
    sizes = {"8": 8, "1K": 1024, "1KiB": 1024, "1.5 KiB": 1536, "4M": 4 << 20, "2GiB": 2 << 30, "7B": 7}
    assert {text: options.size(text) for text in sizes} == sizes


def test_notes(run, rank, size):
    """Of sizes that are rounded, and of what is measured otherwise than by other tools."""
    code, out, _ = run("osu_bw" if size > 1 else "bcast", "--bytes", 8, *SHORT)
    assert code == 0
    assert rank > 0 or size == 1 or "\nosu_bw: OSU's sends do not block" in out
    code, out, _ = run("alltoall", "--bytes", 1, 10, "--dtype", "int16", *SHORT)
    assert code == 0
    if rank == 0:
        made = list(dict.fromkeys(max(1, nbytes // 2 // size) * 2 * size for nbytes in (1, 10)))
        assert [int(row[0]) for row in rows_of(out, "int16")] == made
        assert f"sizes are rounded: 1 to {2 * size}" in out


@pytest.mark.alone
@pytest.mark.nightly
def test_plot(run, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, _ = run("bcast", "barrier", "--bytes", 8, 80, *SHORT, "--plot", tmp_path / "figures.png")
    assert code == 0
    assert (tmp_path / "figures.png").stat().st_size > 5000
    assert f"Written: {tmp_path / 'figures.png'}" in out


def test_list(run, rank):
    code, out, _ = run("--list")
    assert code == 0
    if rank == 0:
        assert all(re.search(rf"\b{name}\b", out) for name in operations.all_names())


BAD = [
    (["osu_latency"], "osu_latency needs 2 ranks"),
    (["alreduce"], "no operation 'alreduce': did you mean allreduce?"),
    (["alltoallw_perf"], "no operation 'alltoallw_perf'"),
    (["--bytes", "8", "bcast"], "'bcast' is no size"),
    (["--bytes", "1KB"], "'1KB' is no size: write bytes, or as in 64KiB"),
    (["--bytes", "0"], "less than a byte"),
    (["--bytes", "8G", "--dtype", "int8"], "more than 2147483647 elements"),
    (["--dtype", "float23"], "no dtype 'float23': did you mean float32?"),
    (["allreduce", "--dtype", "bool"], "allreduce: MPI.SUM is not defined for bool: pass another --dtype"),
    (["--how", "slowly"], "invalid choice: 'slowly'"),
    (["osu_scan", "--dtype", "float8_e5m2"], "osu_scan: MPI.SUM is not defined for float8_e5m2: pass another"),
    (["--rounds", "0"], "'0' is not between 0 and 1000000"),
    (["--seconds", "soon"], "value: 'soon'"),
    (["--json", "/nowhere/figures.json"], "--json: /nowhere/figures.json cannot be written"),
    (["--plot", "figures.nothing"], "error: --plot"),
]


@pytest.mark.alone
@row_by_row("case", BAD, lambda row: " ".join(row[0]))
def test_bad_arguments(case, run):
    """Told once, before anything is measured."""
    arguments, told = case
    code, out, error = run(*arguments)
    assert code == 2
    assert out == ""
    assert error.count(told) == 1
    assert "Traceback" not in error


@pytest.mark.ranks(2)
def test_ranks_that_differ(run, rank):
    """Each would wait in another operation. After a bad argument all ranks end, and one of them says so."""
    code, _, err = run("alreduce")
    assert code == 2
    assert rank > 0 or err.count("no operation 'alreduce': did you mean allreduce?") == 1
    code, _, err = run("allreduce" if rank == 0 else "bcast", "--bytes", 8, *SHORT)
    assert code == 2
    if rank == 0:
        assert "the ranks have different arguments: 0 ['allreduce'" in err
        assert "1 ['bcast'" in err


@pytest.mark.alone
def test_what_cannot_be_exact():
    with pytest.raises(ValueError, match="the sum over 300 ranks of numbers that differ is not exact in bfloat16"):
        data.Numbers.for_operands(np.dtype(jnp.bfloat16), 300)
    assert data.Numbers.for_operands(np.dtype(jnp.bfloat16), 1).levels == 256


def test_turns(rank, size):
    """The slowest rank counts, wrong elements of all ranks and turns are added, and the first turn has no time."""
    order = []

    def contender(name, wrong):
        return lambda turn: order.append(name) or (100 * (turn == 0) + 10 * turn + rank, wrong)

    samples = take_turns({"one": contender("one", 0), "other": contender("other", 2)}, 2)
    assert samples == {
        "one": Sample([9.0 + size, 19.0 + size], 0),
        "other": Sample([9.0 + size, 19.0 + size], 6 * size),
    }
    assert order == ["one", "other", "other", "one", "one", "other"]


@pytest.mark.alone
def test_memory_that_calls_take_over():
    """The time has no release of a result that lies in the memory of the data."""
    for takes_over in (True, False):
        x = {"a": jnp.ones(3), "b": jnp.ones(4)}
        jax.jit(lambda x: jax.tree.map(lambda y: 2 * y, x), donate_argnums=0 if takes_over else ())(x)
        assert is_donated(x) == takes_over
    assert not is_donated(np.ones(3))
    assert not is_donated(None)


@pytest.mark.alone
def test_ratio():
    """Of each turn; a machine that is slow for one turn changes nothing."""
    samples = {"a": Sample([2.0, 20.0, 4.0], 0), "b": Sample([1.0, 10.0, 2.0], 0), "floor": Sample([0.5, 5.0, 1.0], 0)}
    assert ratio(samples, "a", "b") == 2.0
    assert ratio(samples, "a", "b", less="floor") == 3.0
    assert ratio(samples, "a", "missing") is None


# --- as users start it -----------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.parametrize("ranks", [0, 2])
def test_interrupt(ranks):
    """Said in one line. Open MPI's launcher ends its ranks without a word, with an exit code of its own."""
    done = launch(ranks, "-m", "jaxmpi.bench", "allreduce", "--seconds", 2, check=False, interrupt_at="of the array")
    if ranks > 0 and mpiexec.flavour(mpiexec.find_mpiexec()) == "openmpi":
        assert done.returncode != 0
        return
    assert done.returncode == 130
    assert done.stderr.count("jaxmpi.bench: interrupted\n") == 1
    assert "Traceback" not in done.stderr

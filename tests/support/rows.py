"""A table in one test: `rows` gives the test all rows at once, so that it can put them into one program.

    @rows("cases", CASES)
    def test_input_is_kept(cases, comm): ...

The test gets the list of all rows. With pytest's option -k there is a test for each row, named after it, which gets
a list of this row alone: `-k allreduce`. `each` checks row after row and names those that fail. Where rows are not put
into one program, `row_by_row` does both:

    @row_by_row("case", CASES)
    def test_call_is_refused(case): ...
"""

import functools

import pytest

apart = False
"""Whether each row is a test of its own: with pytest's option -k (tests/conftest.py)."""


def rows(name, table, ids=str):
    table = list(table)
    names = [str(ids(row)) for row in table]
    if apart:
        return pytest.mark.parametrize(name, [[row] for row in table], ids=names)
    return pytest.mark.parametrize(name, [table], ids=["all"])


def each(table, check, name=str):
    """Call `check(row)` for every row, then fail with the names of the rows that failed, and why."""
    failures = {}
    for row in table:
        try:
            check(row)
        except pytest.skip.Exception:
            raise
        except (Exception, pytest.fail.Exception) as error:
            failures[name(row)] = error
    if failures:
        reasons = "\n".join(f"{row}: {type(error).__name__}: {error}" for row, error in failures.items())
        first = next(iter(failures.values()))
        raise AssertionError(f"{len(failures)} of {len(table)} rows failed:\n{reasons}") from first


def row_by_row(name, table, ids=str):
    """The test is called with each row, and fails with the names of those that failed."""

    def decorate(test):
        @functools.wraps(test)
        def together(**arguments):
            each(arguments.pop(name), lambda row: test(**{name: row}, **arguments), ids)

        return rows(name, table, ids)(together)

    return decorate


def one_each_time(table, *chosen):
    """The cases of a test that starts a job for each of them: all but those chosen are left to the night."""
    assert set(chosen) <= set(table)
    return [pytest.param(case, marks=() if case in chosen else pytest.mark.nightly) for case in table]

"""Which tests run, by their markers (pyproject.toml): on how many ranks, and with `--brief`."""

import jax

from jaxmpi._mpi.library import DEVICES


def _leaves_to_the_stream():
    return jax.default_backend() != "cpu" and not DEVICES.aware and DEVICES.transport in ("callback", "flags")


def left_out(item, size):
    """Why a test says nothing on so many ranks; empty if it does."""
    marker = item.get_closest_marker("ranks")
    if marker and marker.args[0] > size:
        return f"needs {marker.args[0]} ranks"
    marker = item.get_closest_marker("max_ranks")
    if marker and marker.args[0] < size:
        return f"says all it can on {marker.args[0]} ranks"
    if item.get_closest_marker("gpu") and jax.default_backend() == "cpu":
        return "needs a GPU: make test-gpu"
    if item.get_closest_marker("own_errors") and _leaves_to_the_stream():
        return "operations are left to the device's stream, and a later one raises their errors"
    if item.get_closest_marker("launches") and size > 1:
        return "launches processes of its own, runs on one rank"
    if item.get_closest_marker("one_rank") and size > 1:
        return "has nothing to do with other ranks, runs on one"
    return ""


def shortened(items, size):
    """The tests that `--brief` runs, and the others.

    Of each test that starts jobs or is slow it runs the first and the last case: these take most of the time of all
    tests. A slow test may name a parameter, each value of which has a first and a last case. What hardly depends on the
    number of ranks runs on two, a slow test not on one if it can have more, and what is left to the night not at all.
    """
    cases, others = {}, set()
    for item in items:
        if item.get_closest_marker("nightly"):
            others.add(id(item))
            continue
        if item.get_closest_marker("two_ranks_suffice") and size != 2 and not item.get_closest_marker("one_rank"):
            others.add(id(item))
        slow = item.get_closest_marker("slow")
        if slow and size == 1 and not item.get_closest_marker("launches") and not item.get_closest_marker("one_rank"):
            others.add(id(item))
        if (slow or item.get_closest_marker("launches")) and not left_out(item, size):
            values = [str(item.callspec.params[name]) for name in slow.args] if slow else []
            cases.setdefault((item.nodeid.partition("[")[0], *values), []).append(item)
    others |= {id(item) for found in cases.values() for item in found[1:-1]}
    return [item for item in items if id(item) not in others], [item for item in items if id(item) in others]

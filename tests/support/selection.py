"""Which tests run, by their markers (pyproject.toml): on how many ranks, and with `--brief`."""


def left_out(item, size):
    """Why a test says nothing on so many ranks; empty if it does."""
    if item.get_closest_marker("alone") and size > 1:
        return "runs on one rank"
    for marker in item.iter_markers("ranks"):
        least, most = (*marker.args, size)[:2]
        if size < least:
            return f"needs {least} ranks"
        if size > most:
            return f"says all it can on {most} ranks"
    return ""


def shortened(items, size):
    """The tests that `--brief` runs, and the others: what is left to the night, and of a sampled test all cases but the
    first and the last, for each value of the parameters that the marker names."""
    cases, others = {}, set()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if item.get_closest_marker("nightly"):
            others.add(id(item))
        elif sampled and not left_out(item, size):
            values = [str(item.callspec.params[name]) for name in sampled.args]
            cases.setdefault((item.nodeid.partition("[")[0], *values), []).append(item)
    others |= {id(item) for found in cases.values() for item in found[1:-1]}
    return [item for item in items if id(item) not in others], [item for item in items if id(item) in others]

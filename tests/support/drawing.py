"""Random cases on several ranks: hypothesis draws them on rank 0 alone, and all ranks do what it does."""

import hypothesis

brief = False
"""Whether a quarter of the cases is enough (`--brief`)."""


def on_all_ranks(comm, strategy, check, examples):
    """Calls `check(case)` on all ranks. A case fails on all ranks alike, so that none is left waiting."""

    def together(case):
        failure = None
        try:
            check(case)
        except Exception as error:
            failure = f"rank {comm.rank}: {type(error).__name__}: {error}"
        return next(filter(None, comm.allgather(failure)), None)

    if comm.rank > 0:
        failures = []
        while (case := comm.bcast(None)) is not None:
            failures += filter(None, [together(case)])
        assert not failures, failures[0]
        return

    @hypothesis.settings(
        max_examples=examples // 4 if brief else examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(strategy)
    def run(case):
        failure = together(comm.bcast(case))
        assert failure is None, f"{case}\n{failure}"

    try:
        run()
    finally:
        comm.bcast(None)

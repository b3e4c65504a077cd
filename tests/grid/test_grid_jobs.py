"""Grids in jobs of their own: on many ranks, in programs of JAX's cache."""

from pathlib import Path

import pytest

from support.launch import launch
from support.table import NEW_JAX

pytestmark = [pytest.mark.alone, pytest.mark.sampled, pytest.mark.seconds(400)]
TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.nightly
@pytest.mark.parametrize("suite", ["grid/test_grid.py", "grid/test_redistribute.py", "unstructured/test_index_map.py"])
def test_eight_ranks(suite):
    """Random cases on 1 to 8 ranks."""
    few = {"JAXMPI_TEST_GRIDS": "6", "JAXMPI_TEST_MAPS": "24"}
    out = launch(8, "-m", "pytest", "-q", TESTS / suite, "-k", "random", timeout=380, **few).stdout
    assert " passed" in out
    assert "failed" not in out


@pytest.mark.skipif(not NEW_JAX, reason="the cache is switched off: _jax.distrust_cached_programs")
def test_a_later_run_finds_the_program_in_the_cache(script, tmp_path):
    """The number of a plan is the same in each run that makes the same plans in the same order; else another."""
    program = script("""
        import os
        import numpy as np
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        for width in map(int, os.environ["WIDTHS"]):
            grid = jaxmpi.Grid(size, 4 * size, periodic=True)
            x = jnp.arange(4.0 + 2 * width) + 100 * rank
            y = np.asarray(jax.jit(lambda x: 2 * grid.exchange(x, width))(x))
            left, right = 100 * ((rank - 1) % size), 100 * ((rank + 1) % size)
            low, high = 4 + np.arange(width), width + np.arange(width)
            print("right", bool((y[:width] == 2 * (left + low)).all() and (y[width + 4:] == 2 * (right + high)).all()))
    """)
    settings = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "JAX_ENABLE_COMPILATION_CACHE": "1"}
    for widths in ("123", "123", "321", "2"):
        out = launch(2, program, WIDTHS=widths, **settings).stdout
        assert out.count("right True") == 2 * len(widths)

"""Shape checks on for our packages, and which tests run when nobody names them."""

import gc
import os
import tempfile
from pathlib import Path

import hypothesis
import jax
import pytest
from jaxtyping import install_import_hook

# Before the first import of ours: every jaxtyping annotation is checked while the tests run.
install_import_hook(["dejax", "train", "infer"], "beartype.beartype")

# Documents that a test tokenizes are kept for that run of the tests, not in the user's folder.
_CACHE = tempfile.TemporaryDirectory(prefix="dejax-tests-")
os.environ["HF_DATASETS_CACHE"] = _CACHE.name
# So is the code that comes with an exported folder.
os.environ["HF_MODULES_CACHE"] = f"{_CACHE.name}/modules"

# A busy machine is no failure, and a failure must come back on the next run.
hypothesis.settings.register_profile("dejax", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("dejax")

ON_REQUEST = ("gpu", "hf")
COMPILED = "JAX_COMPILATION_CACHE_DIR"
WORTH_KEEPING = 0.05
"""Seconds of compiling."""
MOST_MAPPINGS = 30_000
"""Linux allows a process 65,530; every compiled program takes three, and the next one aborts it."""


def pytest_configure(config: pytest.Config) -> None:
    """What one test compiles serves the others, those of other processes and later runs too.

    Most of the time of the tests is the compiler's. `pytest --cache-clear` forgets it.
    """
    cache = getattr(config, "cache", None)
    kept = f"{_CACHE.name}/compiled" if cache is None else str(cache.mkdir("compiled"))
    place = os.environ.setdefault(COMPILED, kept)  # for processes that tests start, too
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = str(WORTH_KEEPING)
    jax.config.update("jax_compilation_cache_dir", place)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING)


@pytest.fixture(autouse=True, scope="module")
def few_compiled_programs():
    """Forgets what was compiled once it has become too much for one process."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests that need what a plain machine lacks, unless `-m` names their marker."""
    left_out = [
        item
        for item in items
        for marker in ON_REQUEST
        if item.get_closest_marker(marker) and marker not in (config.option.markexpr or "")
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]

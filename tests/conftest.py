"""Shape checks on for our packages, and which tests run when nobody names them."""

import os
import tempfile

import hypothesis
import pytest
from jaxtyping import install_import_hook

# Before the first import of ours: every jaxtyping annotation is checked while the tests run.
install_import_hook(["dejax", "train", "infer"], "beartype.beartype")

# Documents that a test tokenizes are kept for that run of the tests, not in the user's folder.
_CACHE = tempfile.TemporaryDirectory(prefix="dejax-tests-")
os.environ["HF_DATASETS_CACHE"] = _CACHE.name

# A busy machine is no failure, and a failure must come back on the next run.
hypothesis.settings.register_profile("dejax", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("dejax")

ON_REQUEST = ("gpu", "hf")


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

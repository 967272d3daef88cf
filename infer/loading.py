"""Loading a target with progress in bytes and the time left."""

from pathlib import Path

from dejax.target import Target, check_dtype, is_gguf, load_target, read_outline
from infer.console import progress, say
from infer.inspection import resident_params

_MIB = 2**20


def load_shown(path: str | Path, dtype: str = "float32") -> Target:
    """`dejax.target.load_target`, told on standard error as it goes.

    Raises:
      UsageError: as `load_target`.
    """
    say(f"loading {path}")
    if is_gguf(path):
        return load_target(path, dtype)
    outline = read_outline(path)
    params = resident_params(outline.config)
    params += 0 if outline.converted else outline.config.routed_params
    total = params * check_dtype(dtype).itemsize / _MIB
    with progress("load", round(total, 1), "MiB") as bar:
        return load_target(path, dtype, on_bytes=lambda count: bar.advance(count / _MIB))

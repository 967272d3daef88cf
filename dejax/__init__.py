"""dejax: speculative decoding for offloaded mixture-of-experts language models, in JAX.

Public names are resolved on first use, so that `import dejax` costs nothing and starts no backend.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {"load_target": "dejax.target", "load_draft": "dejax.ckpt.draft_state"}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'dejax' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])

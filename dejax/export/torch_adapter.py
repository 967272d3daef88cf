"""Draft experts for Hugging Face `transformers`: an adapter folder with its own modelling file.

The file (`dejax/assets/torch`) needs torch and `transformers` alone. It is kept as text here: dejax
itself imports no torch.
"""

import json
from pathlib import Path
from typing import Any

import dejax
from dejax.export.provenance import licence
from dejax.target import Outline

_ASSETS = Path(dejax.__file__).parent / "assets" / "torch"
_MODULE = "modeling_draft_experts"


def companions(outline: Outline, card: Path) -> dict[str, bytes]:
    """Name -> content of what an adapter folder for `transformers` has beside the adapter.

    `card` is the target's model card, whose licence is told.
    """
    config: dict[str, Any] = {
        "model_type": "dejax_draft_experts",
        "architectures": ["DraftExperts"],
        "auto_map": {
            "AutoConfig": f"{_MODULE}.DraftExpertsConfig",
            "AutoModel": f"{_MODULE}.DraftExperts",
        },
        "dejax_version": dejax.__version__,
        "target_identity": outline.identity,
        # With the routers it makes the identity, which the modelling file checks.
        "target_config_hash": outline.config.identity(),
    }
    config |= licence(card)
    return {
        "config.json": (json.dumps(config, indent=2) + "\n").encode(),
        f"{_MODULE}.py": (_ASSETS / f"{_MODULE}.py.txt").read_bytes(),
    }

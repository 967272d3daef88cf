"""What is exported: a checked model folder, read one array or one expert at a time."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dejax.ckpt.expert_store import ExpertStore
from dejax.ckpt.hf_weights import CheckpointPlan, plan_checkpoint, read_expert
from dejax.target import STORE_DIR, load_config


@dataclass(frozen=True)
class Source:
    """A checked model folder: its plan, and the store of a converted folder's experts."""

    plan: CheckpointPlan
    store: ExpertStore | None

    def expert(self, layer: int, expert: int) -> np.ndarray:
        """The record of one routed expert."""
        if self.store is None:
            return read_expert(self.plan, layer, expert)
        return self.store.decode(self.store.read(layer, expert))


def open_source(folder: Path) -> Source:
    """A Hugging Face or converted folder, checked (raises as `load_target`)."""
    config = load_config(folder)
    converted = (folder / STORE_DIR).exists()
    store = ExpertStore.open(folder / STORE_DIR) if converted else None
    if store is not None:
        store.check_fits(config)
    return Source(plan_checkpoint(folder, config, resident_only=converted), store)

"""Packed rows of random tokens."""

import jax
import numpy as np

from dejax.config import ModelConfig


def random_batch(
    config: ModelConfig, *, rows: int, length: int, documents: int = 2, seed: int = 0
) -> dict[str, jax.Array]:
    """A batch of rows of `documents` documents each, the keys as `train.data` has them."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab_size, (rows, length + 1))
    cuts = np.sort(rng.integers(2, length - 1, (rows, documents - 1)), axis=1)
    index = np.arange(length + 1)
    segments = 1 + (index[None, :, None] >= cuts[:, None, :]).sum(-1)
    starts = np.concatenate([np.zeros((rows, 1), int), cuts], axis=1)
    positions = index[None, :] - np.take_along_axis(starts, segments - 1, axis=1)
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": segments[:, :-1],
        "positions": positions[:, :-1],
    }
    batch = {key: value.astype(np.int32) for key, value in batch.items()}
    same = segments[:, 1:] == segments[:, :-1]
    return jax.device_put(batch | {"mask": same.astype(np.float32)})

"""Targets with random weights of a true shape: `synthetic:CONFIG[:layers=N]`.

For figures of transfers and of computation. How often an expert is used again, or what a drafter
gets right, they do not tell: random weights route like no trained model.
"""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

import dejax
from dejax.ckpt.expert_codec import PLAIN, QUANTISED
from dejax.ckpt.expert_store import ExpertStore, ExpertStoreWriter
from dejax.config import ModelConfig
from dejax.errors import UsageError
from dejax.model import Transformer
from dejax.target import Target, load_config, target_identity
from infer.console import progress

PREFIX = "synthetic:"
SHAPES = Path(dejax.__file__).parent / "assets" / "shapes"
CONTEXT = 4096
"""Tokens of context at most: rotary tables for more would only take memory."""


def synthetic_config(name: str) -> ModelConfig:
    """The configuration that `synthetic:CONFIG[:layers=N]` names.

    CONFIG is a shape that comes with dejax (`deepseek_v2_lite`) or a folder with a `config.json`,
    N how many of its layers to keep, the first ones.

    Raises:
      UsageError: it is not of this form, names no configuration, or leaves no MoE layer.
    """
    shape, _, rest = name.removeprefix(PREFIX).partition(":")
    known = sorted(folder.name for folder in SHAPES.iterdir() if folder.is_dir())
    form = f"{name!r}: expected synthetic:CONFIG[:layers=N], CONFIG a folder or {', '.join(known)}"
    key, _, count = rest.partition("=")
    if not shape or (rest and (key != "layers" or not count.isdecimal())):
        raise UsageError(form)
    folder = SHAPES / shape if shape in known else Path(shape)
    if not (folder / "config.json").is_file():
        raise UsageError(f"{form}; no config.json in {folder}")
    config = load_config(folder)
    if not config.moe_layers:
        raise UsageError(f"{name!r}: a dense {config.family}; expected a mixture of experts")
    if rest:
        layers, least = int(count), config.moe_layers[0] + 1
        if not least <= layers <= config.num_layers:
            raise UsageError(f"{name!r}: layers={layers}; expected {least} to {config.num_layers}")
        config = dataclasses.replace(config, num_layers=layers)
    return dataclasses.replace(config, context=min(config.context, CONTEXT))


def synthetic_target(
    name: str, dtype: str = "float32", *, experts: str = "bfloat16", out: Path | None = None
) -> Target:
    """A target of random weights.

    Args:
      name: as `synthetic_config` takes it.
      dtype: of the resident weights; experts: encoding of the stored ones (`expert_codec`).
      out: folder for the expert store; without it, it is in memory. One that is there is continued.

    Raises:
      UsageError: as `synthetic_config`, or an unknown encoding.
    """
    if experts not in (*PLAIN, *QUANTISED):
        raise UsageError(f"experts {experts!r}: expected {', '.join((*PLAIN, *QUANTISED))}")
    config = synthetic_config(name)
    make = nnx.jit(lambda: Transformer(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)))
    model = make()
    identity = target_identity(config, model)
    return Target(
        config=config,
        model=model,
        routed=None,
        store=_store(config, identity, experts, out),
        tokenizer=None,
        identity=identity,
        name=name,
    )


def _store(config: ModelConfig, identity: str, encoding: str, out: Path | None) -> ExpertStore:
    """Random experts, all of them cut from one stretch of random numbers."""
    size, count = int(np.prod(config.expert_shape)), config.moe.num_experts
    total = count * len(config.moe_layers)
    shift = 4099  # numbers from one expert to the next
    scale = np.float32(config.expert_shape[2] ** -0.5)
    stretch = np.random.default_rng(0).standard_normal(size + shift * total, np.float32) * scale
    numbers = stretch.astype(PLAIN.get(encoding, np.dtype(np.float32)))
    with (
        ExpertStoreWriter(
            out,
            layers=config.moe_layers,
            num_experts=count,
            shape=config.expert_shape,
            dtype=encoding,
            identity=identity,
        ) as writer,
        progress("making experts", total, "experts") as bar,
    ):
        for index, layer in enumerate(config.moe_layers):
            for expert in range(count):
                first = (index * count + expert) * shift
                if (layer, expert) not in writer.done:
                    record = numbers[first : first + size].reshape(config.expert_shape)
                    writer.write(layer, expert, record)
                bar.advance(1)
        return writer.finish()


def prompts_of_random_tokens(config: ModelConfig, count: int, length: int) -> list[list[int]]:
    """Token ids, for targets that have no tokenizer."""
    rng = np.random.default_rng(1)
    return [rng.integers(0, config.vocab_size, length).tolist() for _ in range(count)]

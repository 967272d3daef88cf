"""The configuration of a distillation, and what of it can be checked before a weight is read."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from dejax.ckpt.draft_state import check_gates
from dejax.config import DraftConfig, ModelConfig
from dejax.errors import UsageError
from dejax.sharding import MeshConfig, check_divides, row_shards
from train.closed_form import InitConfig
from train.distill_step import Objective, Remat
from train.encoding import LossOn
from train.loop import LoopConfig, check_seed_and_devices
from train.losses import LossWeights
from train.optimizer import OptimizerConfig


@dataclass(frozen=True)
class DistillConfig:
    """A distillation.

    Attributes:
      target: a model folder, or tiny; data: documents (JSON lines, Parquet, what `dejax generate
      --json` wrote, or hub:NAME), a folder written by `python -m train.data`, or demo; loss_on:
      which tokens count, all or what the assistant says; text_column: the column that has the text.

      draft: shape of the draft experts (none: as wide as a routed expert), and the gates of the
      routed experts beside them; init: what they start from; losses: weights of the four, to which
      `losses_from` (none: they are constant) leads in a straight line over `ramp_steps`; objective:
      `all`, or `residual-local` (the cheap first stage); kv: whose keys and values a drafted token
      sees, the `draft`'s own (as the paper trains), or `mixed` (as it is when decoding): the
      target's before its block of `kv_block` tokens (drafts are as long where decoding is measured
      on the way); ema: decay of an average of the draft, which is then what is saved first, and the
      last step's beside it (0: none).

      seq_len, batch_size: shape of a batch; accumulate: into how many smaller ones it is cut;
      dtype: what the target's weights are held in; compute: dtype of activations (losses,
      gradients' sums and optimizer are float32 always); remat: what a backward pass computes again
      for less memory: nothing, what is not a product with weights, or a layer's whole draft half.

      mesh: devices along each axis; split_draft: draft and optimizer over `fsdp`, not whole
      everywhere; cpu_devices: where there is no accelerator, show the CPU as so many devices.
    """

    target: str = "tiny"
    data: str = "demo"
    loss_on: LossOn = "all"
    text_column: str = "text"
    draft: DraftConfig | None = None
    init: InitConfig = InitConfig()
    losses: LossWeights = LossWeights()
    losses_from: LossWeights | None = None
    ramp_steps: int = 0
    objective: Objective = "all"
    kv: Literal["draft", "mixed"] = "draft"
    kv_block: int = 4
    ema: float = 0.0
    optimizer: OptimizerConfig = OptimizerConfig()
    loop: LoopConfig = LoopConfig(steps=200)
    seq_len: int = 256
    batch_size: int = 8
    accumulate: int = 1
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    compute: Literal["float32", "bfloat16"] = "float32"
    remat: Remat = "none"
    mesh: MeshConfig = MeshConfig()
    split_draft: bool = False
    cpu_devices: int = 1
    seed: int = 0

    def __post_init__(self):
        check_sizes(self, "seq_len", "batch_size", "accumulate", "kv_block")
        if self.ramp_steps < 0:
            raise UsageError(f"ramp_steps is {self.ramp_steps}; expected 0 or more")
        if not 0 <= self.ema < 1:
            raise UsageError(f"ema is {self.ema}; expected from 0 to below 1")
        if self.losses_from and self.losses_from.temperature != self.losses.temperature:
            raise UsageError("losses_from: has another temperature than losses; expected the same")
        if self.objective == "residual-local" and (self.losses_from or self.loop.norms_every):
            raise UsageError(
                "objective residual-local has one loss; losses_from and loop.norms_every are for "
                "objective all"
            )
        check_seed_and_devices(self.seed, self.cpu_devices)

    def loss_weights(self, step: int) -> Float[np.ndarray, "4"]:
        """The weights of the four losses at a step (from 0)."""
        last = self.losses.vector()
        if self.losses_from is None or step >= self.ramp_steps:
            return last
        first, share = self.losses_from.vector(), step / self.ramp_steps
        return (first + np.float32(share) * (last - first)).astype(np.float32)


def check_sizes(config: Any, *names: str) -> None:
    """Refuses settings of these names below 1, or a batch with too many tokens to count.

    Raises:
      UsageError: so.
    """
    sizes = {name: getattr(config, name) for name in names}
    if min(sizes.values()) < 1:
        told = ", ".join(f"{name} is {size}" for name, size in sizes.items() if size < 1)
        raise UsageError(f"{told}; expected at least 1")
    if config.seq_len * config.batch_size >= 2**31:
        raise UsageError(
            f"seq_len is {config.seq_len} and batch_size {config.batch_size}; expected less than "
            "2^31 tokens a batch"
        )


def draft_config(config: DistillConfig, model: ModelConfig) -> DraftConfig:
    """The configured shape, or one routed expert's; checked against the target's."""
    draft = config.draft or DraftConfig(width=model.moe.expert_width)
    if draft.top_r >= model.moe.top_k:
        raise UsageError(
            f"draft.top_r is {draft.top_r}; expected less than the {model.moe.top_k} experts that "
            "the target uses for a token: a draft expert stands in for the others"
        )
    check_gates(draft, model)
    return draft


def loss_options(config: DistillConfig, model: ModelConfig) -> dict[str, Any]:
    """The options of `train.distill_step.loss_fn` that the configuration fixes."""
    return dict(
        r=draft_config(config, model).top_r,
        temperature=config.losses.temperature,
        objective=config.objective,
        remat=config.remat,
    )


def check_shape(config: DistillConfig, model: ModelConfig, mesh: Any) -> None:
    """Refuses a batch that does not fit the target's context, or a mesh that divides neither.

    Raises:
      UsageError: so.
    """
    check_rows(config, model, mesh)
    fsdp = mesh.shape["fsdp"]
    if config.split_draft and model.width % fsdp:
        raise UsageError(f"mesh: fsdp {fsdp} does not divide the width {model.width}")


def check_rows(config: Any, model: ModelConfig, mesh: Any) -> None:
    """`check_shape` for any configuration with `seq_len`, `batch_size` and `accumulate`."""
    if config.seq_len > model.context:
        raise UsageError(
            f"seq_len is {config.seq_len}; expected at most the target's {model.context}"
        )
    parts = row_shards(mesh) * config.accumulate
    if config.batch_size % parts:
        raise UsageError(
            f"batch_size is {config.batch_size}; expected a multiple of {parts}: rows are split "
            f"over {row_shards(mesh)} devices and {config.accumulate} accumulated parts"
        )
    check_divides(model, mesh)

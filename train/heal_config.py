"""The configuration of a healing, and what of it can be checked before a weight is read."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from dejax.ckpt.hf_weights import read_json
from dejax.config import ModelConfig
from dejax.errors import UsageError
from dejax.paths import shown
from dejax.sharding import MeshConfig, check_divides
from dejax.target import load_config, model_folder
from train.distill_config import check_rows, check_sizes
from train.encoding import LossOn
from train.loop import LoopConfig, check_seed_and_devices
from train.optimizer import OptimizerConfig
from train.upcycle_target import dense_config

Part = Literal["routers", "down", "norms", "all"]
"""What can be trained of a MoE."""


@dataclass(frozen=True)
class HealConfig:
    """A healing: an upcycled MoE learns the logits of the dense model that it was made from.

    Attributes:
      target: folder of the MoE, as `dejax upcycle` writes it; dense: the dense model, a folder or a
      .gguf file; data, loss_on, text_column: as `DistillConfig` has them.

      trained: routers, down (all down projections, of routed and shared experts and dense layers),
      norms; or all: every weight but embedding and head, which upcycling leaves as they are.
      Selection biases are never trained: they carry no gradient. balance_weight: of the
      load-balance loss, whose loads are those of the whole batch; temperature: of the logit loss.

      seq_len, batch_size, accumulate, mesh, cpu_devices: as `DistillConfig` has them; dtype: what
      the dense model's weights are held in (the MoE's are float32); compute: dtype of activations;
      remat: what a backward pass computes again for less memory, nothing or whole layers;
      eval_rows: held-out rows to measure on, at most.
    """

    target: str
    dense: str
    data: str = "demo"
    loss_on: LossOn = "all"
    text_column: str = "text"
    trained: tuple[Part, ...] = ("routers", "down", "norms")
    balance_weight: float = 0.01
    temperature: float = 1.0
    optimizer: OptimizerConfig = OptimizerConfig()
    loop: LoopConfig = LoopConfig(steps=200)
    seq_len: int = 512
    batch_size: int = 4
    accumulate: int = 1
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    compute: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["none", "layer"] = "none"
    eval_rows: int = 16
    mesh: MeshConfig = MeshConfig()
    cpu_devices: int = 1
    seed: int = 0

    def __post_init__(self):
        check_sizes(self, "seq_len", "batch_size", "accumulate", "eval_rows")
        if not self.trained:
            raise UsageError("trained is empty; expected routers, down, norms, or all")
        if not 0 <= self.balance_weight < math.inf or not 0 < self.temperature < math.inf:
            raise UsageError(
                f"balance_weight is {self.balance_weight} and temperature {self.temperature}; "
                "expected balance_weight 0 or more, and temperature above 0"
            )
        if self.loop.norms_every or self.loop.simulate_every or self.loop.decode_every:
            raise UsageError(
                "loop: norms_every, simulate_every and decode_every are for draft experts; "
                "expected 0 in a healing"
            )
        check_seed_and_devices(self.seed, self.cpu_devices)


def check_models(config: HealConfig, mesh: Any) -> tuple[ModelConfig, ModelConfig]:
    """The configurations of the dense model and the MoE, once everything is known to fit.

    Raises:
      UsageError: a model is not there, is not of its kind, or does not fit the other, the batch or
        the mesh.
    """
    folder = model_folder(config.target)
    moe = load_config(folder)
    if not moe.moe_layers:
        raise UsageError(
            f"target: {shown(folder)} is a dense {moe.family}; expected a mixture of experts, such "
            "as `dejax upcycle` writes"
        )
    if "quantization_config" in read_json(folder / "config.json"):
        raise UsageError(f"target: {shown(folder)} is quantised; expected weights to be trained")
    dense = dense_config(config.dense)
    if dense.vocab_size != moe.vocab_size:
        raise UsageError(
            f"the dense model has a vocabulary of {dense.vocab_size} tokens, the target of "
            f"{moe.vocab_size}; expected the dense model that the target was made from"
        )
    check_rows(config, moe, mesh)
    if config.seq_len > dense.context:
        raise UsageError(
            f"seq_len is {config.seq_len}; expected at most the dense model's {dense.context}"
        )
    check_divides(dense, mesh)
    return dense, moe


def check_tokenizers(dense: Any, moe: Any) -> None:
    """Refuses models of the same size of vocabulary whose tokens are others.

    Raises:
      UsageError: so.
    """
    if dense is not None and moe is not None and dense.get_vocab() != moe.get_vocab():
        raise UsageError(
            "the dense model's tokenizer has other tokens than the target's; expected the dense "
            "model that the target was made from"
        )

"""Model and draft configurations: frozen, checked on construction, reached in one hop.

`dejax.families` builds a `ModelConfig` from a checkpoint's `config.json`; every module takes only
its own part (`MLAConfig`, `RopeConfig`, `MoEConfig`). Field names are dejax's, not a checkpoint's.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Literal

from dejax.errors import UsageError


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)


def _require_positive(where: str, **values: int) -> None:
    for name, value in values.items():
        _require(value >= 1, f"{where}: {name} is {value}; expected a positive integer")


@dataclass(frozen=True)
class YarnConfig:
    """YaRN context extension (arXiv 2309.00071) with DeepSeek's two magnitude factors."""

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self):
        _require(self.factor > 0, f"rope: YaRN factor is {self.factor}; expected > 0")
        _require_positive("rope", original_context=self.original_context)
        factor = 1.0 if self.attention_factor is None else self.attention_factor
        positive = (self.beta_fast, self.beta_slow, factor)
        _require(
            min(positive) > 0 and min(self.mscale, self.mscale_all_dim) >= 0,
            f"rope: {self}; expected positive betas and attention factor, and mscales >= 0",
        )


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of `dim` dimensions; `interleaved` rotates pairs (0,1), (2,3), ..."""

    dim: int
    theta: float
    interleaved: bool
    yarn: YarnConfig | None = None

    def __post_init__(self):
        _require(
            self.dim >= 2 and self.dim % 2 == 0, f"rope: dim is {self.dim}; expected an even number"
        )
        _require(self.theta > 1, f"rope: theta is {self.theta}; expected > 1")


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    heads: int
    query_rank: int | None
    kv_rank: int
    nope_dim: int
    value_dim: int
    rope: RopeConfig
    bias: bool = False
    latent_norm_eps: float = 1e-6

    def __post_init__(self):
        _require_positive(
            "attention",
            heads=self.heads,
            kv_rank=self.kv_rank,
            nope_dim=self.nope_dim,
            value_dim=self.value_dim,
        )
        _require(
            self.query_rank is None or self.query_rank >= 1,
            f"attention: query_rank is {self.query_rank}; expected a positive integer or none",
        )


@dataclass(frozen=True)
class MoEConfig:
    """Routed and shared experts of the MoE layers, and the routing rule.

    `groups` and `groups_kept` limit the selection to the best groups of experts (1 and 1: no
    limit).
    """

    num_experts: int
    top_k: int
    expert_width: int
    shared_width: int
    first_dense: int
    scaling: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    scoring: Literal["softmax"] = "softmax"

    def __post_init__(self):
        _require_positive(
            "experts", num_experts=self.num_experts, top_k=self.top_k, width=self.expert_width
        )
        _require(
            self.top_k <= self.num_experts,
            f"experts: {self.top_k} per token out of {self.num_experts}; expected at most all",
        )
        _require(self.shared_width >= 0, "experts: the shared width is negative")
        _require(self.first_dense >= 0, "experts: the number of leading dense layers is negative")
        _require_positive("experts", groups=self.groups, groups_kept=self.groups_kept)
        _require(
            self.num_experts % self.groups == 0 and self.groups_kept <= self.groups,
            f"experts: {self.groups} groups ({self.groups_kept} kept) of {self.num_experts}; "
            "expected groups that divide the experts, and at most all groups kept",
        )
        in_kept = self.num_experts // self.groups * self.groups_kept
        _require(
            self.top_k <= in_kept,
            f"experts: {self.top_k} experts per token, but only {in_kept} lie in the kept groups",
        )


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only target: everything that fixes its arithmetic."""

    family: str
    vocab_size: int
    width: int
    num_layers: int
    dense_width: int
    context: int
    norm_eps: float
    tied: bool
    attention: MLAConfig
    moe: MoEConfig
    mlp_bias: bool = False
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self):
        _require_positive(
            "model",
            vocab_size=self.vocab_size,
            width=self.width,
            num_layers=self.num_layers,
            dense_width=self.dense_width,
            context=self.context,
        )
        _require(self.norm_eps > 0, f"model: norm_eps is {self.norm_eps}; expected > 0")

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts, in the decoder's own count."""
        return tuple(range(min(self.moe.first_dense, self.num_layers), self.num_layers))

    @property
    def expert_params(self) -> int:
        """Parameters of one routed expert."""
        return 3 * self.width * self.moe.expert_width

    @property
    def routed_params(self) -> int:
        """Parameters of all routed experts of all layers."""
        return len(self.moe_layers) * self.moe.num_experts * self.expert_params

    def identity(self) -> str:
        """A short hash of the configuration, part of a target's identity."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class DraftConfig:
    """Draft experts (DraftExpert, arXiv 2607.24434, section 4): one per MoE layer.

    `width` is the hidden width of a draft expert; `top_r` the routed experts that the draft path
    keeps beside it.
    """

    width: int
    top_r: int = 1

    def __post_init__(self):
        _require_positive("draft", width=self.width)
        _require(self.top_r >= 0, f"draft: top_r is {self.top_r}; expected 0 or more")

"""Model and draft configurations: frozen, checked on construction, reached in one hop.

`dejax.families` builds a `ModelConfig` from a checkpoint's `config.json`; every module takes only
its own part (`MLAConfig` or `GQAConfig`, `RopeConfig`, `MoEConfig`). Field names are dejax's, not a
checkpoint's.
"""

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any, Literal

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
        _require(
            self.beta_fast >= self.beta_slow,
            f"rope: beta_fast is {self.beta_fast}; expected at least beta_slow ({self.beta_slow})",
        )


@dataclass(frozen=True)
class Llama3Config:
    """Llama 3.1's context extension: slow frequencies divided, fast ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self):
        _require_positive("rope", original_context=self.original_context)
        _require(
            self.factor > 0 and 0 < self.low_freq_factor < self.high_freq_factor,
            f"rope: {self}; expected a factor > 0 and 0 < low_freq_factor < high_freq_factor",
        )


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of a head's first `dim` dimensions.

    `interleaved` rotates pairs (0, 1), (2, 3), ...; otherwise (0, dim/2), (1, dim/2 + 1), ...
    `divisors` are of each pair's frequency, as GGUF files give them.
    """

    dim: int
    theta: float
    interleaved: bool
    yarn: YarnConfig | None = None
    llama3: Llama3Config | None = None
    divisors: tuple[float, ...] | None = None

    def __post_init__(self):
        _require(
            self.dim >= 2 and self.dim % 2 == 0, f"rope: dim is {self.dim}; expected an even number"
        )
        _require(
            self.divisors is None or len(self.divisors) == self.dim // 2,
            f"rope: {len(self.divisors or ())} divisors; expected {self.dim // 2}",
        )
        _require(
            self.divisors is None or all(0 < d < math.inf for d in self.divisors),
            "rope: a divisor of the frequencies is not a positive number",
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
class GQAConfig:
    """Grouped-query attention: every `heads / kv_heads` query heads share a key and a value head.

    Attributes:
      bias, out_bias: on the query, key and value projections, and on the output projection.
      norm: RMS norm of queries and keys before the rotation: of each head, or of the whole
        projection; None without.
      clip: bound on the absolute value of queries, keys and values; None without.
      sinks: one learned logit a head that takes part in the softmax and adds nothing.
      window, windowed: a row sees the last `window` positions (its own included) in the layers
        `windowed`, and everything before it in the others.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig
    bias: bool = False
    out_bias: bool = False
    norm: Literal["head", "whole"] | None = None
    clip: float | None = None
    sinks: bool = False
    window: int | None = None
    windowed: tuple[int, ...] = ()

    def __post_init__(self):
        _require_positive(
            "attention", heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim
        )
        _require(
            self.heads % self.kv_heads == 0,
            f"attention: {self.heads} heads on {self.kv_heads} key heads; expected a multiple",
        )
        _require(
            self.rope.dim <= self.head_dim,
            f"attention: {self.rope.dim} rotary dimensions in heads of {self.head_dim}",
        )
        _require(
            self.clip is None or self.clip > 0, f"attention: clip is {self.clip}; expected > 0"
        )
        if self.windowed or self.window is not None:
            _require(
                self.window is not None and self.window >= 1,
                f"attention: window is {self.window}; expected a positive integer "
                f"({len(self.windowed)} layers have one)",
            )


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gpt-oss's activation: (up + 1) * gate * sigmoid(alpha * gate), both clamped at `limit`."""

    alpha: float
    limit: float

    def __post_init__(self):
        _require(
            self.alpha > 0 and self.limit > 0, f"experts: {self}; expected alpha and limit > 0"
        )


@dataclass(frozen=True)
class MoEConfig:
    """Routed and shared experts of the MoE layers, and the routing rule.

    Attributes:
      dense_layers: the layers without experts.
      scoring: of the router's logits: softmax over all experts, sigmoid of each, or softmax over
        the chosen ones alone.
      normalised: the chosen experts' scores are divided by their sum; scaling: factor on the gates.
      selection_bias: a learned number an expert that counts in the selection, never in the gates.
      groups, groups_kept: limit the selection to the best groups of experts (1 and 1: no limit).
      group_score: what ranks a group: its largest score, or the sum of its two largest.
      router_bias, expert_bias: biases on the router's and on every expert's three projections.
      activation: None is SwiGLU.
    """

    num_experts: int
    top_k: int
    expert_width: int
    shared_width: int = 0
    dense_layers: tuple[int, ...] = ()
    scoring: Literal["softmax", "sigmoid", "softmax_chosen"] = "softmax"
    normalised: bool = False
    scaling: float = 1.0
    selection_bias: bool = False
    groups: int = 1
    groups_kept: int = 1
    group_score: Literal["max", "top2"] = "max"
    router_bias: bool = False
    expert_bias: bool = False
    activation: ClampedSwiGLU | None = None

    def __post_init__(self):
        _require_positive(
            "experts", num_experts=self.num_experts, top_k=self.top_k, width=self.expert_width
        )
        _require(
            self.top_k <= self.num_experts,
            f"experts: {self.top_k} per token out of {self.num_experts}; expected at most all",
        )
        _require(self.shared_width >= 0, "experts: the shared width is negative")
        _require(
            0 < self.scaling < math.inf,
            f"experts: scaling (routed_scaling_factor) is {self.scaling}; expected a number > 0",
        )
        _require(min(self.dense_layers, default=0) >= 0, "experts: a dense layer below 0")
        _require_positive("experts", groups=self.groups, groups_kept=self.groups_kept)
        _require(
            self.num_experts % self.groups == 0 and self.groups_kept <= self.groups,
            f"experts: {self.groups} groups ({self.groups_kept} kept) of {self.num_experts}; "
            "expected groups that divide the experts, and at most all groups kept",
        )
        _require(
            self.group_score == "max" or self.num_experts >= 2 * self.groups,
            f"experts: {self.groups} groups of {self.num_experts}; expected two experts a group",
        )
        in_kept = self.num_experts // self.groups * self.groups_kept
        _require(
            self.top_k <= in_kept,
            f"experts: {self.top_k} experts per token, but only {in_kept} lie in the kept groups",
        )


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only target: everything that fixes its arithmetic.

    `experts` is None for a dense target; what needs a MoE asks for `moe`.
    """

    family: str
    vocab_size: int
    width: int
    num_layers: int
    dense_width: int
    context: int
    norm_eps: float
    tied: bool
    attention: MLAConfig | GQAConfig
    experts: MoEConfig | None
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
    def moe(self) -> MoEConfig:
        """The experts of a MoE.

        Raises:
          UsageError: the target is dense.
        """
        if self.experts is None:
            raise UsageError(f"{self.family} is a dense family; expected a mixture of experts")
        return self.experts

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts, in the decoder's own count."""
        if self.experts is None:
            return ()
        return tuple(i for i in range(self.num_layers) if i not in self.experts.dense_layers)

    @property
    def routes_per_token(self) -> int:
        """Layer-experts that one token is routed to; 0 for a dense target."""
        return len(self.moe_layers) * self.experts.top_k if self.experts else 0

    @property
    def window(self) -> int | None:
        """Positions that a row sees in the layers `windowed`; None where no layer has a window."""
        attention = self.attention
        return attention.window if isinstance(attention, GQAConfig) and attention.windowed else None

    def is_windowed(self, layer: int) -> bool:
        """Whether a layer's attention has a sliding window."""
        return isinstance(self.attention, GQAConfig) and layer in self.attention.windowed

    @property
    def expert_shape(self) -> tuple[int, int, int]:
        """Shape [3, F, D] of an expert's record, of [3, F + 1, D + 1] where experts have biases."""
        extra = int(self.moe.expert_bias)
        return 3, self.moe.expert_width + extra, self.width + extra

    @property
    def expert_params(self) -> int:
        """Parameters of one routed expert."""
        weights = 3 * self.width * self.moe.expert_width
        return weights + self.moe.expert_bias * (2 * self.moe.expert_width + self.width)

    @property
    def routed_params(self) -> int:
        """Parameters of all routed experts of all layers."""
        if self.experts is None:
            return 0
        return len(self.moe_layers) * self.experts.num_experts * self.expert_params

    def with_rope_divisors(self, divisors: tuple[float, ...]) -> "ModelConfig":
        """The same with these divisors of the rotary frequencies."""
        rope = dataclasses.replace(self.attention.rope, divisors=divisors)
        attention = dataclasses.replace(self.attention, rope=rope)
        return dataclasses.replace(self, attention=attention)

    def identity(self) -> str:
        """A short hash of the configuration, part of a target's identity.

        Fields that have their default are left out, so that a new one changes no identity.
        """
        text = json.dumps(_told(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _told(part: Any) -> Any:
    """A configuration as plain values, without the fields that have their default."""
    if not dataclasses.is_dataclass(part):
        return part
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    defaults = {field.name: field.default for field in dataclasses.fields(part)}
    kind = type(part).__name__
    kept = {name: _told(v) for name, v in values.items() if v != defaults[name]}
    return kept | {"kind": kind}


@dataclass(frozen=True)
class DraftConfig:
    """Draft experts (DraftExpert, arXiv 2607.24434, section 4): one per MoE layer.

    Attributes:
      width: the hidden width of a draft expert; top_r: the routed experts that the draft path keeps
        beside it.
      gates: their gates: `full`, as the target's rule gives them; or `plain`, for families that
        choose by another number than the gate, or divide gates by their sum: the top_r by what
        they are chosen by, with gates that are not divided. Such a draft path is an ordinary model
        with top_r experts a token.
    """

    width: int
    top_r: int = 1
    gates: Literal["full", "plain"] = "full"

    def __post_init__(self):
        _require_positive("draft", width=self.width)
        _require(self.top_r >= 0, f"draft: top_r is {self.top_r}; expected 0 or more")

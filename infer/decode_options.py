"""How one sequence is decoded: the options of the decode loop, and what of them fits a target."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from dejax.config import ModelConfig
from dejax.errors import UsageError
from dejax.spec.confidence import Confidence
from dejax.spec.control import ControlConfig
from dejax.spec.ecospec import EcoConfig
from dejax.spec.rules import REJECTION, Rule, check_rule
from dejax.spec.sampling import SamplingConfig
from dejax.spec.tree import CHAIN, TreeConfig
from infer.buckets import ROW_BUCKETS
from infer.tree_drafter import check_tree

Mode = Literal["ar", "top-r", "draft-expert", "n-gram", "ecospec", "moe-spec"]
MODES: tuple[Mode, ...] = get_args(Mode)
DRAFT_MODES: tuple[Mode, ...] = ("draft-expert", "ecospec", "moe-spec")
"""Modes that need draft experts."""
PATH_MODES: tuple[Mode, ...] = ("top-r", *DRAFT_MODES)
"""Modes whose drafter is a path through the target itself."""


@dataclass(frozen=True)
class DecodeOptions:
    """How to decode one sequence.

    Attributes:
      mode: `ar`, `top-r` (shared + top-r routed experts as drafter), `draft-expert`, `n-gram`
        (what followed the same tokens before), `ecospec` (drafts of `draft-expert`, of which
        those are verified that are worth their experts), or `moe-spec` (the same drafts, verified
        with few experts: NOT lossless; the budget is the engine's).
      r: routed experts that the drafter keeps, in the modes that draft with the target itself.
      prefetch: whether the draft router's predictions are prefetched.
      governor: whether drafting is switched off while it does not pay (`dejax.spec.governor`).
      tree: how the drafts of a path through the target branch; other drafts are chains.
      rule: how a draft is accepted (`dejax.spec.rules`).
      eco: what experts weigh in `ecospec`.
      draft_resident: given, a draft pass takes an expert on the device in place of one that is not,
        if its gate is at least so many times as large (0 to 1).
      confidence: whose word on a drafted token counts, where the draft has a confidence head.
    """

    mode: Mode = "ar"
    r: int = 1
    max_new_tokens: int = 64
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    prefetch: bool = True
    stop_at_eos: bool = True
    governor: bool = False
    tree: TreeConfig = CHAIN
    rule: Rule = "match"
    eco: EcoConfig = EcoConfig()
    draft_resident: float | None = None
    confidence: Confidence = "head"

    def __post_init__(self):
        if self.mode not in MODES:
            raise UsageError(f"mode {self.mode!r} is unknown; expected one of {', '.join(MODES)}")
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens is {self.max_new_tokens}; expected 1 or more")
        if self.r < 1:
            raise UsageError(f"r is {self.r}; expected 1 or more routed experts")
        if self.control.draft_length >= ROW_BUCKETS[-1]:
            most = ROW_BUCKETS[-1] - 1
            raise UsageError(f"draft_length {self.control.draft_length} exceeds {most}")
        if self.mode == "ecospec" and self.rule in REJECTION:
            raise UsageError(
                f"rule {self.rule} would lose the target's law: mode ecospec chooses nodes by the "
                "experts that their sampled values need; give --rule match or R4"
            )
        check_rule(self.rule, control=self.control, tree=self.tree)
        ratio = self.draft_resident
        if ratio is not None and not 0 <= ratio <= 1:
            raise UsageError(f"draft_resident is {ratio}; expected a ratio of gates, 0 to 1")
        if ratio is not None and self.rule in REJECTION:
            raise UsageError(
                f"rule {self.rule} with --draft-resident: its tokens would depend on what is on "
                "the device; give --rule match or R4"
            )
        if self.confidence not in get_args(Confidence):
            raise UsageError(
                f"confidence {self.confidence!r} is unknown; expected head or probability"
            )

    @property
    def draft_tree(self) -> TreeConfig:
        """How drafts branch; in `ecospec` a chain is a tree too, since its length is chosen."""
        if self.mode == "ecospec" and self.tree.is_chain:
            length = self.control.draft_length
            return TreeConfig(branching=1, depth=length, keep=length)
        return self.tree

    @property
    def draft_nodes(self) -> int:
        """Most tokens of a draft."""
        if self.mode == "ar":
            return 0
        return self.control.draft_length if not self.branches else self.draft_tree.nodes

    @property
    def draft_levels(self) -> int:
        """Most tokens of a draft that can be accepted."""
        return self.control.draft_length if not self.branches else self.draft_tree.levels

    @property
    def drafted_rows(self) -> int:
        """Most rows of a round's draft passes after that over the pending token."""
        return sum(self.draft_tree.pass_rows()) if self.branches else self.draft_nodes

    @property
    def predicts(self) -> bool:
        """Whether a trained predictor has a say."""
        return self.mode == "ecospec" and self.eco.predictor == "trained"

    @property
    def branches(self) -> bool:
        """Whether drafts are trees."""
        return self.mode in PATH_MODES and not self.draft_tree.is_chain


def check_options(options: DecodeOptions, config: ModelConfig, *, drafts: bool) -> None:
    """Refuses options that do not fit a target; `drafts` tells whether it has draft experts.

    Raises:
      UsageError: the mode drafts with routed experts and the target has none, r exceeds its top-k,
        or the mode needs draft experts and there are none.
    """
    check_tree(options.draft_tree, context=config.context)
    if options.mode == "ar":
        return
    if drafts and options.mode not in DRAFT_MODES:
        raise UsageError(
            f"mode {options.mode} takes no draft experts: give --draft only with "
            f"{', '.join(DRAFT_MODES)}"
        )
    if options.mode not in PATH_MODES:
        return
    if not config.moe_layers:
        raise UsageError(
            f"mode {options.mode} drafts with routed experts, and the target ({config.family}) is "
            "dense; decode it with mode ar or n-gram"
        )
    top_k = config.moe.top_k
    if options.r > top_k:
        raise UsageError(f"r is {options.r}; the target routes to {top_k} experts per token")
    if options.mode in DRAFT_MODES and not drafts:
        raise UsageError(f"mode {options.mode} needs draft experts: give --draft")

"""The options of decoding that programs share: how tokens are chosen, drafted and moved."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from dejax.ckpt.draft_state import Bound
from dejax.ckpt.predictor_file import MADE_BY, load_predictor
from dejax.draft.expert import Draft
from dejax.draft.predictor import ExpertPredictor
from dejax.errors import UsageError
from dejax.paths import kind_of
from dejax.spec.confidence import Confidence
from dejax.spec.control import ControlConfig, Controller
from dejax.spec.ecospec import PREDICTORS, EcoConfig, Untrained
from dejax.spec.rules import Rule
from dejax.spec.sampling import SamplingConfig
from dejax.spec.tree_options import parse_tree
from infer.argument_types import (
    Bytes,
    NonNegativeFloat,
    NonNegativeInt,
    ParsedBy,
    PositiveInt,
    did_you_mean,
    non_negative_int,
    number,
)
from infer.decode_options import DRAFT_MODES, PATH_MODES, DecodeOptions, Mode
from infer.engines import DeviceCache, EngineName, check_draft_resident, check_engine
from infer.link import parse_link
from infer.tree_drafter import check_strict
from infer.units import format_bytes, parse_bytes

Budget = int | Literal["cache", "off"]
HALF = "half of what a token uses"


def top_mass(text: str) -> float:
    """`--top-p`: above 0, at most 1."""
    value = number(text)
    if not 0 < value <= 1:
        raise UsageError(f"{text!r} is out of range; expected a number above 0, at most 1")
    return value


def probability(text: str) -> float:
    """`--keep`, `--draft-resident`: from 0 to 1."""
    value = number(text)
    if not 0 <= value <= 1:
        raise UsageError(f"{text!r} is out of range; expected a number from 0 to 1")
    return value


def sampling_seed(text: str) -> int:
    """`--seed`: 32 bits."""
    value = non_negative_int(text)
    if value >= 2**32:
        raise UsageError(f"{text!r} is out of range; expected 0 to {2**32 - 1}")
    return value


def link_text(text: str) -> str:
    """`--link`, once it is known to be one."""
    parse_link(text)
    return text


def tree_text(text: str) -> str:
    """`--tree`, once it is known to be one."""
    parse_tree(text)
    return text


def parse_budget(text: str) -> Budget:
    """`--budget`: a number of layer-experts, `cache`, or `off`."""
    if text == "cache" or text == "off":
        return text
    return non_negative_int(text)


def predictor_name(text: str) -> Untrained | Path:
    """`--predictor`: a word, or the path of a trained one."""
    for word in PREDICTORS:
        if text == word:
            return word
    if kind_of(text) is None:
        hint = did_you_mean(text, PREDICTORS)
        raise UsageError(
            f"{text!r} is not one of {', '.join(PREDICTORS)}, and no file of `{MADE_BY}`{hint}"
        )
    return Path(text)


def show_device_cache(value: DeviceCache) -> str:
    """What the default is."""
    return "0, with engine resident all" if value == "auto" else format_bytes(value)


@dataclass(frozen=True)
class DecodingArguments:
    """Options of `infer.generate.generate`, as flags."""

    r: PositiveInt = 1
    """Routed experts a layer that the drafter of a path mode keeps, up to top-k."""
    max_new_tokens: PositiveInt = 64
    """New tokens of a prompt at most; the target's context ends it earlier."""
    temperature: NonNegativeFloat = 0.0
    """Temperature of seeded sampling; 0 is greedy."""
    top_k: NonNegativeInt = 0
    """Sample among so many of the likeliest tokens only; 0 is all."""
    top_p: Annotated[float, ParsedBy(top_mass, "FLOAT")] = 1.0
    """Sample among the likeliest tokens that have this share of the probability only; 1 is all."""
    seed: Annotated[int, ParsedBy(sampling_seed, "INT")] = 0
    """Seed of the sampling noise, 0 to 2^32 - 1."""
    draft_length: PositiveInt = 8
    """Tokens of a draft at most."""
    truncate: bool = True
    """Let the controller stop a draft early; without it all have --draft-length tokens."""
    tau: NonNegativeFloat = 0.6
    """Confidence below which a token is unsure; above 1 all are: a stop by expansion alone."""
    budget: Annotated[
        Budget | None, ParsedBy(parse_budget, "N|cache|off", lambda budget: budget or HALF)
    ] = None
    """New experts an unsure token may add: N, what the link hides (cache); off: confidence only."""
    controller: Controller = "consumer"
    """Stops by tau and budget (consumer, producer); or, without them, by time (cost) or chance."""
    keep: Annotated[float, ParsedBy(probability, "FLOAT")] = 0.75
    """Probability (0 to 1) with which controller random keeps a drafted token."""
    confidence: Confidence = "head"
    """Confidence in a drafted token: the draft's head, where it has one, or its probability."""
    tree: Annotated[str, ParsedBy(tree_text, "SPEC")] = "chain"
    """Drafts of path modes as trees: BxD (2x3), BxD:N, best8, eagle:N, static:0,0,1."""
    expert_cost: NonNegativeFloat = 0.3
    """Mode ecospec: what a token's experts cost beside the rest of a round; 0: by confidence."""
    predictor: Annotated[
        Untrained | Path, ParsedBy(predictor_name, "persistence|table|router|FILE")
    ] = "router"
    """Mode ecospec: experts by draft router, token id, last token; or FILE of train.predictor."""
    draft_resident: Annotated[float | None, ParsedBy(probability, "RATIO")] = None
    """Let drafts use an expert on the device whose gate is RATIO of the chosen one's, at least."""
    rule: Rule = "match"
    """Acceptance: match emits the tokens of mode ar; R1 (chains), R2, R3, R4 others of its law."""
    prefetch: bool = True
    """Prefetch the experts that the draft router predicts."""
    engine: EngineName = "host"
    """How a pass runs: layer by layer, in one step that calls for experts, or that has them all."""
    strict: bool = False
    """Pad every target pass to one shape: logits bitwise those of mode ar --strict (slower)."""
    device_cache: Annotated[DeviceCache, ParsedBy(parse_bytes, "BYTES", show_device_cache)] = "auto"
    """Bytes of experts kept on the device between rounds, such as 512MiB, 0 or all."""
    host_cache: Bytes = None
    """Bytes of a converted target's experts kept in host memory, such as 4GiB, 0 or all."""
    look_ahead: bool = False
    """Also ask for the experts that the next layer's router would choose on this layer's input."""
    link: Annotated[str, ParsedBy(link_text, "real|disk|sim:GBPS[,LATENCY_US]")] = "real"
    """The link experts cross: real, disk (cold reads), or simulated (GB/s, us a transfer)."""
    chat: bool = True
    """Use the tokenizer's chat template, if it has one."""

    def __post_init__(self):
        if self.rule != "match":  # whether a rule fits depends on the mode too: `check_mode`
            replace(self, rule="match")  # all other checks
            return
        self.options("top-r")
        check_engine(self.engine, strict=self.strict)
        check_draft_resident(self.engine, self.draft_resident)
        check_strict(parse_tree(self.tree), strict=self.strict)

    def check_mode(self, mode: Mode, *, drafts: bool) -> None:
        """Refuses options that would do nothing in a mode; `drafts`: whether --draft is given.

        Raises:
          UsageError: there is one, the rule does not fit the mode, or the mode needs --draft.
        """
        options = self.options(mode)
        if mode in DRAFT_MODES and not drafts:
            raise UsageError(f"--mode {mode} needs --draft: an adapter folder, or init[:SEED]")
        plain, eco = DecodingArguments(), ("ecospec",)
        for name, given, modes in (
            ("--draft", drafts, DRAFT_MODES),
            ("--r", self.r != plain.r, PATH_MODES),
            ("--draft-resident", self.draft_resident is not None, PATH_MODES),
            ("--tree", self.tree != plain.tree, PATH_MODES),
            ("--confidence", self.confidence != plain.confidence, DRAFT_MODES),
            ("--expert-cost", self.expert_cost != plain.expert_cost, eco),
            ("--predictor", self.predictor != plain.predictor, eco),
        ):
            if given and mode not in modes:
                raise UsageError(f"{name} is for --mode {' or '.join(modes)}, not {mode}")
        check_strict(options.draft_tree, strict=self.strict)

    @property
    def sampling(self) -> SamplingConfig:
        """How tokens are chosen."""
        return SamplingConfig(self.temperature, self.top_k, self.top_p, self.seed)

    @property
    def control(self) -> ControlConfig:
        """How long drafts are, and when they stop."""
        return ControlConfig(
            draft_length=self.draft_length,
            truncate=self.truncate,
            tau=self.tau,
            budget=self.budget,
            controller=self.controller,
            keep=self.keep,
        )

    @property
    def eco(self) -> EcoConfig:
        """What experts weigh in the choice of a draft."""
        name = "trained" if isinstance(self.predictor, Path) else self.predictor
        return EcoConfig(self.expert_cost, name)

    def trained_predictor(self, target: Bound, draft: Draft | None) -> ExpertPredictor | None:
        """What `--predictor FILE` names; None where it names no file.

        Raises:
          UsageError: as `load_predictor`.
        """
        if not isinstance(self.predictor, Path):
            return None
        return load_predictor(self.predictor, target, draft)

    def options(self, mode: Mode) -> DecodeOptions:
        """What the decode loop takes of them."""
        return DecodeOptions(
            mode=mode,
            r=self.r,
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            control=self.control,
            prefetch=self.prefetch,
            tree=parse_tree(self.tree),
            rule=self.rule,
            eco=self.eco,
            draft_resident=self.draft_resident,
            confidence=self.confidence,
        )

    def given(self) -> dict[str, Any]:
        """Them all as `generate` takes them."""
        names = ("r", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "control")
        names = (*names, "draft_resident", "rule", "eco", "confidence", "prefetch", "engine")
        names = (*names, "strict")
        names = (*names, "device_cache", "host_cache", "link", "look_ahead", "chat")
        return {name: getattr(self, name) for name in names} | {"tree": parse_tree(self.tree)}

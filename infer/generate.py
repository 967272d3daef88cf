"""`dejax generate MODEL`: decodes prompts, with the routed experts offloaded.

`generate` is the same for programs: prompts in, one `Generation` a prompt out.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from dejax.ckpt.draft_state import resolve_draft
from dejax.draft.expert import Draft
from dejax.errors import UsageError
from dejax.spec.control import ControlConfig, Controller
from dejax.spec.sampling import SamplingConfig
from dejax.target import Target, load_target
from infer.arguments import (
    Bytes,
    NonNegativeFloat,
    NonNegativeInt,
    ParsedBy,
    Positional,
    PositiveInt,
    check_output,
    format_bytes,
    non_negative_int,
    parse,
    read_prompts,
    write_json,
)
from infer.console import progress, say
from infer.decode import DecodeOptions, Mode
from infer.decoder import Decoder, Offload
from infer.engine import LAYOUT
from infer.link import parse_link
from infer.report import stats
from infer.trace import Round, write_trace

CAPACITY_STEP = 256
Budget = int | Literal["cache", "off"]


@dataclass(frozen=True)
class Generation:
    """One decoded prompt, with the fields of the JSON contract."""

    id: str
    prompt: str
    prompt_tokens: list[int]
    tokens: list[int]
    text: str
    finish_reason: str
    mode: str
    lossless: bool
    stats: dict[str, Any]
    trace: tuple[Round, ...]
    passed_through: dict[str, Any] = field(default_factory=dict)
    """What else the prompt's record carried."""

    def to_json(self) -> dict[str, Any]:
        """The fields of the contract, and what is passed through; not the trace."""
        names = ("id", "prompt", "prompt_tokens", "tokens", "text", "finish_reason", "mode")
        record = {name: getattr(self, name) for name in names}
        return self.passed_through | record | {"lossless": self.lossless, "stats": self.stats}


def encode_prompt(target: Target, prompt: str, *, chat: bool = True) -> list[int]:
    """Token ids of a prompt; with `chat`, as the user's turn of the tokenizer's chat template.

    Raises:
      UsageError: the target has no tokenizer.
    """
    if target.tokenizer is None:
        raise UsageError(f"{target.name} has no tokenizer; give prompts as token ids")
    if chat and target.tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        text = target.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return target.tokenizer.encode(text, add_special_tokens=False)
    return target.tokenizer.encode(prompt)


def to_generation(
    target: Target, prompt: dict[str, Any], ids: list[int], trace: tuple[Round, ...], options: Any
) -> Generation:
    """The result of one prompt, from its trace."""
    tokens = [token for record in trace for token in record.emitted]
    text = ""
    if target.tokenizer is not None:
        text = target.tokenizer.decode(tokens, skip_special_tokens=True)
    return Generation(
        id=str(prompt["id"]),
        prompt=prompt["prompt"],
        prompt_tokens=ids,
        tokens=tokens,
        text=text,
        finish_reason=str(trace[-1].finish_reason),
        mode=options.mode,
        lossless=True,
        stats=stats(trace) | {"layout": LAYOUT},
        trace=trace,
        passed_through={k: v for k, v in prompt.items() if k not in ("id", "prompt")},
    )


def _normalise(target: Target, prompts: Sequence[Any], chat: bool) -> Iterator[tuple[dict, list]]:
    """(record, token ids) of prompts given as text, as token ids, or as records with `prompt`."""
    if isinstance(prompts, str):
        raise UsageError("prompts is one text; expected a list of prompts")
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        if not isinstance(prompt, dict):
            yield {"id": index, "prompt": ""}, [int(token) for token in prompt]
            continue
        record: dict[str, Any] = {"id": index} | prompt
        text = record.get("prompt")
        if not isinstance(text, str):
            raise UsageError(f"prompt {record['id']} has no text under 'prompt'")
        if not _is_text(text):
            raise UsageError(f"prompt {record['id']} is not UTF-8 text")
        yield record, encode_prompt(target, text, chat=chat)


def _check_prompts(target: Target, encoded: Sequence[tuple[dict, list]]) -> None:
    config = target.config
    seen: set[str] = set()
    for record, ids in encoded:
        if str(record["id"]) in seen:
            raise UsageError(f"two prompts have the id {record['id']!r}; expected each id once")
        seen.add(str(record["id"]))
        if not ids:
            raise UsageError(f"prompt {record['id']} has no tokens; expected at least one")
        if len(ids) >= config.context:
            raise UsageError(
                f"prompt {record['id']} has {len(ids)} tokens; the context of {config.context} "
                "leaves no room for a new one"
            )
        outside = [i for i in ids if not 0 <= i < config.vocab_size]
        if outside:
            raise UsageError(
                f"prompt {record['id']} has token {outside[0]}; the vocabulary has "
                f"{config.vocab_size} tokens"
            )


def generate(
    target: Target,
    prompts: Sequence[Any],
    *,
    draft: Draft | None = None,
    mode: Mode = "ar",
    r: int = 1,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    control: ControlConfig | None = None,
    prefetch: bool = True,
    device_cache: int | None = 0,
    host_cache: int | None = None,
    link: str = "real",
    chat: bool = True,
    on_round: Callable[[int, Round], None] = lambda index, record: None,
) -> list[Generation]:
    """Decodes prompts one after another; tokens do not depend on mode, caches, prefetch or link.

    Args:
      target: from `dejax.load_target`.
      prompts: texts, token id lists, or records with `id` and `prompt`.
      draft: draft experts (`dejax.load_draft`), for mode "draft-expert".
      mode: "ar", "top-r" or "draft-expert"; r: routed experts the drafter keeps.
      control: draft length and stop rule.
      device_cache, host_cache: bytes of experts to keep, None for all, 0 for none.
      link: "real" or "sim:GBPS[,LATENCY_US]".
      chat: use the tokenizer's chat template.
      on_round: called with the prompt's index and each trace record.

    Raises:
      UsageError: an option or a prompt does not fit the target.
      FailedError: an expert cannot be read.
    """
    options = DecodeOptions(
        mode=mode,
        r=r,
        max_new_tokens=max_new_tokens,
        sampling=SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
        control=ControlConfig() if control is None else control,
        prefetch=prefetch,
    )
    encoded = list(_normalise(target, prompts, chat))
    _check_prompts(target, encoded)
    longest = max((len(ids) for _, ids in encoded), default=1) + max_new_tokens
    capacity = -(-longest // CAPACITY_STEP) * CAPACITY_STEP
    offload = Offload(device_cache=device_cache, host_cache=host_cache, link=parse_link(link))
    results = []
    with Decoder(target, draft=draft, offload=offload, capacity=capacity) as decoder:
        for index, (record, ids) in enumerate(encoded):
            seen = lambda round_, index=index: on_round(index, round_)  # noqa: E731
            trace = decoder.run(ids, options, on_round=seen)
            results.append(to_generation(target, record, ids, trace, options))
    return results


def parse_budget(text: str) -> Budget:
    """`--budget`: a number of layer-experts, `cache`, or `off`."""
    if text == "cache" or text == "off":
        return text
    return non_negative_int(text)


@dataclass(frozen=True)
class Arguments:
    """Arguments of `dejax generate`."""

    model: Positional[str]
    """A Hugging Face folder, a converted folder, or tiny."""
    prompt: str | None = None
    """One prompt."""
    prompts: Path | None = None
    """A file of JSON lines with id and prompt."""
    mode: Mode = "ar"
    """How to decode; all modes emit the same tokens."""
    draft: str | None = None
    """Draft experts: an adapter folder, or init[:SEED] for untrained ones."""
    r: PositiveInt = 1
    """Routed experts that the drafter keeps."""
    max_new_tokens: PositiveInt = 64
    """Most new tokens of a prompt."""
    temperature: NonNegativeFloat = 0.0
    """0 is greedy; above, seeded sampling."""
    top_k: NonNegativeInt = 0
    """Sample among the k likeliest tokens only (0: all)."""
    top_p: float = 1.0
    """Sample among the likeliest tokens of this mass only."""
    seed: NonNegativeInt = 0
    """Seed of the sampling noise."""
    draft_length: PositiveInt = 8
    """Most tokens of a draft (K_max)."""
    truncate: bool = True
    """Stop a draft that is unsure and would pull in many new experts."""
    tau: NonNegativeFloat = 0.6
    """Confidence below which a drafted token counts as unsure."""
    budget: Annotated[Budget | None, ParsedBy(parse_budget, "N|cache|off")] = None
    """New layer-experts an unsure token may bring (default: half of what a token uses)."""
    controller: Controller = "consumer"
    """Which draft pass predicts the experts of a row."""
    prefetch: bool = True
    """Prefetch the experts that the draft router predicts."""
    device_cache: Bytes = 0
    """Bytes of experts kept on the device between rounds (512MiB, 0, all)."""
    host_cache: Bytes = None
    """Bytes of experts kept in host memory (512MiB, 0, all)."""
    link: str = "real"
    """real, or sim:GBPS[,LATENCY_US] to pace transfers at a simulated rate."""
    dtype: str = "float32"
    """What weights are held in."""
    chat: bool = True
    """Use the tokenizer's chat template."""
    trace: Path | None = None
    """Write the trace (JSON lines) here."""
    json: str | None = None
    """Write the generations as JSON here; - is standard output."""

    def __post_init__(self):
        if (self.prompt is None) == (self.prompts is None):
            raise UsageError("give either --prompt TEXT or --prompts FILE")
        if self.draft is not None and self.mode != "draft-expert":
            raise UsageError(f"--draft is for --mode draft-expert, not {self.mode}")
        if self.draft is None and self.mode == "draft-expert":
            raise UsageError("--mode draft-expert needs --draft: an adapter folder, or init[:SEED]")
        if self.r != 1 and self.mode == "ar":
            raise UsageError("--r is for the modes that draft, not ar")
        if self.prompt is not None and not _is_text(self.prompt):
            raise UsageError("--prompt is not UTF-8 text")
        SamplingConfig(self.temperature, self.top_k, self.top_p, self.seed)
        check_output(self.json)
        check_output(self.trace)


def _is_text(text: str) -> bool:
    """Whether a string can be encoded: bytes that are not UTF-8 arrive as half surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Stream:
    """Text on a terminal as it is decoded; elsewhere a progress line."""

    def __init__(self, target: Target, prompts: Sequence[dict[str, Any]], bar: Any):
        self.target, self.prompts, self.bar = target, prompts, bar
        self.tokens: list[int] = []
        self.index = -1

    def __call__(self, index: int, record: Round) -> None:
        if index != self.index:
            self.index, self.tokens = index, []
        before = self._text()
        self.tokens += record.emitted
        self.bar.advance(len(record.emitted), prompt=f"{index + 1}/{len(self.prompts)}")
        if sys.stdout.isatty() and len(self.prompts) == 1:
            sys.stdout.write(self._text()[len(before) :])
            sys.stdout.flush()

    def _text(self) -> str:
        if self.target.tokenizer is None:
            return " ".join(map(str, self.tokens))
        # A character may span tokens: what is not yet whole is held back.
        return self.target.tokenizer.decode(self.tokens, skip_special_tokens=True).rstrip("\ufffd")


def main(argv: list[str]) -> int:
    """Runs `dejax generate`."""
    args = parse(Arguments, argv, prog="dejax generate", description="Decode prompts exactly.")
    prompts = [{"id": "0", "prompt": args.prompt}]
    if args.prompts is not None:
        prompts = read_prompts(args.prompts)
    control = ControlConfig(
        draft_length=args.draft_length,
        truncate=args.truncate,
        tau=args.tau,
        budget=args.budget,
        controller=args.controller,
    )
    parse_link(args.link)
    target = load_target(args.model, args.dtype)
    draft = None if args.draft is None else resolve_draft(args.draft, target)
    one = len(prompts) == 1 and sys.stdout.isatty()
    most = min(args.max_new_tokens, target.config.context)
    total = None if one else most * len(prompts)
    with progress("decode", total, "tokens") as bar:
        results = generate(
            target,
            prompts,
            draft=draft,
            mode=args.mode,
            r=args.r,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed,
            control=control,
            prefetch=args.prefetch,
            device_cache=args.device_cache,
            host_cache=args.host_cache,
            link=args.link,
            chat=args.chat,
            on_round=_Stream(target, prompts, bar),
        )
    if args.json != "-":
        _show(results, streamed=one)
    if args.trace is not None:
        header = {"model": target.name, "mode": args.mode, "link": args.link}
        write_trace(args.trace, header, {result.id: result.trace for result in results})
    if args.json is not None:
        write_json(args.json, {"generations": [result.to_json() for result in results]})
    return 0


def _show(results: Sequence[Generation], *, streamed: bool) -> None:
    """Texts (unless streamed already) and one line of statistics."""
    for result in results:
        if streamed:
            print()
        elif len(results) == 1:
            print(result.text)
        else:
            print(f"[{result.id}] {result.text}")
    joined = stats([record for result in results for record in result.trace])
    moved = sum(kind["bytes"] for kind in joined["loads"].values())
    rate = joined["acceptance_rate"]
    tokens = sum(len(result.tokens) for result in results)
    parts = [f"{tokens} tokens, after prefill in {joined['rounds']} rounds"]
    if joined["decode_tps"] is not None:
        parts.append(f"{joined['decode_tps']:.1f} tokens/s")
    if rate is not None:
        parts.append(f"{rate:.0%} of {joined['drafted']} drafted accepted")
    parts.append(f"{format_bytes(moved)} of experts moved")
    say("; ".join(parts))

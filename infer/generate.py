"""`dejax generate MODEL`: decodes prompts, with the routed experts offloaded.

A dense target has none: it is decoded in mode ar or n-gram, all of it on the device. `generate` is
the same for programs: prompts in, one `Generation` a prompt out.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from dejax.draft.expert import Draft
from dejax.draft.predictor import ExpertPredictor
from dejax.errors import FailedError, UsageError
from dejax.spec.budget import VerifyBudget
from dejax.spec.confidence import Confidence
from dejax.spec.control import ControlConfig
from dejax.spec.ecospec import EcoConfig
from dejax.spec.governor import Decision
from dejax.spec.rules import REJECTION, Rule
from dejax.spec.sampling import SamplingConfig
from dejax.spec.tree import CHAIN, TreeConfig
from dejax.spec.tree_options import show_tree
from dejax.target import Target
from infer.arguments import parse
from infer.buckets import capacity_of
from infer.console import progress, say
from infer.decode_options import DecodeOptions, Mode, check_options
from infer.decoder import Decoder, Offload
from infer.engines import DeviceCache, EngineName, check_draft_resident, device_cache_bytes
from infer.generate_arguments import Arguments
from infer.generation import Generation, to_generation
from infer.link import parse_link
from infer.loading import load_shown
from infer.memory import MemoryPlan, peak_rss
from infer.output import report
from infer.prompts import OnBad, count_prompts, encode_prompts, left_out, read_prompts
from infer.report import stats
from infer.strict import strict_rows
from infer.trace import Round, write_trace
from infer.tree_drafter import check_strict
from infer.units import format_bytes, format_decimal_bytes


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
    tree: TreeConfig = CHAIN,
    rule: Rule = "match",
    eco: EcoConfig | None = None,
    draft_resident: float | None = None,
    predictor: ExpertPredictor | None = None,
    confidence: Confidence = "head",
    verify_budget: VerifyBudget | None = None,
    prefetch: bool = True,
    governor: bool = True,
    engine: EngineName = "host",
    strict: bool = False,
    device_cache: DeviceCache = "auto",
    host_cache: int | None = None,
    memory: MemoryPlan | None = None,
    link: str = "real",
    look_ahead: bool = False,
    chat: bool = True,
    on_decision: Callable[[Decision], None] = lambda decision: None,
    on_round: Callable[[int, Round], None] = lambda index, record: None,
    on_logits: Callable[[int, int, Any], None] | None = None,
    on_bad: OnBad | None = None,
    aside: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> list[Generation]:
    """Decodes prompts one after another.

    Tokens do not depend on caches, prefetch or link, nor on the mode, but for "moe-spec".

    Args:
      target: from `dejax.load_target`.
      prompts: texts, token id lists, or records with `id` and `prompt`.
      draft: draft experts (`dejax.load_draft`), for the modes `infer.decode_options.DRAFT_MODES`.
      mode: as in `infer.decode_options.DecodeOptions`; r: routed experts the drafter keeps.
      control: draft length and stop rule; tree: how drafts branch; rule: how they are accepted.
      eco: what experts weigh in mode "ecospec"; predictor: what is "trained" there
        (`dejax.ckpt.predictor_file.load_predictor`).
      draft_resident: as in `infer.decode_options.DecodeOptions`.
      confidence: whose word on a drafted token counts, where the draft has a head ("head",
        "probability").
      verify_budget: of mode "moe-spec", the one mode whose tokens are not the target's own.
      governor: measure whether drafting pays, and do not draft while it does not. Not under the
        rules R1 to R3, whose runs could not be repeated: their tokens depend on what is drafted.
      engine: "host", "callback" or "resident" (`infer.engines`).
      strict: logits are bitwise those of mode "ar" with strict and the same draft length
        (`infer.strict`).
      device_cache, host_cache: bytes of experts to keep, None for all, 0 for none; "auto" is 0,
        with engine "resident" all.
      memory: in place of the caches, a plan for all of the decode's memory (`infer.memory`).
      link: "real", "disk" or "sim:GBPS[,LATENCY_US]".
      look_ahead: target passes also ask for what the next layer will probably use.
      chat: use the tokenizer's chat template.
      on_decision: told what the governor makes of drafting.
      on_round: called with the prompt's index and each trace record.
      on_logits: called with the prompt's index, a position and its logits (`Watched`).
      on_bad: given, a prompt that cannot be decoded or that fails is told to it and left out.
      aside: given what is done before the first token, makes the context it is done in.

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
        governor=governor and rule not in REJECTION,
        tree=tree,
        rule=rule,
        eco=EcoConfig() if eco is None else eco,
        draft_resident=draft_resident,
        confidence=confidence,
    )
    check_draft_resident(engine, draft_resident)
    check_strict(options.draft_tree, strict=strict)
    check_options(options, target.config, drafts=draft is not None)
    encoded = encode_prompts(target, prompts, chat=chat, on_bad=on_bad)
    capacity = capacity_of([ids for _, ids in encoded], max_new_tokens)
    offload = Offload(
        device_cache=device_cache_bytes(device_cache, engine),
        host_cache=host_cache,
        link=parse_link(link),
        look_ahead=look_ahead,
        engine=engine,
    )
    if memory is not None:
        # Where host and device are one, what is on the device is not kept a second time.
        host_cache = 0 if jax.default_backend() == "cpu" else host_cache
        offload = replace(
            offload, device_cache=memory.experts, prefetch=memory.prefetch, host_cache=host_cache
        )
    rows = strict_rows(options.control.draft_length) if strict else None
    results = []
    with ExitStack() as stack:
        with aside("compiling"):
            decoder = Decoder(
                target,
                draft=draft,
                offload=offload,
                capacity=capacity,
                strict_rows=rows,
                verify_budget=verify_budget,
                predictor=predictor if options.predicts else None,
                on_decision=on_decision,
            )
            stack.enter_context(decoder)
            if encoded:
                decoder.warm_up(options)
        ran = {"engine": engine, "layout": decoder.engine.layout, "strict_rows": rows}
        shown = show_tree(options.draft_tree) if options.branches else "chain"
        ran |= {"tree": shown, "rule": rule, "draft_resident": draft_resident}
        ran |= vars(options.eco) if mode == "ecospec" else {}
        ran |= {} if verify_budget is None else {"verify_budget": vars(verify_budget)}
        for index, (record, ids) in enumerate(encoded):
            watch = None if on_logits is None else partial(on_logits, index)
            seen = lambda round_, index=index: on_round(index, round_)  # noqa: E731
            with left_out(record["id"], on_bad):
                trace = decoder.run(ids, options, on_round=seen, on_logits=watch)
                results.append(to_generation(target, record, ids, trace, options, ran))
    return results


class _Stream:
    """Progress; with `text`, also the text on standard output as it is decoded."""

    def __init__(self, target: Target, prompts: Sequence[dict[str, Any]], bar: Any, *, text: bool):
        self.target, self.prompts, self.bar, self.text = target, prompts, bar, text
        self.tokens: list[int] = []
        self.index = -1

    def __call__(self, index: int, record: Round) -> None:
        if index != self.index:
            self.index, self.tokens = index, []
        before = self._text()
        self.tokens += record.emitted
        self.bar.advance(len(record.emitted), prompt=f"{index + 1}/{len(self.prompts)}")
        if self.text:
            sys.stdout.write(self._text()[len(before) :])
            sys.stdout.flush()

    def _text(self) -> str:
        if self.target.tokenizer is None:
            return " ".join(map(str, self.tokens))
        # A character may span tokens: what is not yet whole is held back.
        return self.target.tokenizer.decode(self.tokens, skip_special_tokens=True).rstrip("\ufffd")


def main(argv: list[str]) -> int:
    """Runs `dejax generate`."""
    about = "Decode prompts with offloaded experts, exactly (mode moe-spec alone is lossy)."
    args = parse(Arguments, argv, prog="dejax generate", description=about)
    prompts = [{"id": "0", "prompt": args.prompt}]
    bad: list[tuple[Any, UsageError | FailedError]] = []
    on_bad = (lambda name, error: bad.append((name, error))) if args.skip_bad else None
    if args.prompts is not None:
        prompts = read_prompts(args.prompts, on_bad=on_bad)
    draft, predictor = args.check()
    memory = None if args.memory is None else args.plan(prompts, draft, predictor)
    if memory is not None:
        say(f"memory: {memory.describe()}")
    if args.approx.budget is not None:
        say(
            f"NOT lossless: verification uses {args.approx.budget.experts} experts a layer, so "
            "tokens are not those of mode ar"
        )
    target = load_shown(args.model, args.dtype)
    one = len(prompts) == 1 and sys.stdout.isatty() and str(args.json) != "-"
    most = min(args.decoding.max_new_tokens, target.config.context)
    total = None if one else most * len(prompts)
    with progress("decode", total, "tokens") as bar:
        results = generate(
            target,
            prompts,
            draft=draft,
            predictor=predictor,
            mode=args.mode,
            governor=args.governor,
            memory=memory,
            verify_budget=args.approx.budget,
            **args.decoding.given(),
            on_decision=say_decision,
            on_round=_Stream(target, prompts, bar, text=one),
            on_bad=on_bad,
            aside=bar.aside,
        )
    counted = count_prompts(len(results), bad)
    if not results:
        raise type(bad[0][1])(f"none of {len(bad)} prompts was decoded; the first: {bad[0][1]}")
    if args.trace is not None:
        header = {"model": target.name, "mode": args.mode, "link": args.decoding.link}
        write_trace(args.trace, header, {result.id: result.trace for result in results})
    result = {"generations": [result.to_json() for result in results]} | counted
    result |= {"peak_rss_bytes": peak_rss(), "memory_plan": memory}
    report(args.json, result, lambda: _show(results, streamed=one))
    if args.memory is not None:
        say(f"{format_bytes(peak_rss())} resident at the peak, of {format_bytes(args.memory)}")
    if bad:
        counts = ", ".join(f"{count} {name}" for name, count in counted["counts"].items())
        say(f"prompts: {counts}; the first left out: {bad[0][1]}")
    return FailedError.exit_status if counted["failed"] else 0


def say_decision(made: Decision) -> None:
    """What was measured, before drafting is first relied on, and whenever it is switched."""
    if made.first:
        say(
            f"speculation: {made.tokens:.1f} tokens a round at {made.steps:.1f} autoregressive "
            f"steps: {made.utility:.2g} x expected"
        )
    elif made.speculate:
        say(f"speculation on: {made.utility:.2g} x")
    if not made.speculate:
        say(
            f"speculation off: a round gives {made.tokens:.1f} tokens and costs {made.steps:.1f} "
            f"autoregressive steps; tried again after {made.retry_tokens} tokens"
        )


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
    if moved:
        parts.append(f"{format_decimal_bytes(moved)} of experts moved")
    say("; ".join(parts))

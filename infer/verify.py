"""The exactness gate: `dejax verify MODEL [--draft D] [--prompts F]`.

Decodes the same prompts autoregressively and in every drafting mode, in each dtype asked for, and
compares the tokens. A difference is judged in float64 (`infer.divergence`): a near-tie is reported,
a real one fails the gate. With `--strict` the logits are compared too (`infer.strict`): one bit
that differs fails the gate.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Literal

import jax

from dejax.ckpt.draft_state import resolve_draft
from dejax.draft.expert import Draft
from dejax.errors import FailedError, UsageError
from dejax.spec.sampling import SamplingConfig
from dejax.target import Target, read_outline
from infer.argument_types import DraftSpec, InputFile, Model, OutputFile, Positional
from infer.arguments import parse
from infer.buckets import capacity_of
from infer.console import print_table, progress, say
from infer.decode_options import Mode, check_options
from infer.decoder import Offload
from infer.decoding_arguments import DecodingArguments
from infer.divergence import first_difference, judge
from infer.engines import device_cache_bytes
from infer.generate import generate
from infer.generation import Generation
from infer.link import parse_link
from infer.loading import load_shown
from infer.output import report
from infer.prompts import DEMO_PROMPTS, encode_prompts, read_prompts
from infer.report import stats
from infer.strict import Bits, compare_bits, strict_price
from infer.units import format_percent

PRICED = 3
"""Prompts on which the price of --strict is measured."""
Dtype = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True)
class Arguments:
    """Arguments of `dejax verify`."""

    model: Positional[Model]
    """A Hugging Face folder, a converted folder, a GGUF file (dense Llama), or tiny."""
    draft: DraftSpec | None = None
    """Draft experts to verify: a folder from `dejax distill`, or untrained ones (init)."""
    prompts: InputFile | None = None
    """Prompts as JSON lines; those that come with dejax unless given."""
    dtypes: tuple[Dtype, ...] = ()
    """What weights are held in, one after the other; float32 unless given."""
    decoding: DecodingArguments = DecodingArguments()
    json: OutputFile | None = None
    """Write the result here as JSON; - is standard output."""

    def __post_init__(self):
        if self.decoding.rule != "match":
            raise UsageError(
                f"--rule {self.decoding.rule} emits other tokens of the same law; verify compares "
                "tokens: it is for match"
            )


def compare_modes(
    target: Target,
    prompts: Sequence[Any],
    draft: Draft | None,
    sampling: SamplingConfig,
    *,
    dtype: str,
    on_tokens: Any = lambda count, mode: None,
    strict: bool = False,
    **common: Any,
) -> list[dict[str, Any]]:
    """One row a drafting mode: its tokens beside those of autoregressive decoding.

    Args:
      draft: with it, mode draft-expert is among them, and ecospec, which is never strict; common:
        options of `generate`.
      on_tokens: told the number of tokens of each round, and the mode.
      strict: decode so, and count the rows of logits that differ in any bit.
    """
    modes: list[tuple[Mode, Draft | None]] = [("ar", None), ("n-gram", None)]
    if target.config.moe_layers:
        modes.insert(1, ("top-r", None))
    if draft is not None:
        modes.append(("draft-expert", draft))
        if not strict:
            modes.append(("ecospec", draft))
    found: dict[str, list[Generation]] = {}
    bits = {mode: Bits() for mode, _ in modes}
    for mode, given in modes:
        found[mode] = generate(
            target,
            prompts,
            draft=given,
            mode=mode,
            governor=False,
            on_round=lambda _, round_, mode=mode: on_tokens(len(round_.emitted), mode),
            on_logits=bits[mode] if strict else None,
            strict=strict,
            **common,
        )
    rows = []
    for mode, _ in modes[1:]:
        row = _compare(target, found["ar"], found[mode], sampling)
        if strict:
            row |= compare_bits(bits["ar"], bits[mode], _in_common(found["ar"], found[mode]))
        rows.append({"dtype": dtype, "mode": mode} | row)
    return rows


def _in_common(
    references: Sequence[Generation], decoded: Sequence[Generation]
) -> list[tuple[int, int]]:
    """Tokens of each prompt, and new tokens that two decodes chose after the same tokens."""
    lengths = []
    for reference, other in zip(references, decoded, strict=True):
        differs = first_difference(reference.tokens, other.tokens)
        same = len(reference.tokens) if differs is None else differs + 1
        new = min(same, len(reference.tokens), len(other.tokens))
        lengths.append((len(reference.prompt_tokens), new))
    return lengths


def _compare(
    target: Target,
    references: Sequence[Generation],
    decoded: Sequence[Generation],
    sampling: SamplingConfig,
) -> dict[str, Any]:
    divergences = []
    for reference, other in zip(references, decoded, strict=True):
        pair = reference.tokens, other.tokens
        differs = judge(target, reference.prompt_tokens, *pair, sampling, id=reference.id)
        if differs is not None:
            divergences.append(asdict(differs))
    joined = stats([record for generation in decoded for record in generation.trace])
    verdicts = [divergence["float64_verdict"] for divergence in divergences]
    return {
        "prompts": len(decoded),
        "tokens": sum(len(generation.tokens) for generation in references),
        "identical": len(decoded) - len(divergences),
        "near_ties": verdicts.count("near-tie"),
        "real": verdicts.count("real"),
        "acceptance_rate": joined["acceptance_rate"],
        "divergences": divergences,
    }


def main(argv: list[str]) -> int:
    """Runs `dejax verify`."""
    about = "Check that drafting emits the tokens of autoregressive decoding; fails where not."
    args = parse(Arguments, argv, prog="dejax verify", description=about)
    prompts = read_prompts(DEMO_PROMPTS if args.prompts is None else args.prompts)
    outline = read_outline(args.model)
    experts = outline.config.experts
    check_options(args.decoding.options("ar"), outline.config, drafts=False)
    if experts is None and args.decoding.r != 1:
        raise UsageError(f"--r is for a mixture of experts; {args.model} is dense")
    if experts is not None and args.decoding.r > experts.top_k:
        raise UsageError(
            f"--r is {args.decoding.r}; the target routes to {experts.top_k} experts per token"
        )
    draft = None if args.draft is None else resolve_draft(args.draft, outline)
    predictor = args.decoding.trained_predictor(outline, draft)
    rows: list[dict[str, Any]] = []
    prices: list[dict[str, Any]] = []
    for dtype in args.dtypes or ("float32",):
        with jax.enable_x64(True) if dtype == "float64" else nullcontext():
            target = load_shown(args.model, dtype)
            fits = _fitting(target, prompts, args)
            rows += _verify(target, fits, draft, args, dtype, predictor=predictor)
            if args.decoding.strict:
                prices.append({"dtype": dtype} | _price(target, fits, args))
    result = {
        "model": args.model,
        "draft": args.draft,
        "engine": args.decoding.engine,
        "rows": rows,
    }
    if args.decoding.strict:
        result["strict_price"] = prices
    report(args.json, result, lambda: _show(outline.name, rows, prices))
    real = [f"{row['mode']} in {row['dtype']}" for row in rows if row["real"]]
    if real:
        raise FailedError(f"tokens differ from autoregressive decoding: {', '.join(real)}")
    bits = [f"{row['mode']} in {row['dtype']}" for row in rows if row.get("logit_rows_differing")]
    if bits:
        raise FailedError(f"logits differ from autoregressive decoding: {', '.join(bits)}")
    return 0


def _fitting(target: Target, prompts: Sequence[Any], args: Arguments) -> list[Any]:
    """The prompts that fit the context with their new tokens; the others are told and left out."""
    fits = []
    for prompt in prompts:
        ((record, ids),) = encode_prompts(target, [prompt], chat=args.decoding.chat)
        if len(ids) + args.decoding.max_new_tokens <= target.config.context:
            fits.append(prompt)
        else:
            say(f"prompt {record['id']}: {len(ids)} tokens and the new ones exceed the context")
    if not fits:
        raise UsageError(f"no prompt fits the context of {target.config.context} tokens")
    return fits


def _verify(
    target: Target,
    fits: Sequence[Any],
    draft: Draft | None,
    args: Arguments,
    dtype: str,
    **more: Any,
) -> list[dict[str, Any]]:
    """The rows of one dtype."""
    drafting = 0 if draft is None else 2 - args.decoding.strict
    modes = 2 + bool(target.config.moe_layers) + drafting
    with progress(
        f"verify {dtype}", modes * len(fits) * args.decoding.max_new_tokens, "tokens"
    ) as bar:
        return compare_modes(
            target,
            fits,
            draft,
            args.decoding.sampling,
            dtype=dtype,
            on_tokens=lambda count, mode: bar.advance(count, mode=mode),
            **more,
            **args.decoding.given(),
        )


def _price(target: Target, fits: Sequence[Any], args: Arguments) -> dict[str, float]:
    """What strict autoregressive decoding costs, on the first prompts."""
    decoding = args.decoding
    encoded = [ids for _, ids in encode_prompts(target, fits, chat=decoding.chat)]
    say(f"strict and native autoregressive decoding in turn, {PRICED} prompts at most")
    return strict_price(
        target,
        encoded[:PRICED],
        decoding.options("ar"),
        offload=Offload(
            device_cache=device_cache_bytes(decoding.device_cache, decoding.engine),
            host_cache=decoding.host_cache,
            link=parse_link(decoding.link),
        ),
        capacity=capacity_of(encoded, decoding.max_new_tokens),
    )


def _show(name: str, rows: Sequence[dict[str, Any]], prices: Sequence[dict[str, Any]] = ()) -> None:
    columns = ["dtype", "mode", "prompts", "tokens", "identical", "near-ties", "real", "accepted"]
    table = [
        [row[key] for key in ("dtype", "mode", "prompts", "tokens", "identical", "near_ties")]
        + [row["real"], format_percent(row["acceptance_rate"])]
        for row in rows
    ]
    same, near, real = (sum(row[k] for row in rows) for k in ("identical", "near_ties", "real"))
    verdict = f"{same} of {same + near + real} decodes have the autoregressive tokens"
    verdict += f"; {near} differ by near-ties, {real} really" if near + real else ""
    print_table(f"{name}: tokens beside autoregressive decoding", columns, table, verdict)
    for row in rows:
        if "logit_rows" in row:
            differing, count = row["logit_rows_differing"], row["logit_rows"]
            verdict = f"{differing} differ" if differing else "bitwise equal"
            say(f"{row['mode']}, {row['dtype']}: {count} rows of logits compared: {verdict}")
        for found in row["divergences"]:
            say(
                f"{row['mode']}, {row['dtype']}: prompt {found['id']} differs at new token "
                f"{found['index']} ({found['emitted']} for {found['reference']}), margin "
                f"{found['margin']:.2g} in float64: {found['float64_verdict']}"
            )
    for price in prices:
        say(
            f"strict, {price['dtype']}: {price['strict_tps']:.1f} tokens/s in mode ar, "
            f"{price['native_tps']:.1f} without --strict ({price['ratio']:.2f} of it)"
        )

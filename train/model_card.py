"""Writes the model card of an embedded target from measurements.

    python -m train.model_card MODEL --data DIR --run RUN [--out FILE]

MODEL is a Hugging Face folder made by `dejax pretrain`, DIR what `train.data` and `train.trigram`
wrote, RUN the OUT of the pretraining. The card goes to MODEL/README.md with `loss_curve.png` and
`card.json` (every number) beside it. The text is a function of the numbers alone: none is written
by hand.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

import dejax
from dejax.cli import run_module
from dejax.errors import UsageError
from dejax.target import Target, load_target, model_folder
from infer.argument_types import Model, Positional, PositiveInt
from infer.arguments import parse
from infer.console import say
from infer.generate import generate
from infer.generation import Generation
from infer.inspection import inspect
from infer.output import to_plain, write_json
from infer.prompts import encode_prompt, read_prompts
from infer.report import distinct_ngrams
from train import card_measures
from train.card_measures import Numbers
from train.card_run import NUMBERS, describe_run, read_run
from train.card_text import render
from train.data import MAX_CHAT_TOKENS
from train.stacked import block_size
from train.teacher import as_teacher
from train.text import RUN
from train.tokenizer import load_tokenizer, token_lengths

PROMPTS = Path(dejax.__file__).parent / "assets" / "demo" / "prompts.jsonl"
CURVE = "loss_curve.png"
TEMPERATURE, SEED = 0.8, 0


@dataclass(frozen=True)
class Arguments:
    """Arguments of `python -m train.model_card`."""

    model: Positional[Model]
    """A Hugging Face folder with a tokenizer, or tiny."""
    data: Path
    """Folder of tokenizer, tokens and trigram.json that the model was trained on."""
    run: Path
    """Folder of the pretraining run: checkpoints and metrics.jsonl."""
    out: Path | None = None
    """The card (default: README.md in MODEL); the other files go beside it."""
    config: str = "pretrain_tiny"
    """Config file of the run; settings in which the run differs are listed."""
    step: PositiveInt | None = None
    """Step of the checkpoint that MODEL holds (default: the newest)."""
    rows: PositiveInt = 16
    """Held-out rows of each kind for ablations and routing; the loss is of the whole split."""
    seq_len: PositiveInt = 256
    """Tokens of such a row; for the loss, rows are as long as at the end of the run."""
    batch_size: PositiveInt = 8
    """Rows of a batch."""
    sample_tokens: PositiveInt = 64
    """Tokens of a sample."""
    note: str | None = None
    """What a reader must know of the run that its files do not say."""


def read_meta(data: Path, split: str) -> Numbers:
    """The counts that `train.data` wrote for a split.

    Raises:
      UsageError: there are none.
    """
    file = data / split / "meta.json"
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: cannot be read ({error}); run `python -m train.data`") from None


# --- measuring -------------------------------------------------------------------------------


def describe_model(folder: Path, target: Target) -> Numbers:
    """Identity, dimensions and sizes."""
    found = inspect(folder)
    own = {"README.md", CURVE, NUMBERS}
    files = [file for file in folder.rglob("*") if file.is_file() and file.name not in own]
    return {
        "name": target.name,
        "identity": target.identity,
        "config": asdict(target.config),
        "parameters": found.total,
        "active_parameters": found.active,
        "routed_parameters": found.routed.params,
        "dtype": found.routed.dtype,
        "weight_bytes": found.routed.bytes + found.rest.bytes,
        "expert_bytes": found.expert.bytes,
        "folder_bytes": sum(file.stat().st_size for file in files),
    }


def describe_data(folder: Path, run: Numbers) -> Numbers:
    """Counts of both splits, and how often each kind was passed over (weights are shares)."""
    metas = {split: read_meta(folder, split) for split in ("train", "heldout")}
    weights, counts = metas["train"]["weights"], metas["train"]["counts"]
    whole = sum(weights.values())
    tokens = run["tokens"] + (run["first"]["tokens"] if run["first"] else 0)
    passes = {kind: tokens * weights[kind] / whole / counts[kind]["tokens"] for kind in counts}
    limits = {"run_words": RUN, "max_chat_tokens": MAX_CHAT_TOKENS}
    return metas | {"passes": passes} | limits


def check_tokenizer(target: Target, data: Path) -> Any:
    """The tokenizer of the data, once it is known to be the target's too."""
    tokenizer = load_tokenizer(data / "tokenizer")
    if target.tokenizer is None or target.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise UsageError(
            f"{target.name}: its tokenizer is not that of {data}; give the data it was trained on"
        )
    return tokenizer


def samples(target: Target, *, tokens: int) -> list[Numbers]:
    """Continuations of the first demo prompt of each category that leaves room for them."""
    chosen: dict[str, Any] = {}
    for record in read_prompts(PROMPTS):
        if len(encode_prompt(target, record["prompt"])) + tokens <= target.config.context:
            chosen.setdefault(record["category"], record)
    records = list(chosen.values())
    by_rule = {
        name: generate(
            target,
            records,
            mode="ar",
            max_new_tokens=tokens,
            temperature=temperature,
            seed=SEED,
            device_cache=None,
        )
        for name, temperature in (("greedy", 0.0), ("seeded", TEMPERATURE))
    }
    return [
        record | {name: _sample(results[i]) for name, results in by_rule.items()}
        for i, record in enumerate(records)
    ]


def _sample(generation: Generation) -> Numbers:
    return {
        "text": generation.text,
        "tokens": generation.tokens,
        "finish_reason": generation.finish_reason,
    }


def distinct_share(found: Sequence[Numbers]) -> Numbers:
    """Share of distinct 4-grams in the samples of each rule."""
    return {
        name: distinct_ngrams([sample[name]["tokens"] for sample in found])
        for name in ("greedy", "seeded")
    }


def measure(args: Arguments) -> Numbers:
    """Every number of the card, as plain JSON values.

    Raises:
      UsageError: model, data and run do not belong together, or one of them is not what it should
        be.
    """
    folder = model_folder(args.model)
    target = load_target(args.model)
    lengths = token_lengths(check_tokenizer(target, args.data))
    found = read_run(args.run, args.step)
    run = describe_run(found, args.config)
    data = describe_data(args.data, run)
    teacher = as_teacher(target)
    seq_len = min(args.seq_len, target.config.context)
    say("model card: loss on the held-out split")
    longest = min(found.seq_len, target.config.context)
    loss = card_measures.held_out_loss(teacher, args.data, seq_len=longest, byte_lengths=lengths)
    held = card_measures.held_out_rows(
        args.data, seq_len=seq_len, rows=args.rows, batch_size=args.batch_size
    )
    say("model card: fewer routed experts")
    arms = card_measures.expert_arms(teacher, held)
    say("model card: shuffled routing")
    arms["routing shuffled"], record = card_measures.shuffled_arm(teacher, held, seed=SEED)
    say("model card: statistics of the routing")
    routing = card_measures.routing_numbers(record, target.config.moe_layers, held.kinds)
    block = block_size(args.batch_size * seq_len, target.config)
    routing["dropped"] = card_measures.dropped_assignments(record, block=block)
    say("model card: samples")
    texts = samples(target, tokens=args.sample_tokens)
    return to_plain(
        {
            "model": describe_model(folder, target),
            "run": run,
            "data": data,
            "measured": {
                "loss_seq_len": longest,
                "seq_len": seq_len,
                "rows": args.rows,
                "sample_tokens": args.sample_tokens,
                "temperature": TEMPERATURE,
                "seed": SEED,
                "versions": {"dejax": dejax.__version__, "jax": version("jax")},
            },
            "held_out": loss,
            "arms": arms,
            "routing": routing,
            "samples": texts,
            "distinct_4grams": distinct_share(texts),
        }
    )


# --- writing ---------------------------------------------------------------------------------


def plot_curve(numbers: Numbers, path: Path) -> None:
    """Training loss, and bits per byte of held-out text at the run's evaluations, against tokens.

    Those evaluations are of a part of the held-out text only: no trigram line belongs beside them.
    """
    log = numbers["run"]["log"]
    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([row["tokens"] / 1e6 for row in log], [row["loss"] for row in log], color="#33415c")
    left.set_ylabel("training loss (nats a token)")
    for kind in numbers["data"]["train"]["counts"]:
        points = [(r["tokens"] / 1e6, r[f"bpb_{kind}"]) for r in log if f"bpb_{kind}" in r]
        if points:
            right.plot(*zip(*points, strict=True), ".-", label=kind)
    right.set_ylabel("bits a byte, held-out rows")
    if right.lines:
        right.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    for axes in (left, right):
        axes.set_xlabel("million tokens")
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=90)


def main(argv: list[str]) -> int:
    """Runs `python -m train.model_card`."""
    about = "Write a model card from measurements."
    args = parse(Arguments, argv, prog="python -m train.model_card", description=about)
    card = args.out or model_folder(args.model) / "README.md"
    numbers = measure(args)
    card.parent.mkdir(parents=True, exist_ok=True)
    plot_curve(numbers, card.with_name(CURVE))
    write_json(card.with_name(NUMBERS), numbers)
    card.write_text(
        render(numbers, curve=CURVE, numbers_file=NUMBERS, note=args.note), encoding="utf-8"
    )
    say(f"model card: {card}")
    return 0


if __name__ == "__main__":
    sys.exit(run_module("model_card", main))

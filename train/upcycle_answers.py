"""Greedy chat answers of a dense model and of MoEs made from it, for the card.

python -m train.upcycle_answers DENSE MOE... --out ANSWERS.json
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dejax.cli import run_module
from dejax.errors import UsageError
from dejax.target import load_target
from infer.argument_types import InputFile, Model, OutputFile, Positional, PositiveInt
from infer.arguments import parse
from infer.console import progress
from infer.generate import generate
from infer.output import write_json
from infer.prompts import DEMO_PROMPTS, read_prompts


@dataclass(frozen=True)
class Arguments:
    """Arguments of `python -m train.upcycle_answers`."""

    models: Positional[tuple[Model, ...]]
    """The dense model (a folder or a .gguf file) and MoEs made from it."""
    out: OutputFile
    """Where to write the answers, as JSON."""
    prompts: InputFile | None = None
    """Prompts as JSON lines; those that come with dejax unless given."""
    count: PositiveInt = 10
    """How many of them, from the first on."""
    tokens: PositiveInt = 96
    """Tokens of an answer at most."""


def answers(models: Sequence[str], records: Sequence[Any], *, tokens: int) -> list[dict[str, Any]]:
    """Prompt and each model's answer; models are loaded one after another."""
    found = [{key: r[key] for key in ("id", "category", "prompt") if key in r} for r in records]
    with progress("answering", len(models), "models") as bar:
        for place, model in enumerate(models):
            target = load_target(model)
            texts = generate(target, records, max_new_tokens=tokens, device_cache=None)
            name = "dense" if place == 0 else target.name
            if any(name in record.get("answers", {}) for record in found):
                raise UsageError(f"{model}: the second model of the name {name}; rename its folder")
            for record, answer in zip(found, texts, strict=True):
                record.setdefault("answers", {})[name] = answer.text
            bar.advance(1, model=name)
    return found


def main(argv: list[str]) -> int:
    """Runs `python -m train.upcycle_answers`."""
    about = "Greedy chat answers of a dense model and of MoEs made from it."
    args = parse(Arguments, argv, prog="python -m train.upcycle_answers", description=about)
    records = read_prompts(args.prompts or DEMO_PROMPTS)[: args.count]
    write_json(args.out, answers(args.models, records, tokens=args.tokens))
    return 0


if __name__ == "__main__":
    sys.exit(run_module("upcycle_answers", main))

"""The ablation of the losses (DraftExpert, arXiv 2607.24434, Table 5), and two arms of ours.

    python -m train.arms [--target DIR] [--seeds 3] [--steps N] [--out DIR] [--json FILE]

Every arm is one config (`configs/arm_*.py`), distilled once a seed and measured on the same
held-out text and prompts: teacher-forced against the target, and in the decode loop with drafts of
fixed length. A finished run is kept under --out, and not made again.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dejax.ckpt.draft_state import load_draft, save_draft
from dejax.draft.expert import Draft
from dejax.errors import FailedError, UsageError
from dejax.sharding import make_mesh
from dejax.spec.control import ControlConfig
from dejax.target import Target, load_target
from infer.arguments import Model, OutputFile, OutputFolder, PositiveInt, parse
from infer.console import print_table, progress, say
from infer.generate import generate
from infer.output import make_folder, report, write_json
from infer.prompts import DEMO_PROMPTS, read_prompts
from infer.report import stats
from train.config_files import load_config
from train.devices import use_cpu_devices
from train.distill import DistillConfig, distill, open_rows
from train.document_files import open_source
from train.documents import Data
from train.evaluate import teacher_forced
from train.teacher import Teacher, as_teacher

ARMS = {
    "+ residual": "arm_residual",
    "+ logit, token": "arm_logit",
    "+ router": "arm_router",
    "+ router, decoding's cache": "arm_kv_mix",
    "+ router, on-policy": "arm_on_policy",
}
"""Arm -> its config; each of the first three adds to the one before it."""

FORCED = ("kl", "agreement", "router_agreement", "prefetch_recall")
DRAFT_LENGTH = 4
ON_POLICY_PROMPTS, ON_POLICY_TOKENS = 240, 96


@dataclass(frozen=True)
class Arguments:
    """Arguments of `python -m train.arms`."""

    target: Model = "tiny"
    """A Hugging Face folder, a converted folder, or tiny."""
    seeds: PositiveInt = 3
    """Runs of each arm, with another order of the text each."""
    steps: PositiveInt | None = None
    """Steps of each run; the configs' own unless given."""
    out: OutputFolder = Path("runs") / "arms"
    """Folder for draft experts and results."""
    json: OutputFile | None = None
    """Write the results here as JSON; - is standard output."""


def on_policy_text(target: Target, out: Path) -> Path:
    """A file of the target's own answers to the demo text's questions, sampled at T = 1."""
    file = out / "on_policy.json"
    if file.exists():
        return file
    documents = open_source("demo").documents()
    questions = [d.messages[0]["content"] for d in documents if d.messages]
    step = max(1, len(questions) // ON_POLICY_PROMPTS)
    prompts = [{"id": str(i), "prompt": q} for i, q in enumerate(questions[::step])]
    with progress("on-policy text", len(prompts), "answers") as bar:
        seen = {-1}

        def on_round(index: int, _: Any) -> None:
            if index not in seen:
                seen.add(index)
                bar.advance(1)

        written = generate(
            target,
            prompts,
            max_new_tokens=ON_POLICY_TOKENS,
            temperature=1.0,
            device_cache=None,
            on_round=on_round,
            on_bad=lambda *_: None,
        )
    write_json(file, {"generations": [generation.to_json() for generation in written]})
    return file


def measure(
    teacher: Teacher, target: Target, draft: Draft | None, data: Data, prompts: Sequence[Any]
) -> dict[str, Any]:
    """Teacher-forced figures, and those of the decode loop with drafts of `DRAFT_LENGTH` tokens."""
    params, r = (None, 1) if draft is None else (draft.stacked_params(), draft.config.top_r)
    forced = teacher_forced(teacher, params, data.held_out, r=r)
    generations = generate(
        target,
        prompts,
        draft=draft,
        mode="top-r" if draft is None else "draft-expert",
        max_new_tokens=48,
        device_cache=None,
        control=ControlConfig(draft_length=DRAFT_LENGTH, truncate=False),
    )
    looped = stats([record for generation in generations for record in generation.trace])
    alphas = {f"alpha_{i}": value for i, value in enumerate(looped["alpha_pos"], start=1)}
    names = ("acceptance_rate", "tokens_per_round")
    return {name: forced[name] for name in FORCED} | {n: looped[n] for n in names} | alphas


def run_arms(
    name: str, *, seeds: int, steps: int | None, out: Path, arms: dict[str, str] = ARMS
) -> list[dict[str, Any]]:
    """One row an arm and seed, `arm` and `seed` among its figures; top-1 alone has one row."""
    target = load_target(name)
    first = _config(next(iter(arms.values())), name, 0, steps)
    teacher = as_teacher(target, make_mesh())
    data, prompts = open_rows(first, target), read_prompts(DEMO_PROMPTS)
    rows = [{"arm": "top-1", "seed": 0} | measure(teacher, target, None, data, prompts)]
    for arm, config_name in arms.items():
        for seed in range(seeds):
            config = _config(config_name, name, seed, steps)
            folder = out / f"{config_name}-{seed}-{config.loop.steps}"
            if (folder / "row.json").exists():
                rows.append(json.loads((folder / "row.json").read_text()))
                continue
            say(f"{arm}: seed {seed}")
            if config_name == "arm_on_policy":
                config = replace(config, data=str(on_policy_text(target, out)))
            draft, _ = distill(teacher, open_rows(config, target).batch_at, config)
            row = {"arm": arm, "seed": seed} | measure(teacher, target, draft, data, prompts)
            make_folder(folder)
            save_draft(folder / "draft", draft, target.config)
            read_again = load_draft(folder / "draft")
            assert read_again.identity == target.identity
            write_json(folder / "row.json", row)
            rows.append(row)
    return rows


def _config(config_name: str, target: str, seed: int, steps: int | None) -> DistillConfig:
    config = load_config(config_name, ["seed=" + str(seed)])
    loop = config.loop if steps is None else replace(config.loop, steps=steps)
    return replace(config, target=target, loop=loop)


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each arm the mean of every figure over its seeds, and their spread (largest - least)."""
    found = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == arm]
        names = [name for name in mine[0] if name not in ("arm", "seed")]
        columns = {name: [row[name] for row in mine if row.get(name) is not None] for name in names}
        means = {n: float(np.mean(v)) if v else None for n, v in columns.items()}
        spreads = {n: float(np.ptp(v)) if v else None for n, v in columns.items()}
        found.append({"arm": arm, "seeds": len(mine), "mean": means, "spread": spreads})
    return found


def print_arms_table(found: Sequence[dict[str, Any]], steps: int) -> None:
    """The table: a row an arm, mean and spread in percent (KL in nats)."""
    shares = ("agreement", "acceptance_rate", "router_agreement", "prefetch_recall")
    alphas = tuple(f"alpha_{i}" for i in range(1, DRAFT_LENGTH + 1))

    def cell(row: dict[str, Any], name: str) -> str:
        mean, spread = row["mean"].get(name), row["spread"].get(name)
        if mean is None or spread is None:
            return "-"
        scale, digits = (1, 4) if name == "kl" else (100, 1)
        shown = f"{mean * scale:.{digits}f}"
        return shown if row["seeds"] == 1 else f"{shown} ({spread * scale:.{digits}f})"

    names = ("kl", *shares, *alphas)
    table = [(row["arm"], *(cell(row, name) for name in names)) for row in found]
    columns = ("arm", "KL", "agree", "acc/drafted", "router", "prefetch", *alphas)
    seeds = max(row["seeds"] for row in found)
    note = (
        f"{steps} steps, mean of {seeds} seeds (largest - least); %, KL in nats. agree, router, "
        f"prefetch: teacher-forced. acc/drafted, alpha: decode loop, drafts of {DRAFT_LENGTH}"
    )
    print_table("arms of the losses", columns, table, note)


def main(argv: list[str]) -> int:
    """Runs `python -m train.arms`."""
    about = "Distill every arm of the ablation of the losses, and measure it."
    args = parse(Arguments, argv, prog="python -m train.arms", description=about)
    make_folder(args.out)
    config = load_config("arm_router")
    use_cpu_devices(config.cpu_devices)
    rows = run_arms(str(args.target), seeds=args.seeds, steps=args.steps, out=args.out)
    found = summary(rows)
    steps = args.steps or config.loop.steps
    result = {"steps": steps, "rows": rows, "arms": found}
    report(args.json, result, lambda: print_arms_table(found, steps))
    return 0


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except (UsageError, FailedError) as error:
        say(f"arms: error: {error}")
        status = error.exit_status
    sys.exit(status)

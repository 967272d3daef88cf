"""The ablation of the losses (DraftExpert, arXiv 2607.24434, Table 5), and two arms of ours.

    python -m train.arms [--target DIR] [--seeds 3] [--steps N] [--set a.b=c] [--out DIR] [--json F]

Every arm is one config (`configs/arm_*.py`), distilled once a seed and measured on the same
held-out text and prompts: teacher-forced against the target, and in the decode loop with drafts of
fixed length. All start from the same closed-form fit. A finished run is kept under --out, and not
made again.
"""

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dejax.ckpt.draft_state import load_draft, save_draft
from dejax.cli import run_module
from dejax.errors import UsageError
from dejax.model import Params
from dejax.paths import shown
from dejax.sharding import make_mesh
from dejax.target import Target, load_target, load_tokenizer, model_folder
from dejax.target import load_config as load_model_config
from infer.argument_types import Model, OutputFile, OutputFolder, PositiveInt, Settings
from infer.arguments import parse
from infer.console import print_table, progress, say
from infer.generate import generate
from infer.output import make_folder, report, write_json
from train.config_files import load_config
from train.devices import use_cpu_devices
from train.distill import DistillConfig, distill, initial_draft, open_rows
from train.distill_config import draft_config
from train.distill_measures import decoded_stats, demo_text
from train.document_files import open_source
from train.documents import Data
from train.evaluate import teacher_forced
from train.packed_rows import split_documents
from train.simulate import GreedyText, simulate, simulated_metrics
from train.teacher import Teacher, as_teacher, drafting

ARMS = {
    "+ residual": "arm_residual",
    "+ logit, token": "arm_logit",
    "+ router": "arm_router",
    "+ router, decoding's cache": "arm_kv_mix",
    "+ router, on-policy": "arm_on_policy",
}
"""Arm -> its config; each of the first three adds to the one before it."""

ArmConfig = Literal["arm_residual", "arm_logit", "arm_router", "arm_kv_mix", "arm_on_policy"]

FORCED = ("kl", "agreement", "router_agreement", "prefetch_recall")
SEEDS, DRAFT_LENGTH, NEW_TOKENS = 3, 4, 48
ON_POLICY_PROMPTS, ON_POLICY_TOKENS = 240, 96


@dataclass(frozen=True)
class Arguments:
    """Arguments of `python -m train.arms`."""

    target: Model = "tiny"
    """A Hugging Face folder, a converted folder, or tiny."""
    seeds: PositiveInt = SEEDS
    """Runs of each arm, with another order of the text each."""
    steps: PositiveInt | None = None
    """Steps of each run; the configs' own unless given."""
    arms: tuple[ArmConfig, ...] = ()
    """Configs of the arms to run; all unless given."""
    set: Settings = ()
    """Settings to change in every arm's config, such as draft.width=64."""
    out: OutputFolder = Path("runs") / "arms"
    """Folder for draft experts and results."""
    json: OutputFile | None = None
    """Write the results here as JSON; - is standard output."""


def on_policy_text(target: Target, out: Path) -> Path:
    """A file of the target's own answers, sampled at T = 1, to questions that it may train on."""
    file = out / "on_policy.json"
    if file.exists():
        return file
    documents = list(open_source("demo").documents())
    trained = [documents[place] for place in split_documents(len(documents))[0]]
    questions = [d.messages[0]["content"] for d in trained if d.messages]
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


@dataclass(frozen=True)
class Exam:
    """What every draft is measured on.

    Attributes:
      data: its held-out rows; text: the target's own answers to the prompts that come with dejax.
    """

    teacher: Teacher
    target: Target
    data: Data
    text: GreedyText

    def measure(
        self, params: Params | None, draft_folder: Path | None, r: int = 1
    ) -> dict[str, Any]:
        """Figures of a draft in training, and of the decode loop with it loaded from its folder.

        Teacher-forced ones and `simulated_tokens_per_round` come from `params`, as training sees
        them; acceptance and `tokens_per_round` from decoding. None is the draft path without draft
        experts, of shared + top-`r`.
        """
        draft = None if draft_folder is None else load_draft(draft_folder)
        r = r if draft is None else draft.config.top_r
        teacher = self.teacher if draft is None else drafting(self.teacher, draft.config)
        forced = teacher_forced(teacher, params, self.data.held_out, r=r)
        rounds = simulate(teacher, params, self.text, draft_length=DRAFT_LENGTH, r=r)
        simulated = simulated_metrics([round_ for prompt in rounds for round_ in prompt])
        fixed = dict(draft_length=DRAFT_LENGTH, new_tokens=NEW_TOKENS, r=r)
        looped = decoded_stats(self.target, draft, **fixed)
        alphas = {f"alpha_{i}": value for i, value in enumerate(looped["alpha_pos"], start=1)}
        return (
            {name: forced[name] for name in FORCED}
            | {name: looped[name] for name in ("acceptance_rate", "tokens_per_round")}
            | {"simulated_tokens_per_round": simulated["simulated_tokens_per_round"]}
            | alphas
        )


def run_arms(
    target: Target,
    name: str,
    *,
    seeds: int,
    steps: int | None,
    out: Path,
    arms: dict[str, str] = ARMS,
    settings: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """One row an arm and seed, `arm` and `seed` among its figures; top-r alone has one row.

    Args:
      name: what the configs call the target; steps: of each run, None for the configs' own.
      out: under which runs are kept, by the target's identity.
      settings: `a.b=c` of every config, as `train.config_files.load_config` takes them.
    """
    first = _config(next(iter(arms.values())), name, 0, steps, settings)
    teacher = as_teacher(target, make_mesh())
    data, out = open_rows(first, target), out / target.identity[:16]
    say("the target's own text, for simulated rounds")
    exam = Exam(teacher, target, data, demo_text(teacher, NEW_TOKENS))
    r = draft_config(first, target.config).top_r
    rows = [{"arm": f"top-{r}", "seed": 0} | exam.measure(None, None, r)]
    for seed in range(seeds):
        initial = None
        for arm, config_name in arms.items():
            config = _config(config_name, name, seed, steps, settings)
            folder = out / f"{config_name}-{seed}-{config.loop.steps}{_tag(settings)}"
            if (folder / "row.json").exists():
                rows.append(json.loads((folder / "row.json").read_text()))
                continue
            if initial is None:  # the same one for all arms
                fitted_on = _config(next(iter(arms.values())), name, seed, steps, settings)
                initial = initial_draft(teacher, open_rows(fitted_on, target).batch_at, fitted_on)
            if config_name == "arm_on_policy":
                config = replace(config, data=str(on_policy_text(target, out)))
            say(f"{arm}: seed {seed}")
            rows_of = open_rows(config, target)
            make_folder(folder)
            draft, _ = distill(
                teacher,
                rows_of.batch_at,
                config,
                workdir=folder if config.loop.save_every else None,
                initial=initial,
                data=rows_of.fingerprint,
            )
            save_draft(folder / "draft", draft, target.config)
            measured = exam.measure(draft.stacked_params(), folder / "draft")
            row = {"arm": arm, "seed": seed} | measured
            write_json(folder / "row.json", row)
            rows.append(row)
    return rows


def _tag(settings: Sequence[str]) -> str:
    """What tells runs of other settings apart on disk."""
    text = "\n".join(sorted(settings))
    return f"-{hashlib.sha256(text.encode()).hexdigest()[:8]}" if settings else ""


def _config(
    config_name: str, target: str, seed: int, steps: int | None, settings: Sequence[str]
) -> DistillConfig:
    config = load_config(config_name, [*settings, f"seed={seed}"])
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
    shares = ("agreement", "router_agreement", "prefetch_recall", "acceptance_rate")
    rounds = ("tokens_per_round", "simulated_tokens_per_round")
    alphas = tuple(f"alpha_{i}" for i in range(1, DRAFT_LENGTH + 1))

    def cell(row: dict[str, Any], name: str) -> str:
        mean, spread = row["mean"].get(name), row["spread"].get(name)
        if mean is None or spread is None:
            return "-"
        scale, digits = (100, 1) if name in (*shares, *alphas) else (1, 3)
        told = f"{mean * scale:.{digits}f}"
        return told if row["seeds"] == 1 else f"{told} ({spread * scale:.{digits}f})"

    names = ("kl", *shares, *alphas, *rounds)
    table = [(row["arm"], *(cell(row, name) for name in names)) for row in found]
    columns = ("arm", "KL", "agree", "router", "prefetch", "acc/drafted", *alphas)
    columns = (*columns, "tokens/round", "simulated")
    seeds = max(row["seeds"] for row in found)
    note = (
        f"{steps} steps, mean of {seeds} seeds (largest - least); %, KL in nats. KL, agree, router,"
        f" prefetch: teacher-forced. acc/drafted to tokens/round: decode loop, drafts of "
        f"{DRAFT_LENGTH}, draft loaded from its folder; simulated: tokens/round as training sees it"
    )
    print_table("arms of the losses", columns, table, note)


def train_ablation(target: Target, name: str, **options: Any) -> dict[str, Any]:
    """Rows of all runs (`run_arms`, whose options these are), steps of each, means and spreads."""
    rows = run_arms(target, name, **options)
    settings = options.get("settings", ())
    steps = _config("arm_router", name, 0, options["steps"], settings).loop.steps
    found = {"steps": steps, "settings": list(settings), "rows": rows, "arms": summary(rows)}
    return {"target": target.name, "identity": target.identity} | found


def check_target(name: str) -> None:
    """Refuses, before a weight is read, a target that has no draft experts or no text.

    Raises:
      UsageError: it is dense, or has no tokenizer.
    """
    folder = model_folder(name)
    config = load_model_config(folder)
    if not config.moe_layers:
        raise UsageError(
            f"--target: {shown(folder)} is a dense {config.family}; expected a mixture of experts"
        )
    if load_tokenizer(folder) is None:
        raise UsageError(
            f"--target: {shown(folder)} has no tokenizer; the arms need one, for the text that "
            "they are trained and measured on"
        )


def main(argv: list[str]) -> int:
    """Runs `python -m train.arms`."""
    about = "Distill every arm of the ablation of the losses, and measure it."
    args = parse(Arguments, argv, prog="python -m train.arms", description=about)
    check_target(args.target)
    for name in ARMS.values():  # before anything is trained
        _config(name, str(args.target), 0, args.steps, args.set)
    make_folder(args.out)
    use_cpu_devices(load_config("arm_router").cpu_devices)
    target = load_target(args.target)
    chosen = {arm: name for arm, name in ARMS.items() if not args.arms or name in args.arms}
    options = dict(seeds=args.seeds, steps=args.steps, out=args.out, arms=chosen)
    result = train_ablation(target, str(args.target), **options, settings=args.set)
    report(args.json, result, lambda: print_arms_table(result["arms"], result["steps"]))
    return 0


if __name__ == "__main__":
    sys.exit(run_module("arms", main))

"""The main job from end to end: `dejax demo [--target DIR] [--draft D] [--full] [--out DIR]`.

Trains draft experts for the target, or takes ready ones, decodes real prompts in every mode with
the routed experts offloaded, checks that every mode emitted the autoregressive tokens, prints the
tables of DraftExpert (arXiv 2607.24434) as measured here, and saves them with plots under --out.
"""

import contextlib
import io
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dejax
from dejax.ckpt.draft_state import check_draft_folder, resolve_draft, save_draft
from dejax.errors import FailedError, UsageError
from dejax.sharding import make_mesh
from dejax.target import Target, load_target, model_folder, read_outline
from dejax.target import load_config as load_model_config
from infer.argument_types import DraftSpec, Model, OutputFile, OutputFolder
from infer.arguments import parse
from infer.console import say
from infer.html_page import write_page
from infer.output import check_output_folder, make_folder, report, write_json
from infer.plots import plot_acceptance, plot_losses, plot_modes, plot_unique, unique_by_length
from infer.prompts import DEMO_PROMPTS, encode_prompt, read_prompts
from infer.suite import Result, Suite, choose_link, compare_resident, run_all, standard_runs
from train.arms import SEEDS, print_arms_table, train_ablation
from train.config_files import load_config, to_json
from train.demo_tables import print_arms, print_drafts, print_speed, print_summary, print_verify
from train.devices import use_cpu_devices
from train.distill import DistillConfig, distill, initial_draft, open_rows
from train.evaluate import mean_missing, teacher_forced
from train.loop import Metrics
from train.teacher import Teacher, as_teacher

ARM_METRICS = ("kl", "agreement", "router_agreement", "prefetch_recall")


@dataclass(frozen=True)
class Arguments:
    """Arguments of `dejax demo`."""

    target: Model = "tiny"
    """A Hugging Face folder, a converted folder, or tiny."""
    draft: DraftSpec | None = None
    """Ready draft experts of the target, which are measured and not trained: a folder, or init."""
    full: bool = False
    """Decode 20 prompts rather than 6, sample in every run too, train every arm of the losses."""
    out: OutputFolder = Path("dejax-demo")
    """Folder for draft experts, plots and results."""
    json: OutputFile | None = None
    """Write the results here too as JSON; - is standard output."""

    def __post_init__(self):
        if self.full and self.draft is not None:
            raise UsageError("--full trains every arm of the losses: give it no --draft")


def train_arms(
    target: Target, config: DistillConfig, *, out: Path
) -> tuple[Any, list[dict[str, Any]], dict[str, Any], list[Metrics]]:
    """Distills, and evaluates each arm on held-out text: draft, arms, what was done, loss log."""
    data, teacher = _text_and_teacher(target, config)
    say("fitting draft experts in closed form")
    began = time.perf_counter()
    fitted = initial_draft(teacher, data.batch_at, config)
    fit_seconds = time.perf_counter() - began
    draft, log = distill(teacher, data.batch_at, config, initial=fitted)
    train_seconds = time.perf_counter() - began - fit_seconds
    arms = {"closed form": fitted, "all losses": draft.stacked_params()}
    rows = _arms(teacher, data, arms)
    save_draft(out / "draft", draft, target.config)
    done = {
        "config": to_json(config),
        "fit_seconds": fit_seconds,
        "train_seconds": train_seconds,
        "steps": config.loop.steps,
        "tokens": config.loop.steps * config.batch_size * config.seq_len,
    }
    return draft, rows, done, log


def measure_ready(target: Target, config: DistillConfig, draft: Any) -> list[dict[str, Any]]:
    """Evaluates ready draft experts on the text that `train_arms` holds out."""
    data, teacher = _text_and_teacher(target, config)
    say("measuring the draft experts on held-out text")
    return _arms(teacher, data, {"given": draft.stacked_params()})


def _text_and_teacher(target: Target, config: DistillConfig) -> tuple[Any, Teacher]:
    data = open_rows(config, target)
    if not data.held_out:
        raise UsageError(f"{config.data}: too little text to hold some out; give more documents")
    return data, as_teacher(target, make_mesh())


def _arms(teacher: Teacher, data: Any, arms: dict[str, Any]) -> list[dict[str, Any]]:
    """Each arm on held-out text, after what there is without draft experts."""
    constant = mean_missing(teacher, [data.batch_at(step) for step in range(4)], r=1)
    every = {"top-1": None, "top-1 + mean residual": constant} | arms
    return [_arm(name, teacher, params, data.held_out) for name, params in every.items()]


def _arm(name: str, teacher: Teacher, params: Any, held_out: Any) -> dict[str, Any]:
    metrics = teacher_forced(teacher, params, held_out, r=1)
    return {"name": name} | {key: metrics[key] for key in ARM_METRICS}


def decode_prompts(
    target: Target, draft: Any, *, count: int, tokens: int, full: bool
) -> tuple[list[Result], dict[str, Any]]:
    """Every run of the suite on the demo's prompts, and the host loop beside a resident step."""
    records = read_prompts(DEMO_PROMPTS)[:count]
    prompts = [(str(r["id"]), encode_prompt(target, r["prompt"])) for r in records]
    fits = [(name, ids) for name, ids in prompts if len(ids) + tokens <= target.config.context]
    if not fits:
        raise UsageError(
            f"{target.name}: no demo prompt fits the context of {target.config.context}"
        )
    link = choose_link(target, fits[0][1])
    say(f"decoding {len(fits)} prompts in every mode; {link.describe()}")
    suite = Suite(target, draft, fits, tokens, link)
    results = run_all(suite, standard_runs(target.config.moe.top_k, every_seeded=full))
    return results, compare_resident(target, fits[0][1], tokens=tokens)


def save_plots(results: list[Result], log: list[Metrics], out: Path) -> list[Path]:
    """The demo's plots, under `out`; of ready draft experts there is no log of losses."""
    rows = [result.row for result in results]
    names = ("speed", "acceptance", "unique_experts", *(("losses",) if log else ()))
    paths = [out / f"{name}.png" for name in names]
    plot_modes(rows, paths[0], link=rows[0]["options"]["link"])
    plot_acceptance(rows, paths[1])
    curves = {
        f"{'greedy' if r.run.temperature == 0 else 'T=0.8'} target": unique_by_length(r.traces, 9)
        for r in results
        if r.run.is_reference
    }
    plot_unique(curves, paths[2])
    if log:
        plot_losses(log, paths[3])
    return paths


def _ablation(target: Target, args: Arguments) -> dict[str, Any]:
    """Every arm of the losses, with three seeds: what `python -m train.arms` gives."""
    folder = args.out / "arms"
    return train_ablation(target, str(args.target), seeds=SEEDS, steps=None, out=folder)


OUTLINE = (
    "measure draft experts on held-out text, decode {prompts} prompts in every mode, compare with "
    "autoregressive decoding, write tables and plots to {out}"
)
TINY_TAKES = {
    False: "; five to six minutes on two cores",
    True: "; about an hour on two cores, half of it for fifteen distillations",
}
"""What is known of the embedded target's time, by `--full`."""


def main(argv: list[str]) -> int:
    """Runs `dejax demo`."""
    about = "The whole job on one target: train draft experts, decode in every mode, check, report."
    args = parse(Arguments, argv, prog="dejax demo", description=about)
    began = time.perf_counter()
    config = replace(load_config("distill_tiny"), target=args.target)
    use_cpu_devices(config.cpu_devices)
    count, tokens = (20, 64) if args.full else (6, 48)
    check_output_folder(args.out)
    if args.draft is None:
        check_draft_folder(args.out / "draft")
    # Before an outline of what cannot be done.
    if not load_model_config(model_folder(args.target)).moe_layers:
        raise UsageError(f"{args.target} has no MoE layers; the demo needs a mixture of experts")
    ready = None if args.draft is None else resolve_draft(args.draft, read_outline(args.target))
    takes = TINY_TAKES[args.full] if args.target == "tiny" and ready is None else ""
    stages = "four stages: " if ready is not None else "five stages: fit and train draft experts, "
    say(stages + OUTLINE.format(prompts=count, out=args.out) + takes)
    target = load_target(args.target)
    if target.tokenizer is None:
        raise UsageError(f"{target.name} has no tokenizer; the demo needs one for its prompts")
    make_folder(args.out)
    draft: Any
    if ready is None:
        draft, arms, done, log = train_arms(target, config, out=args.out)
    else:
        draft, done, log = ready, {"draft": args.draft}, []
        arms = measure_ready(target, config, draft)
    results, resident = decode_prompts(target, draft, count=count, tokens=tokens, full=args.full)
    ablation = _ablation(target, args) if args.full else None
    rows = [result.row for result in results]
    seconds = time.perf_counter() - began
    paths = save_plots(results, log, args.out)
    result = {
        "target": target.name,
        "distill": done,
        "arms": arms,
        "ablation": ablation,
        "modes": rows,
        "resident": resident,
        "seconds": seconds,
    }

    def show() -> None:
        print_arms(arms)
        if ablation:
            print_arms_table(ablation["arms"], ablation["steps"])
        print_drafts(rows)
        print_verify(rows)
        print_speed(rows)
        print_summary(rows, resident, seconds=seconds, paths=paths)

    write_json(args.out / "demo.json", result)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        show()
    about = f"dejax {dejax.__version__}, target {target.name}; {rows[0]['options']['link']}."
    write_page(args.out / "demo.html", "dejax demo", about, printed.getvalue(), paths)
    report(args.json, result, show)
    bad = [row for row in rows if any(d["float64_verdict"] == "real" for d in row["divergences"])]
    if bad:
        names = ", ".join(row["name"] for row in bad)
        raise FailedError(f"tokens differ from autoregressive decoding in: {names}")
    return 0

"""The card of an upcycled model, from measurements alone.

    python -m train.upcycle_card --runs RUN.json... --answers ANSWERS.json --out docs/smol-moe.md

RUN.json is what `dejax upcycle --json` wrote, or `train.upcycle_quality` of a healed MoE,
ANSWERS.json what `train.upcycle_answers` wrote. `--arms` and `--kinds` are of draft experts for it:
results of `train.arms` and `infer.bench_kinds`.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dejax.cli import run_module
from dejax.errors import UsageError
from infer.argument_types import InputFile, NamedFile
from infer.arguments import parse
from infer.console import say
from infer.output import write_whole
from infer.units import format_bytes, format_number
from train.card_pieces import prose
from train.upcycle_results import Run, read_acceptance, read_answers, read_arms, read_run

HEAD = """# {name} as a mixture of experts

Made by `dejax upcycle` from a dense model, without gradient descent: neurons of the feed-forward
dealt out to shared and routed experts, routers and down projections fitted in closed form; where
it says *healed*, trained for a while after that to have the dense model's next-token laws. A
degraded copy of the dense model, for trying out what concerns routed experts on a model that
speaks; not a model to prefer to it. The checkpoint is not kept with the project, the commands are:

    dejax upcycle {name} --out DIR --shared S --experts E --top-k K
    dejax distill heal_smol --set target=DIR dense={name}

Every number and answer below was written by programs; none was edited. *Agreement*: the share of
tokens whose most likely successor is the dense model's. *KL*: of its law from the dense model's,
nats a token. *Active*: neurons of a MoE layer that a token uses. A MoE is called by its *S/E/k*,
shared neurons / routed experts / chosen ones, and the tokens of text that it was fitted on. Nothing
was fitted on the text that is measured on. This file is written by `python -m train.upcycle_card`.
"""

ROUTING = """\
Means over MoE layers. *Overlap*: the share of experts that two neighbouring tokens have in
common. *Unique*: distinct experts of so many neighbouring tokens. *Independent*: if every token
drew its experts anew with the same loads.
"""

DRAFTS = """\
Tokens on which shared experts and the first routed ones alone have the full model's most likely
successor:
"""

HEALING = """\
Trained parts of the MoE, on other text than all tables are measured on; a token may come several
times. *Tokens*: of all steps. [How](upcycling.md#healing).
"""

ARMS = """\
DraftExpert's ablation (arXiv 2607.24434, Table 5) on {target}:
{steps} steps an arm{settings}.
*Agree*, *router*, *prefetch*: teacher-forced on held-out text, in percent (agreement with the full
MoE, of the draft router's experts with the target's, and recall of what a verification needs). The
rest: the decode loop, drafts of a fixed length; *accepted* is the share of drafted tokens, *a1* to
*a4* by position, given that those before were accepted. (`python -m train.arms`)
"""

KINDS = """\
Decoding {target} with draft experts of width {width}{trained}, that keep the first
{top_r} of the routed ones: drafts of {draft_length}, at most
{max_new_tokens} new tokens, by kind of prompt
(`python -m infer.bench_kinds`). *= AR*: all prompts of the run had the tokens of autoregressive
decoding. *MB*: bytes of experts moved, a token.
"""

SHARED_HALF = """\
How much the shared experts carry is a choice of the layout here, and with it how well drafts do
that leave out routed experts. For comparison, DeepSeek-V2-Lite's shared + top-1 alone agrees with
it on 45 to 48 % of tokens; the shares of these models are in a table above.
"""

FITS = """\
*Gap*: after the last layer, the squared distance of the states from the dense model's, relative to
their square, on windows left out of the fit; *before*: without the last layer's correction.
*Seconds* are of these runs, with whatever else the machine was doing.
"""


@dataclass(frozen=True)
class Arguments:
    """Arguments of `python -m train.upcycle_card`."""

    runs: tuple[InputFile, ...]
    """Results of `dejax upcycle --json`, in the order of the tables."""
    out: NamedFile
    """The card to write."""
    answers: InputFile | None = None
    """Answers of `python -m train.upcycle_answers`."""
    note: str | None = None
    """What a reader must know that the measurements do not say, such as which one to take."""
    arms: InputFile | None = None
    """Result of `python -m train.arms --json` on the MoE of a run."""
    kinds: InputFile | None = None
    """Result of `python -m infer.bench_kinds --json` with draft experts of such a MoE."""


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; numbers have four digits, None is a dash."""
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return format_number(value) if isinstance(value, float) else str(value)


def name_of(run: Run) -> str:
    """Such as `384/36/18, 57 k, uncorrected, seed 1`: what tells runs apart."""
    layout, options = run["layout"], run["options"]
    parts = [f"{layout['shared']}/{layout['experts']}/{layout['top_k']}"]
    parts += [f"{options['--tokens'] / 1e3:.0f} k"]
    parts += [] if options["--correct"] else ["uncorrected"]
    parts += [f"seed {options['--seed']}"] if options["--seed"] else []
    parts += [f"healed {healed_tokens(run) / 1e3:.0f} k"] if "healing" in run else []
    return ", ".join(parts)


def healed_tokens(run: Run) -> int:
    """Tokens of all steps of a healing."""
    config = run["healing"]["config"]
    return config["loop"]["steps"] * config["batch_size"] * config["seq_len"]


def quality_table(runs: Sequence[Run]) -> str:
    """Against the dense model, all text together."""
    columns = ["S/E/k", "active", "agreement", "KL", "perplexity", "dense", "tokens"]
    rows = []
    for run in runs:
        found = run["quality"]["all"]
        keys = ("agreement", "kl", "perplexity", "dense_perplexity", "tokens")
        active = f"{run['layout']['active_share']:.1%}"
        rows.append([name_of(run), active, *(found[key] for key in keys)])
    return table(columns, rows)


def kinds_table(runs: Sequence[Run]) -> str:
    """Perplexity and agreement by kind of text."""
    kinds = [kind for kind in runs[0]["quality"] if kind != "all"]
    first = runs[0]["quality"]
    dense = ["dense", *(f"{first[kind]['dense_perplexity']:.3g}" for kind in kinds)]
    rows: list[list[Any]] = [dense]
    for run in runs:
        found = [run["quality"].get(kind) for kind in kinds]
        cells = [f"{f['perplexity']:.3g}, {f['agreement']:.3f}" if f else None for f in found]
        rows.append([name_of(run), *cells])
    return table(["perplexity, agreement", *kinds], rows)


def routing_table(runs: Sequence[Run]) -> str:
    """Statistics of routing, means over layers."""
    columns = [
        "S/E/k",
        "load, busiest / mean",
        "worst layer",
        "unused",
        "overlap",
        "independent",
        "unique of 4",
        "independent",
        "unique of 8",
        "independent",
    ]
    rows = []
    for run in runs:
        found = run["routing"]
        means = {key: float(np.mean(values)) for key, values in found.items()}
        rows.append(
            [
                name_of(run),
                means["load_max_over_mean"],
                float(np.max(found["load_max_over_mean"])),
                int(np.sum(found["unused_experts"])),
                means["overlap"],
                means["independent_overlap"],
                means["unique_4"],
                means["independent_unique_4"],
                means["unique_8"],
                means["independent_unique_8"],
            ]
        )
    return table(columns, rows)


def draft_table(runs: Sequence[Run]) -> str:
    """Agreement of draft paths with the full MoE."""
    ranks = sorted({int(r) for run in runs for r in run["draft_agreement"]})
    columns = ["S/E/k", *("shared only" if r == 0 else f"+ top-{r}" for r in ranks), "tokens"]
    rows = [
        [name_of(run), *(run["draft_agreement"].get(str(r)) for r in ranks), run["draft_tokens"]]
        for run in runs
    ]
    return table(columns, rows)


def healing_table(runs: Sequence[Run]) -> str:
    """What was trained of healed MoEs, and how."""
    columns = ["S/E/k", "trained", "parameters", "steps", "tokens", "learning rate", "balance"]
    rows = []
    for run in runs:
        record, config = run["healing"], run["healing"]["config"]
        trained = f"{record['trained_params'] / 1e6:.1f} M"
        rate = f"{config['optimizer']['learning_rate']:g}"
        cells = [", ".join(config["trained"]), trained, config["loop"]["steps"], healed_tokens(run)]
        rows.append([name_of(run), *cells, rate, f"{config['balance_weight']:g}"])
    return table(columns, rows)


ARM_COLUMNS = {
    "kl": ("KL", 1),
    "agreement": ("agree", 100),
    "router_agreement": ("router", 100),
    "prefetch_recall": ("prefetch", 100),
    "acceptance_rate": ("accepted", 100),
    **{f"alpha_{i}": (f"a{i}", 100) for i in range(1, 5)},
    "tokens_per_round": ("tokens a round", 1),
}
"""Figures of an arm -> heading, and what they are multiplied by."""


def arms_table(found: dict[str, Any]) -> str:
    """The arms of the losses, means over seeds."""
    rows = []
    for arm in found["arms"]:
        cells = [
            None if arm["mean"].get(name) is None else float(arm["mean"][name] * scale)
            for name, (_, scale) in ARM_COLUMNS.items()
        ]
        rows.append([arm["arm"], arm["seeds"], *cells])
    return table(["arm", "seeds", *(heading for heading, _ in ARM_COLUMNS.values())], rows)


def arms_text(found: dict[str, Any], target: str) -> str:
    """The ablation on `target`, with what was done."""
    settings = ", ".join(f"`{setting}`" for setting in found.get("settings", ()))
    told = f", with {settings}" if settings else ""
    about = prose(ARMS.format(target=target, steps=found["steps"], settings=told))
    return f"{about}\n\n{arms_table(found)}"


def acceptance_text(found: dict[str, Any], target: str) -> str:
    """Acceptance by kind of prompt on `target`, with what was done."""
    draft = found["draft_experts"]
    trained = f", trained for {draft['steps']} steps" if draft["steps"] else ""
    facts = {"width": draft["width"], "top_r": draft["top_r"], "trained": trained}
    about = prose(KINDS.format(target=target, **facts, **found["options"]))
    return f"{about}\n\n{acceptance_table(found)}"


def acceptance_table(found: dict[str, Any]) -> str:
    """Acceptance by kind of prompt, of runs with drafts; of others what all prompts came to."""
    rows = []
    for row in found["rows"]:
        accepted = row["acceptance_rate"]
        if accepted is None and row["kind"] != "all":
            continue
        cells = [row["kind"], row["prompts"], None if accepted is None else f"{accepted:.1%}"]
        cells += [row["tokens_per_round"], row["bytes_per_token"] / 1e6]
        rows.append([row["run"], *cells, "yes" if row["identical_to_ar"] else "no"])
    return table(["run", "kind", "prompts", "accepted", "tokens a round", "MB", "= AR"], rows)


def fit_table(runs: Sequence[Run]) -> str:
    """What the closed forms came to, and what they took."""
    columns = ["S/E/k", "beta", "ridge", "gap before", "after", "seconds", "of them fit", "memory"]
    rows = []
    for run in runs:
        layers, last = run["layers"], run["layers"][-1]
        corrected = last["beta"] is not None
        means = [float(np.mean([x[key] for x in layers])) if corrected else None
                 for key in ("beta", "ridge")]  # fmt: skip
        times = [float(run["seconds"]), float(run["fit_seconds"])]
        gaps = [last["before"], last["after"]]
        memory = format_bytes(run["peak_memory_bytes"])
        rows.append([name_of(run), *means, *gaps, *times, memory])
    return table(columns, rows)


def answers_text(records: Sequence[dict[str, Any]]) -> str:
    """Prompts and every model's answer, as code blocks so that nothing of them is rendered."""
    parts = []
    for record in records:
        parts.append(f"### {record['id']}\n\n{_block(record['prompt'])}")
        parts += [f"{model}:\n\n{_block(text)}" for model, text in record["answers"].items()]
    return "\n".join(parts)


def _block(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.split("\n")) + "\n"


def render(
    runs: Sequence[Run],
    answers: Sequence[dict[str, Any]],
    note: str | None,
    drafts: Sequence[str],
) -> str:
    """The card as Markdown; `drafts` tells of draft experts."""
    healed = [run for run in runs if "healing" in run]
    fitted = [run for run in runs if "healing" not in run]
    parts = [HEAD.format(name=runs[0]["dense"])]
    parts += [note + "\n"] if note else []
    parts += ["## Beside the dense model\n", quality_table(runs), kinds_table(runs)]
    parts += ["## Routing\n", ROUTING, routing_table(runs), DRAFTS, draft_table(runs)]
    parts += ["## Draft experts\n", SHARED_HALF, *drafts] if drafts else []
    parts += ["## Fits\n", FITS, fit_table(fitted)] if fitted else []
    parts += ["## Healing\n", HEALING, healing_table(healed)] if healed else []
    if answers:
        parts += ["## Answers\n", "Greedy, with the chat template; cut at the limit of tokens.\n"]
        parts += [answers_text(answers)]
    return "\n".join(parts)


def _owner(runs: Sequence[Run], found: dict[str, Any], file: Path | None) -> str:
    """The name of the run whose MoE a result is of."""
    names = [name_of(run) for run in runs if run["identity"] == found["identity"]]
    if not names:
        raise UsageError(
            f"{file}: of the MoE {found['identity']}, which is that of no run; expected one of "
            f"{', '.join(run['identity'] for run in runs)}"
        )
    return names[0]


def _check_runs(runs: Sequence[Run], files: Sequence[Path]) -> None:
    """Refuses runs that are not of one dense model, or that the tables could not tell apart."""
    if not runs:
        raise UsageError("--runs is empty; expected results of `dejax upcycle --json`")
    seen: dict[str, Path] = {}
    for run, file in zip(runs, files, strict=True):
        if run["options"]["DENSE"] != runs[0]["options"]["DENSE"]:
            raise UsageError(f"{file}: made from {run['dense']}, {files[0]} from another model")
        other = seen.setdefault(name_of(run), file)
        if other is not file:
            raise UsageError(f"{file} and {other} are both {name_of(run)}; expected each once")


def main(argv: list[str]) -> int:
    """Runs `python -m train.upcycle_card`."""
    about = "Write the card of an upcycled model from measurements."
    args = parse(Arguments, argv, prog="python -m train.upcycle_card", description=about)
    runs = [read_run(file) for file in args.runs]
    _check_runs(runs, args.runs)
    answers = read_answers(args.answers) if args.answers else []
    arms = read_arms(args.arms) if args.arms else None
    kinds = read_acceptance(args.kinds) if args.kinds else None
    drafts = [
        text(found, _owner(runs, found, file))
        for text, found, file in (
            (arms_text, arms, args.arms),
            (acceptance_text, kinds, args.kinds),
        )
        if found is not None
    ]
    write_whole(args.out, render(runs, answers, args.note, drafts).encode())
    say(f"card: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(run_module("upcycle_card", main))

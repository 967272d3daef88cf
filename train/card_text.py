"""The text of a model card, from the numbers that `train.model_card` measured and nothing else."""

import textwrap
from collections.abc import Sequence

from train.card_pieces import (
    Numbers,
    count,
    fenced,
    fixed,
    millions,
    percent,
    prose,
    settings,
    table,
    yes,
)
from train.card_sources import SOURCES

MARGIN = 0.15
"""Nats a token that the routed experts have to be worth."""
BELOW = 0.9
"""Most of the trigram model's bits per byte that the target may need."""
PROMPT_CHARS = 300
"""Characters of a sample's prompt that are shown."""


def render(numbers: Numbers, *, curve: str, numbers_file: str, note: str | None = None) -> str:
    """The card as Markdown; `curve` and `numbers_file` are the files beside it."""
    sections = [
        _head(numbers, numbers_file),
        _model(numbers["model"]),
        _making(numbers["run"], numbers["routing"], curve),
        *([] if note is None else [prose(note)]),
        _data(numbers["data"]),
        _held_out(numbers["held_out"], numbers["measured"]),
        _experts(numbers["arms"], numbers),
        _load(numbers["routing"]),
        _overlap(numbers["routing"]),
        _samples(numbers["samples"], numbers["measured"]),
        _limits(numbers),
    ]
    return "\n\n".join(sections) + "\n"


def _head(numbers: Numbers, numbers_file: str) -> str:
    model, run, versions = numbers["model"], numbers["run"], numbers["measured"]["versions"]
    front = "---\nlicense: apache-2.0\nlanguage: en\nlibrary_name: dejax\n"
    front += "pipeline_tag: text-generation\ntags: [mixture-of-experts, tiny]\n---"
    about = prose(
        f"A `{model['config']['family']}` mixture of experts of "
        f"{millions(model['parameters'])} parameters, trained from scratch on "
        f"{millions(_all_tokens(run))} tokens. It is small enough to come with dejax, so that "
        "demo, tests and documentation run offline on real text and real routing. It is a test "
        "object, not an assistant.",
    )
    origin = prose(
        "Written by `python -m train.model_card` from measurements (dejax "
        f"{versions['dejax']}, jax {versions['jax']}); all numbers are in `{numbers_file}`."
    )
    return f"{front}\n\n# {model['name']}\n\n{about}\n\n{origin}"


def _model(model: Numbers) -> str:
    config = model["config"]
    attention, moe = config["attention"], config["experts"]
    dense = len(moe["dense_layers"])
    query = attention["query_rank"] or "full"
    head = attention["nope_dim"] + attention["rope"]["dim"]
    rows = [
        ("family", config["family"]),
        ("layers", f"{config['num_layers']}: {dense} dense, {config['num_layers'] - dense} MoE"),
        ("width", f"{config['width']}, dense feed-forward {config['dense_width']}"),
        (
            "routed experts",
            f"{moe['num_experts']} a layer of width {moe['expert_width']}, top-{moe['top_k']}",
        ),
        ("shared experts", f"width {moe['shared_width']}"),
        ("gates", f"{moe['scoring']}, not renormalised, times {moe['scaling']:g}"),
        (
            "attention",
            f"MLA, {attention['heads']} heads of {head} (of it RoPE {attention['rope']['dim']}), "
            f"query rank {query}, KV rank {attention['kv_rank']}",
        ),
        ("vocabulary", f"{config['vocab_size']}{', tied head' if config['tied'] else ''}"),
        ("context", config["context"]),
        ("parameters", count(model["parameters"])),
        ("of them routed experts", count(model["routed_parameters"])),
        ("active for one token", count(model["active_parameters"])),
        ("weights", f"{count(model['weight_bytes'])} bytes ({model['dtype']})"),
        ("one routed expert", f"{count(model['expert_bytes'])} bytes"),
        ("folder without this card", f"{count(model['folder_bytes'])} bytes"),
        ("identity", f"`{model['identity']}`"),
    ]
    return "## What it is\n\n" + table(("property", "value"), rows)


def _making(run: Numbers, routing: Numbers, curve: str) -> str:
    config = run["config"]
    optimizer, phases = config["optimizer"], config["phases"]
    name = run["config_name"]
    added = {n.removesuffix("_weight"): v for n, v in config.items() if n.endswith("_weight")}
    batches = "; ".join(
        f"from step {p['start']}: {p['batch_size']} rows of {p['seq_len']}" for p in phases
    )
    rows = [
        ("steps", f"{run['step']} (planned: {config['loop']['steps']})"),
        ("tokens seen", count(run["tokens"])),
        ("batches", batches),
        ("seed", config["seed"]),
        (
            "optimizer",
            f"{optimizer['kind']}, learning rate {optimizer['learning_rate']:g}, "
            f"{optimizer['warmup_steps']} steps of warm-up, decay over the last "
            f"{optimizer['decay_steps']} to {optimizer['final_fraction']:g} of it, weight decay "
            f"{optimizer['weight_decay']:g}, gradients clipped to {optimizer['clip_norm']:g}",
        ),
        ("weights of added losses", ", ".join(f"{n} {v:g}" for n, v in added.items())),
        ("CPU devices", config["cpu_devices"]),
    ]
    if run["seconds"]:
        rows += [
            ("time in steps", f"{run['seconds'] / 3600:.2f} h (evaluations left out)"),
            ("tokens a second", f"{run['tokens_per_second']:.0f}"),
        ]
    rows += _first_rows(run)
    assignments = routing["tokens"] * len(routing["layers"]) * routing["top_k"]
    dropped = prose(
        "Routing is dropless, in training too. Counted with the grouped product on the held-out "
        f"text: {count(routing['dropped'])} of {count(assignments)} (token, expert) pairs left "
        "out."
    )
    figure = prose(
        "Bits a byte during training are those of some held-out rows of each kind, evenly spread, "
        "in the table below those of all."
    )
    command = f"dejax pretrain configs/{name}.py --data DIR --out DIR"
    text = f"## How it was made\n\n```bash\n{command}\n```\n\n"
    changes = [f"At step {s} it still had {settings(d)}." for s, d in run["earlier"].items()]
    changes += [
        f"`{name}` is in its log from step {step} on only: the program changed on the way."
        for name, step in run["late_metrics"].items()
    ]
    if run["differences"]:
        changes.insert(
            0, f"Other than in that file now, the run had {settings(run['differences'])}."
        )
    if changes:
        text += prose("The command alone does not repeat this run.", *changes) + "\n\n"
    text += table(("what", "value"), rows)
    return f"{text}\n\n{dropped}\n\n![Loss against tokens]({curve})\n\n{figure}"


def _all_tokens(run: Numbers) -> int:
    """Those of the run, and of the one that gave its first weights."""
    return run["tokens"] + (run["first"]["tokens"] if run["first"] else 0)


def _first_rows(run: Numbers) -> list[tuple[str, str]]:
    first = run["first"]
    if first is None:
        return []
    made = f"{first['step']} steps, {count(first['tokens'])} tokens"
    hours = (first["seconds"] or 0) / 3600
    weights = f"those of {first['name']} `{first['identity']}`: {made}, {hours:.2f} h, spread "
    both = hours + (run["seconds"] or 0) / 3600
    return [
        ("first weights", f"{weights}{first['spread_weight']:g}"),
        ("both together", f"{count(_all_tokens(run))} tokens, {both:.2f} h in steps"),
    ]


def _data(data: Numbers) -> str:
    train, held = data["train"], data["heldout"]
    whole = sum(train["weights"].values())
    rows = [
        (
            kind,
            count(counts["documents"]),
            count(counts["tokens"]),
            percent(train["weights"][kind] / whole),
            fixed(data["passes"][kind], 2),
            count(held["counts"][kind]["documents"] if kind in held["counts"] else 0),
            count(held["counts"][kind]["tokens"] if kind in held["counts"] else 0),
        )
        for kind, counts in train["counts"].items()
    ]
    columns = ("kind", "documents", "tokens", "share", "passes", "held out", "tokens held out")
    sources = [(kind, what, licence) for kind in train["counts"] for what, licence in SOURCES[kind]]
    words = data["run_words"]
    split = prose(
        "Of every kind, the source documents with the lowest hashes are held out, and with a "
        "document everything cut out of it. Nothing was trained on that shares a run of "
        f"{words} words with one of the demo's evaluation prompts "
        f"({count(train['dropped_excluded'])} documents dropped). "
        f"{count(train['dropped_overlapping'])} training documents were dropped because they "
        f"share runs of {words} words with a held-out one: a chat exchange for a single run, a "
        "text of many pages for more than a twentieth of its runs; what many documents share is "
        f"a template and does not count. {count(train['dropped_repeated'])} exchanges that asked "
        "about the same passage again and again, and "
        f"{count(train['dropped_too_long'])} of more than {data['max_chat_tokens']} tokens, were "
        "left out as well."
    )
    passes = prose(
        "share: of the rows of a batch. passes: how often the run went over the kind's tokens, "
        "by that share."
    )
    return "\n\n".join(
        [
            "## Data",
            table(columns, rows),
            passes,
            table(("kind", "source", "licence"), sources),
            split,
        ]
    )


def _held_out(found: Numbers, measured: Numbers) -> str:
    rows = [
        (
            kind,
            count(row["tokens"]),
            fixed(row["loss"]),
            fixed(row["bits_per_byte"]),
            fixed(row["trigram"]),
            fixed(row["ratio"]),
            yes(row["ratio"] <= BELOW),
        )
        for kind, row in found.items()
    ]
    columns = ("kind", "tokens", "nats a token", "bits a byte", "trigram", "ratio")
    columns += (f"{100 * (1 - BELOW):.0f} % below",)
    note = prose(
        f"All held-out text, in rows of {measured['loss_seq_len']} tokens: the target sees no "
        "further back than its row. The trigram model (interpolated Kneser-Ney, "
        "`python -m train.trigram`) was fitted on the same training tokens and predicts the same "
        "held-out tokens."
    )
    return f"## Held-out loss\n\n{table(columns, rows)}\n\n{note}"


def _experts(arms: Numbers, numbers: Numbers) -> str:
    full = arms["full"]["loss"]
    rows = [
        (name, fixed(arm["loss"]), f"{arm['loss'] - full:+.3f}", percent(arm["agreement"]))
        for name, arm in arms.items()
    ]
    gain = arms["shared only"]["loss"] - full
    verdict = (
        f"Do the routed experts matter? {yes(gain >= MARGIN)}: the full model is {gain:.3f} nats "
        f"a token below its shared experts alone (asked for: at least {MARGIN})."
    )
    measured = numbers["measured"]
    note = prose(
        f"On {measured['rows']} held-out rows of {measured['seq_len']} tokens of each kind (all if "
        "there are fewer), evenly spread. agreement: share of tokens "
        "with the same most likely successor as the full model's. shared + top-r: gates as they "
        "are. routing shuffled: in every layer, each token uses experts and gates of another "
        "random token."
    )
    columns = ("model", "nats a token", "difference", "agreement")
    return f"## What the routed experts do\n\n{prose(verdict)}\n\n{table(columns, rows)}\n\n{note}"


def _load(routing: Numbers) -> str:
    rows = [
        (
            row["layer"],
            fixed(row["max_over_mean"], 2),
            fixed(row["min_over_mean"], 3),
            row["dead"],
        )
        for row in routing["layers"]
    ]
    note = prose(
        f"On the same rows ({count(routing['tokens'])} tokens of "
        f"{count(routing['documents'])} documents, every kind alike). A dead expert is one that "
        "no token used."
    )
    columns = ("layer", "max / mean", "min / mean", "dead experts")
    return f"## Expert load\n\n{table(columns, rows)}\n\n{note}"


def _overlap(routing: Numbers) -> str:
    def cells(row: Numbers) -> tuple[str, ...]:
        names = ("overlap", "overlap_independent", "overlap_shuffled")
        shares = tuple(percent(row[name]) for name in names)
        lifts = (fixed(row["lift_independent"], 2), fixed(row["lift_shuffled"], 2))
        return shares + lifts

    columns = ("o_1", "independent", "shuffled", "lift (independent)", "lift (shuffled)")
    by_layer = [(row["layer"], *cells(row)) for row in routing["layers"]]
    by_layer.append(("mean", *cells(routing["mean"])))
    by_kind = [(kind, row["documents"], *cells(row)) for kind, row in routing["by_kind"].items()]
    mean = routing["mean"]
    blocks = [
        (
            rows,
            fixed(mean[f"unique_{rows}"], 2),
            fixed(mean[f"unique_{rows}_independent"], 2),
            fixed(mean[f"unique_{rows}_shuffled"], 2),
        )
        for rows in routing["blocks"]
    ]
    note = prose(
        "o_1 is the share of a token's experts that the next token of the document uses too; "
        "U(T)/k the distinct experts of T adjacent tokens, in units of one token's. independent: "
        "tokens that draw their experts anew, with the measured shares (sum f^2 / k). shuffled: "
        "tokens of different documents, at the same positions. lift: o_1 over the null. The "
        "routing is teacher-forced on held-out text, not recorded while decoding."
    )
    return "\n\n".join(
        [
            "## Overlap of adjacent tokens",
            table(("layer", *columns), by_layer),
            "Mean over layers:",
            table(("T", "U(T)/k", "independent", "shuffled"), blocks),
            table(("kind", "documents", *columns), by_kind),
            note,
        ]
    )


def _samples(samples: Sequence[Numbers], measured: Numbers) -> str:
    intro = prose(
        "Unedited: the first of the demo's prompts of each category, in the chat template, up to "
        f"{measured['sample_tokens']} tokens, greedy and at temperature "
        f"{measured['temperature']} (seed {measured['seed']}). Prompts are shown up to "
        f"{PROMPT_CHARS} characters."
    )
    parts = ["## Samples", intro]
    for sample in samples:
        prompt = sample["prompt"]
        prompt = prompt if len(prompt) <= PROMPT_CHARS else prompt[:PROMPT_CHARS] + " [...]"
        heading = f"**{sample['category']}**, `{sample['id']}`"
        parts += [f"{heading} ({sample['source']}, {sample['license']})", fenced(prompt)]
        for name, rule in (("greedy", "Greedy"), ("seeded", f"T={measured['temperature']}")):
            parts += [
                f"{rule} (ended by: {sample[name]['finish_reason']})",
                fenced(sample[name]["text"]),
            ]
    return "\n\n".join(parts)


def _limits(numbers: Numbers) -> str:
    model, run, distinct = numbers["model"], numbers["run"], numbers["distinct_4grams"]
    points = [
        "Not for use as an assistant, nor for anything that relies on what it says. It has learned "
        "the form of answers, code and prose, not facts, arithmetic or instructions: expect "
        "fluent nonsense.",
        f"{millions(_all_tokens(run))} tokens and {millions(model['parameters'])} parameters "
        "are little; English and Python only.",
        "It repeats itself: of the 4-grams in the samples above, "
        f"{percent(distinct['greedy'])} are distinct (greedy), {percent(distinct['seeded'])} "
        f"(T={numbers['measured']['temperature']}). Repetition flatters a drafter; figures of "
        "acceptance taken on this target say little about a large one.",
        "Nothing was done against bias or harmful text; speeches and a novel of past centuries "
        "are part of the data.",
        f"Sequences end at {model['config']['context']} tokens.",
        "Overlap and load are those of a small router trained briefly: they exercise the code, "
        "they do not predict a large model's.",
    ]
    lines = [
        textwrap.fill(point, 100, initial_indent="- ", subsequent_indent="  ") for point in points
    ]
    return "## Limits\n\n" + "\n".join(lines)

"""A pretraining run as its folder tells it: what the model card says of how a model was made."""

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dejax.errors import UsageError
from dejax.target import model_folder
from train.checkpoints import checkpointer
from train.config_files import load_config, to_json

Numbers = dict[str, Any]
NUMBERS = "card.json"
"""The card's numbers, beside it."""


@dataclass(frozen=True)
class Run:
    """A pretraining run up to a step.

    Attributes:
      step: of the checkpoint that became the model; config: as its checkpoint says, plain JSON;
      log: rows of metrics.jsonl up to `step`, one a logged step; earlier: step -> config of the
      checkpoints that are kept from before `step`.
    """

    step: int
    config: dict[str, Any]
    log: list[dict[str, Any]]
    earlier: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def seq_len(self) -> int:
        """Tokens of a row in the last batch."""
        started = [phase for phase in self.config["phases"] if phase["start"] < self.step]
        return started[-1]["seq_len"]

    @property
    def late_metrics(self) -> dict[str, int]:
        """Training metrics that the log has not had from the first, and from when: a changed loss.

        Those of evaluations (`bpb_*`) are not meant.
        """
        first: dict[str, int] = {}
        for row in self.log:
            for name in row:
                first.setdefault(name, row["step"])
        start = min(first.values(), default=0)
        return {n: s for n, s in first.items() if s > start and not n.startswith("bpb_")}

    def tokens_at(self, step: int) -> int:
        """Tokens seen after `step` steps."""
        phases = self.config["phases"]
        ends = [phase["start"] for phase in phases[1:]] + [step]
        return sum(
            max(0, min(step, end) - phase["start"]) * phase["seq_len"] * phase["batch_size"]
            for phase, end in zip(phases, ends, strict=True)
        )

    @property
    def seconds(self) -> float | None:
        """Time spent in the logged steps, evaluations left out; None if nothing was logged.

        Steps that a stopped run repeated count once.
        """
        if not self.log:
            return None
        marks = [0, *(row["step"] for row in self.log)]
        return sum(
            (self.tokens_at(now) - self.tokens_at(before)) / row["tokens_per_second"]
            for before, now, row in zip(marks, marks[1:], self.log, strict=False)
        )


def read_run(folder: Path, step: int | None = None) -> Run:
    """The run in `folder` up to `step` (default: its newest checkpoint).

    Raises:
      UsageError: it has no checkpoint (of that step), or no readable metrics.
    """
    if not (folder / "checkpoints").is_dir():
        raise UsageError(f"{folder}: no checkpoints; expected the OUT of `dejax pretrain`")
    with closing(checkpointer(folder, keep=1)) as saved:
        steps = [checkpoint.step for checkpoint in saved.checkpoints]
        wanted = max(steps, default=None) if step is None else step
        if wanted not in steps:
            raise UsageError(f"{folder}: no checkpoint of step {wanted}; there are {steps}")
        configs: Any = {s: saved.metadata(s).custom_metadata for s in steps if s <= wanted}
    file, rows = folder / "metrics.jsonl", {}
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            rows[row["step"]] = row  # a resumed run logs the steps it repeats once more
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{file}: not readable as metrics of a run ({error})") from None
    config = configs.pop(wanted)
    return Run(wanted, config, [rows[s] for s in sorted(rows) if s <= wanted], configs)


def config_differences(config: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of `config` that `other` has not, by dotted key; None where it lacks one."""
    ours, theirs = _flat(config), _flat(other)
    keys = sorted(ours.keys() | theirs.keys())
    return {key: ours.get(key) for key in keys if ours.get(key) != theirs.get(key)}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in tree.items():
        inner = isinstance(value, Mapping)
        flat |= _flat(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return flat


def describe_run(run: Run, config: str) -> Numbers:
    """How the model was made: `log` holds the curve, `first` the run it took first weights from."""
    tokens = run.tokens_at(run.step)
    seconds = run.seconds
    logged = run.tokens_at(run.log[-1]["step"]) if run.log else 0
    earlier = {s: config_differences(c, run.config) for s, c in sorted(run.earlier.items())}
    first = first_run(run.config.get("start"))
    settings = dict(run.config)
    if first is not None:
        settings["start"] = f"{first['name']} {first['identity']}"  # wherever that folder lay
    return {
        "step": run.step,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": logged / seconds if seconds else None,
        "config_name": Path(config).stem,
        "differences": config_differences(settings, to_json(load_config(config))),
        "earlier": {s: d for s, d in earlier.items() if d},
        "late_metrics": run.late_metrics,
        "config": settings,
        "first": first,
        "log": [row | {"tokens": run.tokens_at(row["step"])} for row in run.log],
    }


def first_run(start: str | None) -> Numbers | None:
    """What the card of the model that a run started from says of its making; None without one.

    Raises:
      UsageError: the folder has no such card.
    """
    if start is None:
        return None
    file = model_folder(start) / NUMBERS
    try:
        card = json.loads(file.read_text(encoding="utf-8"))
        model, run = card["model"], card["run"]
        return {
            "name": model["name"],
            "identity": model["identity"],
            "step": run["step"],
            "tokens": run["tokens"],
            "seconds": run["seconds"],
            "spread_weight": run["config"].get("spread_weight", 0.0),
        }
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"{file}: not readable as a card's numbers ({error}); expected those of the model that "
            "the run started from"
        ) from None

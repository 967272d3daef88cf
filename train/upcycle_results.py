"""Results that other commands wrote, read back for the card: each is checked for all that it reads.

`dejax upcycle`, `train.upcycle_quality`, `train.upcycle_answers`, `train.arms` and
`infer.bench_kinds` write them.
"""

import json
from pathlib import Path
from typing import Any

from dejax.errors import UsageError
from dejax.paths import read_file

Run = dict[str, Any]
NUMBER = (int, float)

# What a value must hold: a type (or several), an object's fields (`...`: all others), a list's
# elements. Lists are not empty.
_AGAINST_DENSE = dict.fromkeys(("dense_perplexity", "perplexity", "kl", "agreement"), NUMBER)
_LAYERS = [NUMBER]
_RUN = {
    "dense": str,
    "identity": str,
    "options": {"DENSE": str, "--tokens": int, "--correct": bool, "--seed": int, "--dtype": str},
    "layout": dict.fromkeys(("shared", "experts", "top_k"), int) | {"active_share": NUMBER},
    "layers": [dict],
    "quality": {"all": dict, ...: _AGAINST_DENSE | {"tokens": int}},
    "routing": {
        "load_max_over_mean": _LAYERS,
        "unused_experts": _LAYERS,
        "overlap": _LAYERS,
        "independent_overlap": _LAYERS,
        "unique_4": _LAYERS,
        "independent_unique_4": _LAYERS,
        "unique_8": _LAYERS,
        "independent_unique_8": _LAYERS,
    },
    "draft_agreement": {...: NUMBER},
    "draft_tokens": int,
    "seconds": NUMBER,
    "fit_seconds": NUMBER,
    "peak_memory_bytes": int,
}
_HEALING = {
    "config": {
        "loop": {"steps": int},
        "optimizer": {"learning_rate": NUMBER},
        "batch_size": int,
        "seq_len": int,
        "trained": [str],
        "balance_weight": NUMBER,
    },
    "trained_params": int,
}
_ARMS = {
    "identity": str,
    "steps": int,
    "settings": list,
    "arms": [{"arm": str, "seeds": int, "mean": dict}],
}
_KINDS = {
    "identity": str,
    "draft_experts": {"width": int, "top_r": int, "steps": (int, type(None))},
    "options": {"draft_length": int, "max_new_tokens": int},
    "rows": [
        {
            "run": str,
            "kind": str,
            "prompts": int,
            "acceptance_rate": (*NUMBER, type(None)),
            "tokens_per_round": NUMBER,
            "bytes_per_token": NUMBER,
            "identical_to_ar": bool,
        }
    ],
}
_ANSWERS = [{"id": str, "prompt": str, "answers": {...: str}}]


def read_run(file: Path) -> Run:
    """A MoE's measurements, of `dejax upcycle --json` or `train.upcycle_quality`.

    Raises:
      UsageError: the file is something else, or lacks something.
    """
    what = "a result of `dejax upcycle --json`"
    run = _read(file, what, _RUN)
    if "healing" in run:
        _check(run["healing"], file, what, _HEALING)
    return run


def read_arms(file: Path) -> dict[str, Any]:
    """A result of `train.arms`; UsageError where it is none."""
    return _read(file, "a result of `python -m train.arms --json`", _ARMS)


def read_acceptance(file: Path) -> dict[str, Any]:
    """A result of `infer.bench_kinds`; UsageError where it is none."""
    return _read(file, "a result of `python -m infer.bench_kinds --json`", _KINDS)


def read_answers(file: Path) -> list[dict[str, Any]]:
    """Answers of `train.upcycle_answers`; UsageError where they are none."""
    return _read(file, "answers of `python -m train.upcycle_answers`", _ANSWERS)


def _read(file: Path, what: str, shape: Any) -> Any:
    try:
        value = json.loads(read_file(file, what))
    except ValueError as error:
        raise UsageError(f"{file}: not JSON ({error}); expected {what}") from None
    _check(value, file, what, shape)
    return value


def _check(value: Any, file: Path, what: str, shape: Any) -> None:
    if wrong := _first_wrong(value, shape, ""):
        raise UsageError(f"{file}: not {what}: {wrong}")


def _first_wrong(value: Any, shape: Any, place: str) -> str | None:
    """What is wrong with a value first; None if it holds what it must."""
    name = place or "it"
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{name} is no object"
        fields = {key: shape[key] for key in shape if key is not ...}
        if missing := [key for key in fields if key not in value]:
            return f"{name} has no {missing[0]!r}"
        fields |= dict.fromkeys(value.keys(), shape[...]) if ... in shape else {}
        found = (_first_wrong(value[key], own, _joined(place, key)) for key, own in fields.items())
    elif isinstance(shape, list):
        if not isinstance(value, list) or not value:
            return f"{name} is no list with something in it"
        found = (_first_wrong(each, shape[0], f"{place}[{i}]") for i, each in enumerate(value))
    else:
        found = iter([None if isinstance(value, shape) else f"{name} is {value!r:.40}"])
    return next((wrong for wrong in found if wrong), None)


def _joined(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key

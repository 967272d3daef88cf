"""One decoded prompt, in the form of the JSON contract."""

from dataclasses import dataclass, field
from typing import Any

from dejax.target import Target
from infer.report import stats
from infer.trace import Round


@dataclass(frozen=True)
class Generation:
    """One decoded prompt, with the fields of the JSON contract."""

    id: str
    prompt: str
    prompt_tokens: list[int]
    tokens: list[int]
    text: str
    finish_reason: str
    mode: str
    lossless: bool
    stats: dict[str, Any]
    trace: tuple[Round, ...]
    passed_through: dict[str, Any] = field(default_factory=dict)
    """What else the prompt's record carried."""

    def to_json(self) -> dict[str, Any]:
        """The fields of the contract, and what is passed through; not the trace."""
        names = ("id", "prompt", "prompt_tokens", "tokens", "text", "finish_reason", "mode")
        record = {name: getattr(self, name) for name in names}
        return self.passed_through | record | {"lossless": self.lossless, "stats": self.stats}


def to_generation(
    target: Target,
    prompt: dict[str, Any],
    ids: list[int],
    trace: tuple[Round, ...],
    options: Any,
    ran: dict[str, Any],
) -> Generation:
    """The result of one prompt, from its trace; `ran` tells the engine, for the statistics."""
    tokens = [token for record in trace for token in record.emitted]
    text = ""
    if target.tokenizer is not None:
        text = target.tokenizer.decode(tokens, skip_special_tokens=True)
    return Generation(
        id=str(prompt["id"]),
        prompt=prompt["prompt"],
        prompt_tokens=ids,
        tokens=tokens,
        text=text,
        finish_reason=str(trace[-1].finish_reason),
        mode=options.mode,
        lossless=options.mode != "moe-spec",
        stats=stats(trace) | ran,
        trace=trace,
        passed_through={k: v for k, v in prompt.items() if k not in ("id", "prompt")},
    )

"""Prompts: read from JSON lines, checked, and turned into token ids."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import dejax
from dejax.config import ModelConfig
from dejax.errors import FailedError, UsageError
from dejax.paths import read_file

DEMO_PROMPTS = Path(dejax.__file__).parent / "assets" / "demo" / "prompts.jsonl"
"""The prompts that come with dejax; no text that it trains on has them."""


@runtime_checkable
class Speaker(Protocol):
    """What prompts are encoded for: a target, however it is laid out."""

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tokenizer(self) -> Any: ...


OnBad = Callable[[Any, UsageError | FailedError], None]
"""Told the id of a prompt that is left out, and why."""


def read_prompts(path: Path, *, on_bad: OnBad | None = None) -> list[dict[str, Any]]:
    """The prompts of a JSON lines file: objects with `id`, `prompt` and whatever else they carry.

    A missing `id` becomes the line's number; blank lines are skipped. With `on_bad`, a line that is
    no prompt is told by its number and left out.

    Raises:
        UsageError: with file and line, for what is no UTF-8, no JSON object, or has no `prompt`.
    """
    data = read_file(path, 'JSON lines such as {"prompt": "Hello"}')
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 (byte {error.start}); expected JSON lines") from error
    # JSON may hold the other separators of `splitlines` unescaped.
    lines = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise UsageError(f'{path}: no prompts; expected JSON lines such as {{"prompt": "Hello"}}')
    prompts = []
    for number, line in lines:
        with left_out(number, on_bad):
            prompts.append(_prompt(line, f"{path}: line {number}", number))
    return prompts


@contextlib.contextmanager
def left_out(name: Any, on_bad: OnBad | None) -> Iterator[None]:
    """With `on_bad`, an error of the block, which is about one prompt, goes to it, no further."""
    try:
        yield
    except (UsageError, FailedError) as error:
        if on_bad is None:
            raise
        on_bad(name, error)


def count_prompts(
    written: int, bad: Sequence[tuple[Any, UsageError | FailedError]]
) -> dict[str, Any]:
    """How many prompts came in and what became of them, and the reasons of those left out.

    Skipped is what could not be decoded, failed what went wrong while it was.
    """
    failed, skipped = (
        [{"id": str(name), "reason": str(error)} for name, error in bad if isinstance(error, kind)]
        for kind in (FailedError, UsageError)
    )
    counts = {"input": written + len(bad), "written": written}
    counts |= {"failed": len(failed), "skipped": len(skipped)}
    return {"counts": counts, "failed": failed, "skipped": skipped}


def _prompt(line: str, where: str, line_number: int) -> dict[str, Any]:
    def no_number(word: str) -> Any:
        raise ValueError(f"{word} is not a JSON number")

    try:
        record = json.loads(line, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict) or "prompt" not in record:
        raise UsageError(f'{where}: no prompt; expected an object such as {{"prompt": "Hello"}}')
    prompt = record["prompt"]
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return {"id": line_number} | record
    if not isinstance(prompt, str):
        raise UsageError(f"{where}: prompt is {prompt!r}; expected a string, or token ids")
    if not is_text(prompt):
        raise UsageError(f"{where}: prompt holds half a surrogate pair, which is no text")
    return {"id": line_number} | record


def is_text(text: str) -> bool:
    """Whether a string can be encoded: bytes that are not UTF-8 arrive as half surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encode_prompt(target: Speaker, prompt: str, *, chat: bool = True) -> list[int]:
    """Token ids of a prompt; with `chat`, as the user's turn of the tokenizer's chat template.

    Raises:
      UsageError: the target has no tokenizer.
    """
    if target.tokenizer is None:
        raise UsageError(
            f"{target.name} has no tokenizer; give prompts as token ids: a file of "
            'JSON lines such as {"prompt": [1, 2, 3]}'
        )
    if chat and target.tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        text = target.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return target.tokenizer.encode(text, add_special_tokens=False)
    return target.tokenizer.encode(prompt)


def encode_prompts(
    target: Speaker, prompts: Sequence[Any], *, chat: bool, on_bad: OnBad | None = None
) -> list[tuple[dict[str, Any], list[int]]]:
    """(record, token ids) of prompts given as text, as token ids, or as records with `prompt`.

    With `on_bad`, a prompt that cannot be decoded is told and left out.

    Raises:
      UsageError: a prompt is none of these, is empty, fills the context, has tokens outside of the
        vocabulary, or has the id of another one.
    """
    if isinstance(prompts, str):
        raise UsageError("prompts is one text; expected a list of prompts")
    encoded = []
    seen: set[str] = set()
    for index, prompt in enumerate(prompts):
        name = prompt.get("id", index) if isinstance(prompt, dict) else index
        with left_out(name, on_bad):
            record, ids = _encode(target, index, prompt, chat)
            if str(name) in seen:
                raise UsageError(f"two prompts have the id {name!r}; expected each id once")
            seen.add(str(name))
            _check_tokens(target, name, ids)
            encoded.append((record, ids))
    return encoded


def _encode(
    target: Speaker, index: int, prompt: Any, chat: bool
) -> tuple[dict[str, Any], list[int]]:
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    if not isinstance(prompt, dict):
        return {"id": index, "prompt": ""}, [int(token) for token in prompt]
    record: dict[str, Any] = {"id": index} | prompt
    text = record.get("prompt")
    if isinstance(text, list):
        return record | {"prompt": ""}, [int(token) for token in text]
    if not isinstance(text, str):
        raise UsageError(f"prompt {record['id']} has no text under 'prompt'")
    if not is_text(text):
        raise UsageError(f"prompt {record['id']} is not UTF-8 text")
    return record, encode_prompt(target, text, chat=chat)


def _check_tokens(target: Speaker, name: Any, ids: list[int]) -> None:
    config = target.config
    if not ids:
        raise UsageError(f"prompt {name} has no tokens; expected at least one")
    if len(ids) >= config.context:
        raise UsageError(
            f"prompt {name} has {len(ids)} tokens; the context of {config.context} "
            "leaves no room for a new one"
        )
    outside = [i for i in ids if not 0 <= i < config.vocab_size]
    if outside:
        raise UsageError(
            f"prompt {name} has token {outside[0]}; the vocabulary has {config.vocab_size} tokens"
        )

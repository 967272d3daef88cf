"""Writes the tables of `docs/export.md`: what llama.cpp computes of exported files.

python -m tests.infer.gguf_table                                 all of them, with `tiny`
python -m tests.infer.gguf_table --model DIR [--table MARK]      of any model with a chat template

`--table` names a pair of marks in the document; without it the table is printed alone. A dense GGUF
file as DIR is one row, the file itself.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dejax.export.gguf import export_target
from dejax.target import Target, is_gguf, load_target, read_outline
from infer.generate import generate
from infer.prompts import encode_prompts
from tests.infer.gguf_cases import (
    EQUAL,
    UNEQUAL,
    both,
    kl,
    logprobs,
    prompts,
    several,
    small_model,
)
from tests.infer.llama_cpp import ask

DOCUMENT = Path(__file__).parents[2] / "docs" / "export.md"
DTYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
CHATS, ANSWER, GREEDY = 2, 20, 64
_AS_IT_IS = "as it is"


def equal_rows(place: Path) -> Iterator[str]:
    """The largest difference of a log-probability, where there should be none."""
    for number, (case, (name, more)) in enumerate(EQUAL.items()):
        ours, theirs, _ = both(small_model(place / f"e{number}", name, more), place / "m.gguf")
        yield f"| {case} | {np.abs(ours - theirs).max():.1e} |"


def different_rows(place: Path) -> Iterator[str]:
    """What the export says, and how far the outputs are apart."""
    for number, (case, (name, more, _)) in enumerate(UNEQUAL.items()):
        ours, theirs, warnings = both(
            small_model(place / f"d{number}", name, more), place / "m.gguf"
        )
        (said,) = warnings
        same = 100 * (ours.argmax(-1) == theirs.argmax(-1)).mean()
        line = said.removeprefix("llama.cpp differs: ")
        yield f"| {case} | {line} | KL {kl(ours, theirs):.1g}, same token {same:.0f} % |"


def dtype_rows(place: Path, model: str = "tiny") -> Iterator[str]:
    """A model in every dtype, where the tokens of its own greedy answers in chats are predicted."""
    target = load_target(model)
    chats = [ids for _, ids in encode_prompts(target, prompts()[:CHATS], chat=True)]
    answers = generate(target, chats, max_new_tokens=ANSWER)
    whole = [chat + answer.tokens[:-1] for chat, answer in zip(chats, answers, strict=True)]
    first = [len(chat) - 1 for chat in chats]
    longest = max(map(len, whole))
    logits = target([ids + [0] * (longest - len(ids)) for ids in whole])
    spans = zip(logits, first, whole, strict=True)
    ours = np.concatenate([logprobs(rows[n : len(ids)]) for rows, n, ids in spans])
    for dtype, file in _files(model, place):
        if dtype in ("f32", _AS_IT_IS):
            _say_what_is_the_same(target, file, chats[0])
        pairs = enumerate(zip(whole, first, strict=True))
        found = ask(file, **{str(i): {"logprobs": ids, "from": n} for i, (ids, n) in pairs})
        theirs = np.concatenate([found[str(i)] for i in range(CHATS)])
        away = kl(ours, theirs)
        shown = f"{away:.1e}" if away >= 1e-6 else "< 1e-6"  # theirs are printed float32
        same = 100 * (ours.argmax(-1) == theirs.argmax(-1)).mean()
        yield f"| {dtype} | {file.stat().st_size:,} | {shown} | {same:.1f} % |"
        if file.is_relative_to(place):
            file.unlink()


def _say_what_is_the_same(target: Target, file: Path, prompt: list[int]) -> None:
    """Whether llama.cpp has our ids of texts, and our greedy tokens."""
    texts = several(1000)
    greedy = {"greedy": prompt, "count": GREEDY, "ends": True}
    told = ask(file, ids={"tokenize": texts}, greedy=greedy)
    ids = [target.tokenizer.encode(text) for text in texts]
    (own,) = generate(target, [prompt], max_new_tokens=GREEDY)
    print(f"{GREEDY} greedy tokens: {'same' if own.tokens == told['greedy'][0] else 'OTHERS'}")
    print(f"ids of {len(texts)} texts: {'same' if ids == told['ids'] else 'OTHERS'}", flush=True)


def _files(model: str, place: Path) -> Iterator[tuple[str, Path]]:
    """A model exported in every dtype; of a GGUF file, the file alone."""
    if is_gguf(model):
        yield _AS_IT_IS, Path(model)
        return
    for dtype in DTYPES:
        out = place / f"{dtype}.gguf"
        export_target(model, read_outline(model), dtype).write(out)
        yield dtype, out


def main() -> None:
    """Measures all of them, or one model, and puts the tables in their places."""
    parser = argparse.ArgumentParser(prog="python -m tests.infer.gguf_table")
    parser.add_argument("--model")
    parser.add_argument("--table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        if args.model is not None:
            lines = list(dtype_rows(Path(place), args.model))
            put(args.table, lines) if args.table else print("\n".join(lines))
            return
    for rows in (equal_rows, dtype_rows, different_rows):
        with tempfile.TemporaryDirectory() as place:
            put(rows.__name__.removesuffix("_rows"), list(rows(Path(place))))


def put(name: str, lines: list[str]) -> None:
    """Puts the rows of a table under its head, between its two marks in the document."""
    print("\n".join(lines), flush=True)
    text = DOCUMENT.read_text(encoding="utf-8")
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, rest = text.split(begin)
    table = "\n".join([*rest.splitlines()[:2], *lines])
    DOCUMENT.write_text(f"{before}{begin}{table}\n{end}{rest.split(end)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Writes the tables of `docs/export.md`: what llama.cpp computes of exported files.

python -m tests.infer.gguf_table
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dejax.export.gguf import export_target
from dejax.target import load_target, read_outline
from tests.infer.gguf_cases import EQUAL, UNEQUAL, both, kl, logprobs, small_model, text_of
from tests.infer.llama_cpp import ask

DOCUMENT = Path(__file__).parents[2] / "docs" / "export.md"
DTYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")


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


def dtype_rows(place: Path) -> Iterator[str]:
    """`tiny` in every dtype, on text."""
    tiny = load_target("tiny")
    ids = text_of(tiny)
    ours = logprobs(tiny([ids])[0])
    for dtype in DTYPES:
        out = place / f"{dtype}.gguf"
        export_target("tiny", read_outline("tiny"), dtype).write(out)
        theirs = ask(out, x={"logprobs": ids})["x"]
        same = 100 * (ours.argmax(-1) == theirs.argmax(-1)).mean()
        size = f"{out.stat().st_size:,}"
        away = kl(ours, theirs)
        shown = f"{away:.1e}" if away >= 1e-6 else "< 1e-6"  # theirs are printed float32
        yield f"| {dtype} | {size} | {shown} | {same:.1f} % |"


def main() -> None:
    """Measures all of them and puts the tables in their places."""
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

"""What a model card's Markdown is made of: paragraphs, tables, numbers, and text as it is."""

import math
import re
import textwrap
from collections.abc import Sequence
from typing import Any

Numbers = dict[str, Any]
Number = int | float


def prose(*sentences: str) -> str:
    """Sentences as a paragraph of lines."""
    return textwrap.fill(" ".join(sentences), 100, break_long_words=False, break_on_hyphens=False)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; all columns but the first are flush right if the rows hold numbers."""
    numeric = [all(_is_number(row[i]) for row in rows) for i in range(len(columns))]
    rules = ["---:" if flush else "---" for flush in numeric]
    lines = [columns, rules, *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _is_number(cell: Any) -> bool:
    return re.fullmatch(r"[-+]?[\d,.]*( %)?", str(cell)) is not None


def fixed(value: Number | None, digits: int = 3) -> str:
    """So many digits after the point; a dash for what there is not."""
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def percent(value: Number | None) -> str:
    """A share such as `12.3 %`; a dash for what there is not."""
    return "-" if value is None else f"{100 * value:.1f} %"


def count(value: Number) -> str:
    """A whole number such as `1,234`."""
    return f"{value:,.0f}"


def millions(value: Number) -> str:
    """Such as `1.2 M`."""
    return f"{value / 1e6:.1f} M"


def yes(holds: bool) -> str:
    """Whether something asked for holds; where not, it is to be seen."""
    return "yes" if holds else "**no**"


def settings(values: Numbers) -> str:
    """Settings by name, in code."""
    return ", ".join(f"`{key}` = `{value}`" for key, value in values.items())


def fenced(text: str) -> str:
    """`text` in a code block that no run of backticks in it can end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"

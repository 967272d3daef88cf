"""Numbers, counts and bytes as a user reads and writes them: one form of each, everywhere.

What lies in memory or on disk is counted by 1024 (`18 MiB`). By 1000 count what is moved and the
rate at which it is (`3.54 MB`, `0.4 GB/s`), and the memory of devices as it is sold (`24 GB`).
"""

import math
import re

from dejax.errors import UsageError

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def parse_bytes(text: str) -> int | None:
    """`"512MiB"`, `"1.5GB"`, `"0"` -> bytes; `"all"` -> None, no limit."""
    if text == "all":
        return None
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", text)
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise UsageError(f"{text!r} is not a size; expected for example 512MiB, 1.5GB, 0 or all")
    size = float(match[1]) * units[match[2].lower()]
    if not math.isfinite(size):
        raise UsageError(
            f"the size has {len(match[1])} digits; expected one that a machine can have"
        )
    return int(size)


def format_bytes(size: int | None) -> str:
    """Bytes that are kept: `536870912` -> `"512 MiB"`; None -> `"all"`. `parse_bytes` reads it."""
    if size is None:
        return "all"
    return _scaled(size, 1024, (" B", " KiB", " MiB", " GiB", " TiB")) if size else "0"


def format_decimal_bytes(size: int) -> str:
    """Bytes by 1000: `17301504` -> `"17.3 MB"`."""
    return _scaled(size, 1000, (" B", " kB", " MB", " GB", " TB"))


def format_count(count: int) -> str:
    """Parameters or tokens: `15706484224` -> `"15.7 B"`."""
    return _scaled(count, 1000, ("", " k", " M", " B", " T"))


def format_percent(share: float | None) -> str:
    """A share, from 0 to 1, for people to read: 0.8244 is "82.4 %"; None, where there is none, "-".

    JSON keeps shares as they are.
    """
    return "-" if share is None else f"{100 * share:.1f} %"


def format_number(value: float) -> str:
    """Four digits, large ones whole rather than with an exponent: `12345.6` -> `"12346"`."""
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e12 else f"{value:.4g}"


def _scaled(value: int, base: int, units: tuple[str, ...]) -> str:
    """`value` with three digits in the largest of `units` that it reaches."""
    power = max((p for p in range(1, len(units)) if value >= base**p), default=0)
    scaled = value / base**power
    return f"{scaled:.0f}{units[power]}" if scaled >= 999.5 else f"{scaled:.3g}{units[power]}"

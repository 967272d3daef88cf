"""What a program shows: progress on standard error, tables on standard output.

On a terminal they are drawn by rich. Elsewhere progress is a plain line every few seconds and a
table is aligned text, so that logs stay readable.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from infer.units import format_number

LINE_SECONDS = 5.0
"""Time between two plain lines of progress."""


@runtime_checkable
class Advance(Protocol):
    """What `progress` yields."""

    def advance(self, count: int | float = 1, **fields: Any) -> None:
        """Counts `count` more units as done; `fields` are shown beside the rate."""
        ...

    def aside(self, what: str = "", units: int = 0) -> contextlib.AbstractContextManager[None]:
        """Around work whose time is in no rate, such as compiling; `what` is shown meanwhile.

        `units` are done by it, and count for no rate either.
        """
        ...


@contextlib.contextmanager
def progress(
    description: str, total: int | float | None, unit: str, *, done: int | float = 0
) -> Iterator[Advance]:
    """Shows on standard error how far the work inside the `with` is.

    Args:
        description: what is being done, a word or two.
        total: units of work in all; None if unknown.
        unit: the plural of what is counted.
        done: units that an earlier run did, which count for no rate.
    """
    console = Console(file=sys.stderr)
    meter = _Meter(description, total, unit)
    meter.done = meter.untimed = done
    if sys.stderr.isatty() and not console.is_dumb_terminal and not _quiet.is_set():
        with _Bar(console, meter) as bar:
            yield bar
    else:
        lines = _Lines(meter)
        try:
            yield lines
        finally:
            lines.show()


_quiet = threading.Event()


def be_quiet() -> None:
    """Nothing more on standard error but errors: one of several processes speaks for all."""
    _quiet.set()


def say(line: str) -> None:
    """One line on standard error; above the bar if a progress is being shown."""
    if _quiet.is_set():
        return
    print(line, file=sys.stderr, flush=True)


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], note: str = ""
) -> None:
    """Prints a table on standard output: title, columns, a row a line, a note below.

    Floats are shown with four digits, None and nan as `-`; columns of numbers are flush right.
    """
    terminal = sys.stdout.isatty()
    # A file has no width: nothing may be folded or cut off there.
    console = Console(file=sys.stdout, highlight=False, width=None if terminal else 1000)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        numeric = all(isinstance(row[index], int | float | None) for row in rows)
        justify = "right" if numeric else "left"
        table.add_column(Text(column), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*[Text(_cell(value)) for value in row])
    with console.capture() as capture:
        console.print(Text(title, style="bold"))
        console.print(table)
        if note:
            console.print(Text(note))
    # Without the padding of the last column.
    print("\n".join(line.rstrip() for line in capture.get().splitlines()), end="\n\n")


def _cell(value: Any) -> str:
    if value is None or value != value:
        return "-"
    return format_number(value) if isinstance(value, float) else str(value)


class _Meter:
    """Counts units and time, and words them."""

    def __init__(self, description: str, total: int | float | None, unit: str) -> None:
        self.description, self.total, self.unit = description, total, unit
        self.done: int | float = 0
        self.untimed: int | float = 0
        self.fields: dict[str, Any] = {}
        self.start = time.monotonic()

    def add(self, count: int | float, fields: dict[str, Any]) -> None:
        self.done += count
        self.fields |= fields

    @contextlib.contextmanager
    def aside(self, units: int) -> Iterator[None]:
        """Leaves the time of the block, and the units that it does, out of the rate."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.start += time.monotonic() - began
            self.untimed += units

    def status(self) -> str:
        """Such as `120/400 steps  12.3 steps/s  22s left  loss 3.21`."""
        elapsed = time.monotonic() - self.start
        timed = self.done - self.untimed
        rate = timed / elapsed if elapsed > 0 else 0.0
        of = "" if self.total is None else f"/{self.total:.0f}"
        parts = [f"{self.done:.0f}{of} {self.unit}"]
        parts += [f"{format_number(rate)} {self.unit}/s"] if timed > 0 else []
        if self.total is not None and rate > 0 and self.done < self.total:
            parts.append(f"{_duration((self.total - self.done) / rate)} left")
        else:
            parts.append(f"after {_duration(elapsed)}")
        parts += [f"{name} {_cell(value)}" for name, value in self.fields.items()]
        return "  ".join(parts)


class _Lines:
    """Progress as a plain line every `LINE_SECONDS`, and one at the end."""

    def __init__(self, meter: _Meter) -> None:
        self.meter = meter
        self.shown_at = meter.start
        self.shown_done = meter.done

    def advance(self, count: int | float = 1, **fields: Any) -> None:
        self.meter.add(count, fields)
        if time.monotonic() - self.shown_at >= LINE_SECONDS:
            self.show()

    @contextlib.contextmanager
    def aside(self, what: str = "", units: int = 0) -> Iterator[None]:
        if what:
            say(f"{self.meter.description}: {what}")
        with self.meter.aside(units):
            yield
        self.shown_at = time.monotonic()

    def show(self) -> None:
        """Says where the work is, unless that has just been said."""
        if self.meter.done != self.shown_done:
            self.shown_at, self.shown_done = time.monotonic(), self.meter.done
            say(f"{self.meter.description}: {self.meter.status()}")


class _Bar:
    """Progress as rich's bar."""

    def __init__(self, console: Console, meter: _Meter) -> None:
        self.meter = meter
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            console=console,
        )
        self.task = self.bar.add_task(
            meter.description, total=meter.total, completed=int(meter.done), status=""
        )

    def __enter__(self) -> "_Bar":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def advance(self, count: int | float = 1, **fields: Any) -> None:
        self.meter.add(count, fields)
        self.bar.update(self.task, completed=self.meter.done, status=self.meter.status())

    @contextlib.contextmanager
    def aside(self, what: str = "", units: int = 0) -> Iterator[None]:
        if what:
            self.bar.update(self.task, status=what)
        with self.meter.aside(units):
            yield


def _duration(seconds: float) -> str:
    """`3725` -> `"1h02m"`, `75` -> `"1m15s"`, `8` -> `"8s"`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"

"""Where a run's metrics go: JSON lines, and TensorBoard beside them; written by one process."""

import json
from pathlib import Path
from types import TracebackType

import jax

Metrics = dict[str, int | float]

FILE = "metrics.jsonl"


class MetricsFile:
    """`workdir`/metrics.jsonl and TensorBoard's event files beside it.

    What a run wrote after the step that it goes on from is taken away: every step stands there
    once. In all but the first process, and without a folder, nothing is written.
    """

    def __init__(self, workdir: Path | None, *, first: int):
        self._file = None
        if workdir is None or jax.process_index() != 0:
            return
        workdir.mkdir(parents=True, exist_ok=True)
        path = workdir / FILE
        kept = [line for line in _lines(path) if _step(line) <= first]
        partial = path.with_name(FILE + ".partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(path)
        self._file = path.open("a", encoding="utf-8")
        from tensorboardX import SummaryWriter  # its import sets an environment variable

        self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=first + 1)

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._board.close()

    def write(self, row: Metrics) -> None:
        """Appends one row, which has a `step`."""
        if self._file is None:
            return
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for name, value in row.items():
            if name != "step":
                self._board.add_scalar(name, value, int(row["step"]))


def _lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    return [line for line in path.read_text(encoding="utf-8").splitlines(True) if line.strip()]


def _step(line: str) -> int | float:
    """The step of a line; a half-written one, of a killed run, is beyond every step."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")

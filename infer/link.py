"""The link that experts travel over: the machine's own, or one of a stated rate and latency.

A simulated link makes a laptop behave like an accelerator whose experts come over PCIe or from
storage (the offloaded settings of DraftExpert, arXiv 2607.24434): every transfer is made for real,
then its end is held back until the stated link would have finished it. `infer.residency` owns one
`Pacer`, which its transfer threads share.
"""

import dataclasses
import math
import threading
import time
from collections.abc import Callable

from dejax.errors import UsageError

_FORMS = (
    "expected real, disk, sim:GBPS or sim:GBPS,LATENCY_US "
    "(10^9 bytes a second > 0; microseconds a transfer >= 0), for example sim:16,10"
)


@dataclasses.dataclass(frozen=True)
class Link:
    """Attributes:
    bytes_per_second: rate of a simulated link; None means the real one, not held back.
    latency_seconds: added to every transfer of a simulated link.
    cold: whether every read of the store comes from the disk, not from the page cache: the Flash
      setting of the paper. What the host cache holds is not read.
    """

    bytes_per_second: float | None = None
    latency_seconds: float = 0.0
    cold: bool = False

    def __post_init__(self) -> None:
        rate, latency = self.bytes_per_second, self.latency_seconds
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise UsageError(f"link: {rate} bytes a second; {_FORMS}")
        if not (math.isfinite(latency) and latency >= 0):
            raise UsageError(f"link: latency of {latency} seconds; {_FORMS}")
        if rate is None and latency:
            raise UsageError(f"link: the real link takes no latency; {_FORMS}")

    @property
    def simulated(self) -> bool:
        """Whether times over this link are made, not measured; every output must say so."""
        return self.bytes_per_second is not None

    def seconds(self, size: int) -> float:
        """Least seconds that a transfer of `size` bytes takes; 0 for the real link."""
        if self.bytes_per_second is None:
            return 0.0
        return self.latency_seconds + size / self.bytes_per_second

    def describe(self) -> str:
        """One phrase for tables and logs."""
        if self.cold:
            return "disk, page cache dropped"
        if self.bytes_per_second is None:
            return "real link"
        rate = f"simulated link, {self.bytes_per_second / 1e9:g} GB/s"
        if not self.latency_seconds:
            return rate
        return f"{rate}, {self.latency_seconds * 1e6:g} us a transfer"


def parse_link(text: str) -> Link:
    """Reads `real`, `disk`, `sim:GBPS` or `sim:GBPS,LATENCY_US`.

    Raises:
        UsageError: any other text, a rate that is not > 0, a latency that is not >= 0.
    """
    if text in ("real", "disk"):
        return Link(cold=text == "disk")
    scheme, _, numbers = text.partition(":")
    rate, comma, latency = numbers.partition(",")
    try:
        if scheme != "sim":
            raise ValueError(scheme)
        return Link(float(rate) * 1e9, float(latency) / 1e6 if comma else 0.0)
    except ValueError as error:  # UsageError is one
        raise UsageError(f"link {text!r}: {_FORMS}") from error


class Pacer:
    """Books transfers one after another on a link, and waits for the end of a simulated one.

    Ends are computed on a cumulative clock: a sleep that comes back late does not delay the next
    transfer, so the mean rate over many small transfers is the stated one. Thread-safe: who comes
    first has the link first.
    """

    def __init__(
        self,
        link: Link,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._link = link
        self._clock = clock
        self._sleep = sleep
        self._free = -math.inf
        self._lock = threading.Lock()
        self._finished = 0

    def finish(self, size: int, *, requested: float) -> tuple[float, float, int]:
        """Call when `size` bytes have arrived; returns the transfer's start, end and number.

        `requested`, start and end are seconds of `clock`. The start is the later of the request
        and the end of the transfer of the number before. On a simulated link this sleeps until the
        end, which is never before the real one.
        """
        with self._lock:
            start = max(requested, self._free)
            now = self._clock()
            end = self._free = max(now, start + self._link.seconds(size))
            number = self._finished = self._finished + 1
        while now < end:
            self._sleep(end - now)
            now = self._clock()
        return start, end, number

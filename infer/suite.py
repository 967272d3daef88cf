"""Decoding the same prompts in several modes, and checking each against autoregressive decoding.

The demo's middle part: which runs there are, what they measure, and the rows that tables and plots
are made of. Every number of a row comes from its traces.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dejax.draft.expert import Draft
from dejax.errors import UsageError
from dejax.spec.control import ControlConfig
from dejax.spec.sampling import SamplingConfig
from dejax.target import Target
from infer.console import progress
from infer.decode import DecodeOptions, Mode
from infer.decoder import Decoder, Offload, expert_store
from infer.divergence import judge
from infer.link import Link, parse_link
from infer.report import distinct_ngrams, rounds_of, stats
from infer.resident import ResidentDecoder
from infer.staging import device_form
from infer.trace import Round

LOAD_TO_COMPUTE = 3.0
"""How much longer than its compute an autoregressive step's loads take on the simulated link."""


@dataclass(frozen=True)
class Run:
    """One way to decode all prompts.

    Attributes:
      name: what tables call it.
      cache: share of the target's experts that the device cache holds (0 to 1).
    """

    name: str
    mode: Mode
    r: int = 1
    draft_length: int = 4
    truncate: bool = False
    prefetch: bool = False
    tau: float = 0.2
    controller: str = "consumer"
    cache: float = 0.0
    temperature: float = 0.0

    def options(self, max_new_tokens: int, *, stop_at_eos: bool) -> DecodeOptions:
        """The decode options of this run."""
        control = ControlConfig(
            draft_length=self.draft_length,
            truncate=self.truncate,
            tau=self.tau,
            controller=self.controller,  # pyright: ignore[reportArgumentType]
        )
        return DecodeOptions(
            mode=self.mode,
            r=self.r,
            max_new_tokens=max_new_tokens,
            sampling=SamplingConfig(temperature=self.temperature),
            control=control,
            prefetch=self.prefetch,
            stop_at_eos=stop_at_eos,
        )

    @property
    def reference(self) -> "Run":
        """The autoregressive run that this one must agree with: same rule, no cache."""
        return Run("AR", "ar", temperature=self.temperature)


def standard_runs(top_k: int, *, every_seeded: bool) -> list[Run]:
    """The demo's runs: the paper's baselines and steps (Tables 2 to 4), greedy and seeded."""
    six: dict[str, Any] = dict(draft_length=6)
    full: dict[str, Any] = six | dict(truncate=True, prefetch=True)
    greedy = [Run("AR", "ar")]
    greedy += [Run(f"top-{r}, K=4", "top-r", r=r) for r in (1, 2, 3) if r <= top_k]
    if top_k >= 3:  # what prefetching alone gives
        greedy.append(Run("top-3, K=4, prefetch", "top-r", r=3, prefetch=True))
    greedy += [
        Run("draft-expert, K=4", "draft-expert"),
        Run("draft-expert, K=6, truncated", "draft-expert", truncate=True, **six),
        Run("draft-expert, K=6, truncated, prefetch", "draft-expert", **full),
        Run("draft-expert, K=6, producer, prefetch", "draft-expert", controller="producer", **full),
        Run("draft-expert, K=6, prefetch", "draft-expert", prefetch=True, **six),
        Run("AR, half cached", "ar", cache=0.5),
        Run("draft-expert, K=6, half cached", "draft-expert", cache=0.5, prefetch=True, **six),
    ]
    three = ("AR", "top-1, K=4", "draft-expert, K=6, prefetch")
    seeded = [run for run in greedy if run.name in three or every_seeded]
    return greedy + [replace(run, temperature=0.8) for run in seeded]


@dataclass(frozen=True)
class Suite:
    """A target with its prompts (ids and token ids), and the link its experts cross."""

    target: Target
    draft: Draft
    prompts: Sequence[tuple[str, list[int]]]
    max_new_tokens: int
    link: Link
    stop_at_eos: bool = False

    @property
    def capacity(self) -> int:
        """Committed tokens that the longest prompt needs."""
        longest = max(len(ids) for _, ids in self.prompts) + self.max_new_tokens
        if longest > self.target.config.context:
            raise UsageError(
                f"prompts with {self.max_new_tokens} new tokens need {longest}, the context has "
                f"{self.target.config.context}"
            )
        return longest


def _decoder(suite: Suite, store: Any, *, drafts: bool, cache: float) -> Decoder:
    """A decoder whose device cache holds a share of the experts."""
    size = device_form(store, suite.target.compute_dtype, None).bytes
    offload = Offload(device_cache=int(cache * len(store.pairs)) * size, link=suite.link)
    draft = suite.draft if drafts else None
    return Decoder(suite.target, draft=draft, offload=offload, capacity=suite.capacity, store=store)


@dataclass(frozen=True)
class Result:
    """One run's traces (one a prompt) and its row in the demo's JSON form."""

    run: Run
    traces: tuple[tuple[Round, ...], ...]
    row: dict[str, Any]


def run_all(suite: Suite, runs: Sequence[Run]) -> list[Result]:
    """Decodes all prompts in every run, and holds each against its autoregressive reference.

    Runs of one cache size share a decoder, so that each step compiles once.
    """
    store = expert_store(suite.target, Offload(link=suite.link))
    results: dict[int, list[tuple[Round, ...]]] = {}
    total = len(runs) * len(suite.prompts)
    with progress("decode", total, "prompts") as bar:
        for drafts, cache in sorted({(r.mode == "draft-expert", r.cache) for r in runs}):
            with _decoder(suite, store, drafts=drafts, cache=cache) as decoder:
                for index, run in enumerate(runs):
                    if (run.mode == "draft-expert", run.cache) != (drafts, cache):
                        continue
                    options = run.options(suite.max_new_tokens, stop_at_eos=suite.stop_at_eos)
                    results[index] = []
                    with bar.aside():
                        decoder.warm_up(options)
                    for _, ids in suite.prompts:
                        results[index].append(decoder.run(ids, options))
                        bar.advance(1, run=run.name)
    references = {run: index for index, run in enumerate(runs) if run == run.reference}
    return [
        Result(
            run, tuple(results[i]), _row(suite, run, results[i], results[references[run.reference]])
        )
        for i, run in enumerate(runs)
    ]


def _tokens(trace: Sequence[Round]) -> list[int]:
    return [token for record in trace for token in record.emitted]


def _row(
    suite: Suite,
    run: Run,
    traces: Sequence[tuple[Round, ...]],
    references: Sequence[tuple[Round, ...]],
) -> dict[str, Any]:
    """One run's options, agreement with the reference, and statistics."""
    sampling = run.options(1, stop_at_eos=False).sampling
    divergences = []
    for (name, ids), trace, reference in zip(suite.prompts, traces, references, strict=True):
        found = judge(suite.target, ids, _tokens(reference), _tokens(trace), sampling, id=name)
        if found is not None:
            divergences.append(asdict(found))
    joined = [record for trace in traces for record in trace]
    row_stats = stats(joined)
    row_stats["distinct_4grams"] = distinct_ngrams([_tokens(trace) for trace in traces])
    options = {k: v for k, v in asdict(run).items() if k not in ("name", "mode")}
    return {
        "name": run.name,
        "mode": run.mode,
        "options": options | {"link": suite.link.describe(), "simulated": suite.link.simulated},
        "identical_to_ar": not divergences,
        "divergences": divergences,
        "stats": row_stats,
        "prompts": [
            {"id": name, "tokens": _tokens(trace), "stats": stats(trace)}
            for (name, _), trace in zip(suite.prompts, traces, strict=True)
        ],
    }


def choose_link(target: Target, prompt: list[int], tokens: int = 24) -> Link:
    """A simulated link on which an AR step's loads take `LOAD_TO_COMPUTE` times its compute.

    The compute is measured here, with every expert on the device.
    """
    offload = Offload(device_cache=None)
    store = expert_store(target, offload)
    options = DecodeOptions(mode="ar", max_new_tokens=tokens, stop_at_eos=False)
    with Decoder(target, offload=offload, capacity=len(prompt) + tokens, store=store) as decoder:
        decoder.run(prompt, options)  # fills the device cache
        rounds = rounds_of(decoder.run(prompt, options))
    compute = statistics.median(record.total_seconds for record in rounds)
    config = target.config
    moved = config.routes_per_token * store.bytes_per_expert
    rate = moved / (LOAD_TO_COMPUTE * compute) / 1e9
    return parse_link(f"sim:{rate:.2g}")


def compare_resident(target: Target, prompt: list[int], *, tokens: int, repeats: int = 3) -> dict:
    """AR through the host loop against one jitted resident step, alternating; median tokens/s.

    Both decode greedily with every expert on the device, end tokens ignored.
    """
    if target.routed is None:
        return {}
    offload = Offload(device_cache=None)
    options = DecodeOptions(mode="ar", max_new_tokens=tokens, stop_at_eos=False)
    capacity = len(prompt) + tokens
    resident = ResidentDecoder(target, capacity)
    rates: dict[str, list[float]] = {"host": [], "resident": []}
    shares = []
    with Decoder(target, offload=offload, capacity=capacity) as decoder:
        decoder.run(prompt, options)
        expected = resident.decode(prompt, tokens)[0]
        for _ in range(repeats):
            trace = decoder.run(prompt, options)
            found = stats(trace)
            rates["host"].append(found["decode_tps"])
            shares.append(found["host_share"])
            emitted, seconds = resident.decode(prompt, tokens)
            rates["resident"].append((tokens - 1) / seconds)
            assert emitted == expected
    host, jitted = (statistics.median(rates[name]) for name in ("host", "resident"))
    return {
        "host_loop_tps": host,
        "resident_step_tps": jitted,
        "ratio": host / jitted,
        "host_share": statistics.median(shares),
        "identical": _tokens(trace) == expected,
    }

"""Decoding the same prompts in several modes, and checking each against autoregressive decoding.

The middle part of the demo, and of `dejax bench decode`: which runs there are, what they measure,
and the rows that tables and plots are made of. Every number of a row comes from its traces.
"""

import statistics
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from dejax.ckpt.expert_store import ExpertStore
from dejax.draft.expert import Draft
from dejax.draft.predictor import ExpertPredictor
from dejax.errors import UsageError
from dejax.spec.control import ControlConfig
from dejax.spec.ecospec import EcoConfig
from dejax.spec.sampling import SamplingConfig
from dejax.spec.tree_options import parse_tree
from dejax.target import Target
from infer.console import progress
from infer.decode_options import DRAFT_MODES, DecodeOptions, Mode
from infer.decoder import Decoder, Offload, expert_store
from infer.divergence import judge
from infer.engines import EngineName
from infer.link import Link, parse_link
from infer.oracle import TrueRoutes
from infer.prefetch_oracle import Required, required, told_run
from infer.report import distinct_ngrams, rounds_of, stats
from infer.resident import ResidentDecoder, load_resident
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
      engine: how passes run; with "resident", which needs a cache of 1, nothing is ever loaded.
      look_ahead: whether target passes ask for what the next layer will probably use.
      tree: how drafts branch, by name (`dejax.spec.tree_options`).
      expert_cost, predictor: of mode ecospec (`dejax.spec.ecospec`).
      draft_resident: as in `infer.decode_options.DecodeOptions`.
      governor: whether drafting is switched off while it does not pay.
      oracle: whether trees are chosen by the routes that they really will have (`infer.oracle`).
        Not a real system.
      prefetch_oracle: prefetch what the verification will need, not what is predicted
        (`infer.prefetch_oracle`). Not a real system.
    """

    name: str
    mode: Mode
    r: int = 1
    draft_length: int = 4
    truncate: bool = False
    prefetch: bool = False
    tau: float = 0.2
    controller: str = "consumer"
    budget: int | str | None = None
    cache: float = 0.0
    temperature: float = 0.0
    look_ahead: bool = False
    tree: str = "chain"
    expert_cost: float = 0.3
    predictor: str = "router"
    draft_resident: float | None = None
    governor: bool = False
    engine: EngineName = "host"
    oracle: bool = False
    prefetch_oracle: bool = False

    @property
    def place(self) -> "Place":
        """What a decoder is made for."""
        drafts = self.mode in DRAFT_MODES
        return Place(drafts, self.cache, self.look_ahead, self.engine, self.prefetch_oracle)

    def options(self, max_new_tokens: int, *, stop_at_eos: bool) -> DecodeOptions:
        """The decode options of this run."""
        control = ControlConfig(
            draft_length=self.draft_length,
            truncate=self.truncate,
            tau=self.tau,
            controller=self.controller,  # pyright: ignore[reportArgumentType]
            budget=self.budget,  # pyright: ignore[reportArgumentType]
        )
        return DecodeOptions(
            mode=self.mode,
            r=self.r,
            max_new_tokens=max_new_tokens,
            sampling=SamplingConfig(temperature=self.temperature),
            control=control,
            prefetch=self.prefetch,
            tree=parse_tree(self.tree),
            eco=EcoConfig(self.expert_cost, self.predictor),  # pyright: ignore[reportArgumentType]
            draft_resident=self.draft_resident,
            stop_at_eos=stop_at_eos,
            governor=self.governor,
        )

    @property
    def is_reference(self) -> bool:
        """Whether runs of the same temperature must agree with it: plain decoding, no cache."""
        return self.mode == "ar" and not self.cache and not self.look_ahead


class Place(NamedTuple):
    """What a decoder is made for: draft experts or not, the share of all experts that it caches,
    whether it looks ahead, its engine, and whether there is room to prefetch every expert.
    """

    drafts: bool = False
    cache: float = 0.0
    look_ahead: bool = False
    engine: EngineName = "host"
    prefetches_all: bool = False


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
    """A target with its prompts (ids and token ids), and the link its experts cross.

    `kinds`: what kind of text each prompt asks for, where that is known. `predictor`: that of runs
    whose `predictor` is "trained".
    """

    target: Target
    draft: Draft | None
    prompts: Sequence[tuple[str, list[int]]]
    max_new_tokens: int
    link: Link
    stop_at_eos: bool = False
    kinds: Sequence[str] = ()
    predictor: ExpertPredictor | None = None

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

    def offload(self, device_cache: int | None, **options: Any) -> Offload:
        """Where the suite's experts are; what a host cache holds would not come from the disk."""
        host_cache = 0 if self.link.cold else None
        return Offload(device_cache, host_cache=host_cache, link=self.link, **options)


def _decoder(suite: Suite, store: ExpertStore, place: Place) -> Decoder:
    """A decoder whose device cache holds a share of the experts."""
    size = device_form(store, suite.target.compute_dtype, None).bytes
    offload = suite.offload(
        None if place.cache == 1 else int(place.cache * len(store.pairs)) * size,
        look_ahead=place.look_ahead,
        engine=place.engine,
        prefetch=len(store.pairs) * size if place.prefetches_all else None,
    )
    known: Any = dict(draft=suite.draft, predictor=suite.predictor) if place.drafts else {}
    return Decoder(suite.target, **known, offload=offload, capacity=suite.capacity, store=store)


@dataclass(frozen=True)
class Result:
    """One run: its traces (one a prompt) of every repeat, and its row in the demo's JSON form.

    `oracle_passes`: passes of an oracle that fell into the repeats.
    """

    run: Run
    repeats: tuple[tuple[tuple[Round, ...], ...], ...]
    row: dict[str, Any]
    oracle_passes: int = 0

    @property
    def traces(self) -> tuple[tuple[Round, ...], ...]:
        """Of the first repeat."""
        return self.repeats[0]

    def rates(self, prompts: Collection[int] | None = None) -> list[float]:
        """Tokens a second of every repeat, prefill excluded; of some prompts, or of all."""
        return [
            stats(
                [r for i, trace in enumerate(traces) if not prompts or i in prompts for r in trace]
            )["decode_tps"]
            for traces in self.repeats
        ]


def run_all(
    suite: Suite, runs: Sequence[Run], *, repeats: int = 1, afresh: bool = False
) -> list[Result]:
    """Decodes all prompts in every run, and holds each against its autoregressive reference.

    All runs are made in turn, then all of them again: what else the machine does falls on all of
    them. Runs of one place share a decoder. `afresh`: a repeat knows nothing of those before it.
    """
    store = expert_store(suite.target, Offload(link=suite.link))
    results: list[list[tuple[tuple[Round, ...], ...]]] = [[] for _ in runs]
    passes = [0] * len(runs)
    told: dict[tuple[int, int], Required] = {}
    total = len(runs) * len(suite.prompts) * repeats
    with ExitStack() as stack, progress("decode", total, "prompts") as bar:
        decoders = {
            place: stack.enter_context(_decoder(suite, store, place))
            for place in sorted({run.place for run in runs})
        }
        oracle = _oracle(suite, store, decoders) if any(run.oracle for run in runs) else None
        for repeat in range(repeats):
            for decoder in decoders.values() if afresh else ():
                decoder.forget()
            for index, run in enumerate(runs):
                options = run.options(suite.max_new_tokens, stop_at_eos=suite.stop_at_eos)
                decoder = decoders[run.place]
                foresee = oracle if run.oracle else None
                if not repeat:
                    with bar.aside("compiling"):
                        decoder.warm_up(options)
                if foresee is not None and not repeat:
                    with bar.aside("true routes"):
                        for _, ids in suite.prompts:
                            decoder.run(ids, options, foresee=foresee)
                    decoder.forget()
                before = 0 if foresee is None else foresee.passes
                traces = []
                for number, (_, ids) in enumerate(suite.prompts):
                    if run.prefetch_oracle:
                        if not repeat:  # a run that is not counted
                            told[index, number] = required(decoder.run(ids, options))
                        traces.append(told_run(decoder, ids, options, told[index, number]))
                    else:
                        traces.append(decoder.run(ids, options, foresee=foresee))
                    bar.advance(1, run=run.name)
                results[index].append(tuple(traces))
                passes[index] += 0 if foresee is None else foresee.passes - before
    references = {run.temperature: index for index, run in enumerate(runs) if run.is_reference}
    return [
        Result(
            run, tuple(found), _row(suite, run, found, results[references[run.temperature]][0]), own
        )
        for run, found, own in zip(runs, results, passes, strict=True)
    ]


def _oracle(suite: Suite, store: ExpertStore, decoders: Mapping[Place, Decoder]) -> TrueRoutes:
    """True routes, by the experts of a resident decoder if there is one."""
    held = (d.residency for d in decoders.values() if d.offload.engine == "resident")
    experts = next(held, None) or load_resident(suite.target, store=store)
    return TrueRoutes(suite.target, experts, suite.capacity)


def _tokens(trace: Sequence[Round]) -> list[int]:
    return [token for record in trace for token in record.emitted]


def _row(
    suite: Suite,
    run: Run,
    repeats: Sequence[tuple[tuple[Round, ...], ...]],
    references: Sequence[tuple[Round, ...]],
) -> dict[str, Any]:
    """One run's options, agreement of every repeat with the reference, and statistics."""
    sampling = run.options(1, stop_at_eos=False).sampling
    divergences = []
    for traces in repeats:
        for (name, ids), trace, reference in zip(suite.prompts, traces, references, strict=True):
            found = judge(suite.target, ids, _tokens(reference), _tokens(trace), sampling, id=name)
            if found is not None:
                divergences.append(asdict(found))
    traces = repeats[0]
    joined = [record for traces in repeats for trace in traces for record in trace]
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


def choose_link(
    target: Target,
    prompt: list[int],
    tokens: int = 24,
    *,
    loads: float = LOAD_TO_COMPUTE,
    cache: float = 0.0,
) -> Link:
    """A simulated link on which an AR step's loads take `loads` times its compute.

    The compute is measured here, with every expert on the device; and what is moved, if a `cache`
    holds a share of the experts.
    """
    store = expert_store(target, Offload(device_cache=None))
    options = DecodeOptions(mode="ar", max_new_tokens=tokens, stop_at_eos=False)

    def second_run(share: float) -> list[Round]:
        suite = Suite(target, None, [("", prompt)], tokens, parse_link("real"))
        with _decoder(suite, store, Place(cache=share)) as decoder:
            decoder.run(prompt, options)  # fills the device cache
            return rounds_of(decoder.run(prompt, options))

    compute = statistics.median(record.total_seconds for record in second_run(1.0))
    moved = target.config.routes_per_token * store.bytes_per_expert
    if cache:
        rounds = second_run(cache)
        moved = sum(load.bytes for record in rounds for load in record.loads) / len(rounds)
    rate = moved / (loads * compute) / 1e9
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

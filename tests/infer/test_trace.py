"""Traces: what every record must satisfy, and the file they are written to."""

import dataclasses
import itertools
import json

import jax
import pytest

from dejax.errors import FailedError, UsageError
from dejax.spec.control import ControlConfig
from dejax.spec.sampling import SamplingConfig
from infer.decode import decode, make_drafter
from infer.decode_options import PATH_MODES, DecodeOptions
from infer.decoder import Decoder, Offload
from infer.prefetch import LoadEvent
from infer.report import stats
from infer.trace import SCHEMA, Round, from_record, read_trace, to_record, write_trace
from tests.infer.random_target import draft_of, random_prompt

PROMPT = random_prompt(40)
CONTROLS = {
    "fixed": ControlConfig(draft_length=4, truncate=False),
    "budget": ControlConfig(draft_length=6, tau=0.9, budget=2),
    "cost": ControlConfig(draft_length=6, controller="cost"),
    "random": ControlConfig(draft_length=6, controller="random", keep=0.6),
    "producer": ControlConfig(draft_length=6, tau=0.9, budget=1, controller="producer"),
}
RUNS = [
    dict(mode="ar"),
    dict(mode="ar", cache=None),
    dict(mode="top-r", r=1, control="fixed", prefetch=False),
    dict(mode="top-r", r=2, control="budget"),
    dict(mode="draft-expert", r=1, control="budget", cache=6),
    dict(mode="draft-expert", r=1, control="producer", cache=None),
    dict(mode="draft-expert", r=3, control="fixed", cache=None, prefetch=False),
    dict(mode="draft-expert", r=1, control="fixed", temperature=1.0),
    dict(mode="top-r", r=1, control="cost", cache=6),
    dict(mode="draft-expert", r=1, control="random"),
    dict(mode="n-gram", control="fixed"),
]


def run(target, *, mode, r=1, control="fixed", prefetch=True, cache: int | None = 0, **sampling):
    """The trace of one prompt; `cache` is in experts."""
    some = target.routed[1][0]
    offload = Offload(device_cache=None if cache is None else cache * some.nbytes)
    options = DecodeOptions(
        mode=mode,
        r=r,
        max_new_tokens=20,
        control=CONTROLS[control],
        prefetch=prefetch,
        sampling=SamplingConfig(**sampling),
    )
    draft = draft_of(target) if mode == "draft-expert" else None
    with jax.enable_x64(True), Decoder(target, draft=draft, offload=offload) as decoder:
        drafter = make_drafter(decoder.engine, options)
        return tuple(decode(decoder.engine, PROMPT, options, drafter=drafter))


@pytest.mark.parametrize("settings", RUNS, ids=lambda run: "-".join(map(str, run.values())))
def test_every_record_adds_up(target, settings):
    trace = run(target, **settings)
    config = target.config
    layers, k, r = len(config.moe_layers), config.moe.top_k, settings.get("r", 1)
    prefill, *rounds = trace
    assert prefill.kind == "prefill" and prefill.committed == len(PROMPT)
    assert len(prefill.emitted) == 1 and not prefill.drafted and not prefill.prefetched
    committed = len(PROMPT) + 1
    for record in rounds:
        assert record.kind == "round" and record.committed == committed
        committed += len(record.emitted)
        drafted = len(record.drafted)
        assert record.parents == tuple(range(drafted))
        assert len(record.confidences) == (0 if settings["mode"] == "n-gram" else drafted)
        assert all(0 < confidence <= 1 for confidence in record.confidences)
        # Tokens: what was accepted and one more, unless the sequence ended in between.
        assert record.accepted <= drafted
        assert (
            record.emitted[: record.accepted]
            == record.drafted[: len(record.emitted)][: record.accepted]
        )
        if record.finish_reason is None:
            assert len(record.emitted) == record.accepted + 1
        assert 1 <= len(record.emitted) <= record.accepted + 1
        # Experts: rows, their union, and what the drafter asked for.
        assert len(record.rows_routes) == drafted + 1
        assert all(len(row) == k * layers for row in record.rows_routes)
        assert record.required == frozenset().union(*record.rows_routes)
        assert record.resident <= record.required
        # A pass over the pending token and one over each drafted token; the last may go without
        # one, and a dropped token may have had one.
        assert len(record.draft_routes) == record.draft_passes
        if settings["mode"] == "n-gram":
            assert record.draft_passes == 0
        else:
            assert drafted <= record.draft_passes <= drafted + 2
        predicted = frozenset().union(*record.draft_routes)
        assert record.draft_used <= predicted and record.prefetched <= predicted
        assert len(record.draft_used) <= r * layers * record.draft_passes
        assert len(record.top1_gates) == layers
        assert 0 <= record.draft_seconds + record.target_seconds <= record.total_seconds
        assert record.device_seconds + record.load_seconds <= record.total_seconds
    assert [record.finish_reason for record in trace[:-1]] == [None] * len(rounds)
    assert trace[-1].finish_reason is not None
    emitted = sum(len(record.emitted) for record in trace)
    lost = rounds[-1].accepted + 1 - len(rounds[-1].emitted)
    assert emitted == 1 + sum(record.accepted for record in rounds) + len(rounds) - lost
    check_loads(target, trace, settings)


def check_loads(target, trace, settings):
    """Transfers: sizes, order, and who must have asked for what."""
    loads = [load for record in trace for load in record.loads]
    size = target.routed[1][0].nbytes
    assert loads and all(load.bytes == size for load in loads)
    assert all(a.end <= b.start <= b.end for a, b in itertools.pairwise(loads))
    assert all(load.stall >= 0 for load in loads)
    summary = stats(trace)
    totals = {
        kind: summary["loads"][kind]["count"] + summary["prefill_loads"][kind]["count"]
        for kind in summary["loads"]
    }
    assert sum(totals.values()) == len(loads)
    for kinds in (summary["loads"], summary["prefill_loads"]):
        assert all(entry["bytes"] == entry["count"] * size for entry in kinds.values())
    pairs = [(load.layer, load.expert) for load in loads]
    if settings.get("cache", 0) is None:
        assert len(set(pairs)) == len(pairs), "kept for ever, and loaded twice"
    prefetching = settings["mode"] in PATH_MODES and settings.get("prefetch", True)
    started = set().union(*(record.prefetched for record in trace))
    prefetches = {(load.layer, load.expert) for load in loads if load.kind == "prefetch"}
    assert prefetches <= started
    if settings.get("cache", 0) == 0:  # a cache of everything is full after the prompt
        assert bool(started) == prefetching
    if settings.get("cache", 0) == 0 and not prefetching:
        for record in trace:
            by_kind = {"draft": set(), "demand": set()}
            for load in record.loads:
                by_kind[load.kind].add((load.layer, load.expert))
            assert by_kind["draft"] == record.draft_used
            assert by_kind["demand"] == record.required - record.draft_used
            assert len(record.loads) == len(record.draft_used | record.required)


# Files.


def test_records_survive_json(target):
    for settings in RUNS[3:5]:
        for record in run(target, **settings):
            again = from_record(json.loads(json.dumps(to_record(record), allow_nan=False)))
            assert again == record


def test_a_record_has_every_field():
    load = LoadEvent("draft", 1, 2, 3, 0.5, 1.5, 0.25, True)
    record = Round(
        kind="round",
        committed=7,
        drafted=(1, 2),
        parents=(0, 1),
        confidences=(0.5, 0.25),
        draft_passes=2,
        draft_routes=(frozenset({(2, 1), (1, 3)}), frozenset()),
        draft_used=frozenset({(1, 3)}),
        predicted=(frozenset({(1, 1), (2, 0)}), frozenset({(2, 3)})),
        required=frozenset({(2, 1), (1, 2)}),
        rows_routes=(frozenset({(2, 1)}), frozenset({(1, 2)}), frozenset()),
        resident=frozenset({(2, 1)}),
        prefetched=frozenset({(2, 0)}),
        accepted=1,
        emitted=(1, 9),
        finish_reason="length",
        loads=(load,),
        top1_gates=(0.5,),
        began=7.5,
        draft_seconds=1.0,
        target_seconds=2.0,
        total_seconds=3.5,
        device_seconds=0.5,
        load_seconds=0.25,
        control_seconds=0.125,
        governed=True,
        rescued=3,
    )
    unset = [
        f.name for f in dataclasses.fields(Round) if getattr(record, f.name) in ((), 0, None, "")
    ]
    assert unset == []
    plain = to_record(record)
    assert plain["draft_routes"] == [[[1, 3], [2, 1]], []] and plain["loads"][0]["kind"] == "draft"
    assert from_record(json.loads(json.dumps(plain))) == record


def test_a_file_holds_a_header_and_the_records_of_each_prompt(tmp_path, target):
    traces = {"a": run(target, mode="ar"), "ü b": run(target, mode="top-r", control="budget")}
    header = {"model": "random", "mode": "top-r"}
    path = tmp_path / "trace.jsonl"
    write_trace(path, header, traces)
    assert [file.name for file in tmp_path.iterdir()] == ["trace.jsonl"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {"schema": SCHEMA, **header}
    assert [line["id"] for line in lines[1:]] == ["a"] * 20 + ["ü b"] * len(traces["ü b"])
    again_header, again = read_trace(path)
    assert again_header == lines[0]
    assert {name: tuple(rounds) for name, rounds in again.items()} == traces
    assert stats(again["ü b"]) == stats(traces["ü b"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not readable as a trace"),
        ("{", "not readable as a trace"),
        ("[1]", f"not a trace of schema {SCHEMA}"),
        ('{"model": "x"}', f"not a trace of schema {SCHEMA}"),
        ('{"schema": "dejax-trace/2"}', f"not a trace of schema {SCHEMA}"),
        (f'{{"schema": "{SCHEMA}"}}\n[]', "line 2 is no record"),
        (f'{{"schema": "{SCHEMA}"}}\n{{"kind": "round", "committed": 1}}', "line 2 is no record"),
        (f'{{"schema": "{SCHEMA}"}}\n{{"id": "a", "kind": "round"}}', "line 2 is no record"),
        (f'{{"schema": "{SCHEMA}"}}\n{{"id": "a", "knd": "round"}}', "line 2 is no record"),
    ],
)
def test_other_files_are_refused(tmp_path, text, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_trace(path)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(UsageError, match="nowhere: not readable as a trace"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(FailedError, match="cannot be written"):
        (tmp_path / "file").write_text("x")
        write_trace(tmp_path / "file" / "trace", {}, {})

"""The model card: its numbers against plain computations, and the program on a tiny target."""

import copy
import dataclasses
import gzip
import json
import re
import shutil
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.errors import UsageError
from dejax.target import load_target
from tests.families.random_folder import raw_config, write_folder
from train import card_measures, card_text, data, model_card, trigram
from train.card_run import Run, config_differences, describe_run, first_run, read_run
from train.checkpoints import checkpointer
from train.config_files import to_json
from train.data import Phase
from train.evaluate import teacher_forced
from train.loop import LoopConfig
from train.optimizer import OptimizerConfig
from train.pretrain import PretrainConfig
from train.teacher import as_teacher

WORDS = "river stone lamp orbit quiet seven maple copper winter signal garden letter".split()
RAW = raw_config(
    "no-yarn-all-moe",
    vocab_size=300,
    max_position_embeddings=1024,
    num_hidden_layers=2,
    num_experts_per_tok=2,
)
CONFIG = PretrainConfig(
    model=RAW,
    phases=(Phase(0, 16, 4), Phase(30, 32, 2)),
    optimizer=OptimizerConfig(),
    loop=LoopConfig(steps=40, log_every=10),
)
SEQ_LEN, ROWS, BATCH = 32, 5, 4


def words(seed, n):
    return " ".join(np.random.default_rng(seed).choice(WORDS, n))


def write_run(folder):
    """A run that was stopped after step 30, and resumed from 20 with another plan and loss."""
    folder.mkdir()
    rows = [(10, 100.0), (20, 100.0), (30, 1.0), (30, 200.0), (40, 50.0)]
    log = [
        {"step": s, "loss": 6 - s / 20, "tokens_per_second": t, "bpb_t0": 3 - s / 40}
        for s, t in rows
    ]
    for row in log[3:]:
        row["spread"] = 0.5
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    before = dataclasses.replace(CONFIG, loop=LoopConfig(steps=90, log_every=10))
    with closing(checkpointer(folder, keep=9)) as saver:
        for step, config in ((20, before), (40, CONFIG)):
            saver.save(step, {"x": np.zeros(1)}, custom_metadata=to_json(config))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Data with a trigram model, a random target with the data's tokenizer, and a run."""
    root = tmp_path_factory.mktemp("card")
    sources = {
        "gsm8k_train": [
            {"text": f"Question: {words(i, 9)} {i}?\nAnswer: {i}\nThe answer is {i}"}
            for i in range(30)
        ],
        "t0": [{"prompt": words(200 + i, 20), "completion": words(300 + i, 5)} for i in range(30)],
    }
    paths = []
    for name, rows in sources.items():
        paths.append(root / f"{name}.jsonl.gz")
        text = "".join(json.dumps(row) + "\n" for row in rows)
        paths[-1].write_bytes(gzip.compress(text.encode()))
    data.prepare(paths, root / "data", vocab_size=300)
    trigram.main([str(root / "data")])
    model = write_folder(root / "model", RAW)
    shutil.copytree(root / "data" / "tokenizer", model, dirs_exist_ok=True)
    return {"data": root / "data", "model": model, "run": write_run(root / "run")}


@pytest.fixture(scope="module")
def teacher(folders):
    return as_teacher(load_target(folders["model"]))


@pytest.fixture(scope="module")
def held(folders):
    return card_measures.held_out_rows(
        folders["data"], seq_len=SEQ_LEN, rows=ROWS, batch_size=BATCH
    )


@pytest.fixture(scope="module")
def card(folders, tmp_path_factory):
    """The folder of a written card."""
    out = tmp_path_factory.mktemp("out") / "here" / "README.md"
    prompts = out.parent.with_name("prompts.jsonl")
    records = [("a", "chat", 700), ("b", "chat", 9), ("c", "math", 9), ("d", "math", 5)]
    prompts.write_text(
        "".join(
            json.dumps(
                {
                    "id": name,
                    "category": category,
                    "prompt": words(i, n),
                    "source": "here",
                    "license": "MIT",
                }
            )
            + "\n"
            for i, (name, category, n) in enumerate(records)
        )
    )
    argv = [str(folders["model"]), "--data", str(folders["data"]), "--run", str(folders["run"])]
    sizes = ["--rows", str(ROWS), "--seq-len", str(SEQ_LEN), "--batch-size", str(BATCH)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_card, "PROMPTS", prompts)
        assert model_card.main([*argv, *sizes, "--sample-tokens", "6", "--out", str(out)]) == 0
    return out.parent


@pytest.fixture(scope="module")
def numbers(card):
    return json.loads((card / "card.json").read_text())


# --- the run ---------------------------------------------------------------------------------


def test_tokens_and_time_of_a_run(folders):
    run = read_run(folders["run"])
    assert run.step == 40 and [row["step"] for row in run.log] == [10, 20, 30, 40]
    assert [run.tokens_at(s) for s in (0, 10, 30, 31, 40)] == [0, 640, 1920, 1984, 2560]
    # Each logged stretch of 640 tokens at its own rate; the repeated one by its second pass.
    assert run.seconds == pytest.approx(6.4 + 6.4 + 3.2 + 12.8)
    assert list(run.earlier) == [20] and run.late_metrics == {"spread": 30}
    earlier = read_run(folders["run"], 20)
    assert earlier.earlier == {} and earlier.late_metrics == {}
    assert earlier.step == 20 and [row["step"] for row in earlier.log] == [10, 20]


def test_a_stretch_over_two_phases_counts_both():
    run = Run(40, to_json(CONFIG), [{"step": 40, "tokens_per_second": 10.0}])
    assert run.tokens_at(35) == 30 * 64 + 5 * 64
    assert run.seconds == pytest.approx(256)
    assert dataclasses.replace(run, log=[]).seconds is None
    assert (run.seq_len, dataclasses.replace(run, step=30).seq_len) == (32, 16)


def test_differences_of_configs():
    other = dataclasses.replace(CONFIG, seed=7, loop=LoopConfig(steps=50, log_every=10))
    now = to_json(CONFIG)
    assert config_differences(to_json(other), now) == {"seed": 7, "loop.steps": 50}
    assert config_differences(now, now) == {}
    lacking = {key: value for key, value in now.items() if key != "seed"}
    assert config_differences(lacking, now) == {"seed": None}


def test_errors_about_the_run(folders, tmp_path):
    with pytest.raises(UsageError, match="no checkpoints"):
        read_run(tmp_path)
    with pytest.raises(UsageError, match=r"no checkpoint of step 30; there are \[20, 40\]"):
        read_run(folders["run"], 30)
    broken = shutil.copytree(folders["run"], tmp_path / "broken")
    (broken / "metrics.jsonl").write_text('{"step": 10')
    with pytest.raises(UsageError, match="not readable as metrics"):
        read_run(broken)


# --- held-out text ---------------------------------------------------------------------------


def test_rows_know_their_documents(folders, held):
    arrays = data.load_tokens(folders["data"] / "heldout")
    rows = {key: np.concatenate([b[key] for b in held.batches]) for key in held.batches[0]}
    assert len(held.documents) == len(rows["tokens"]) and len(rows["tokens"]) % BATCH == 0
    assert ((held.documents >= 0) == (rows["segment_ids"] > 0)).all()
    for row, documents in enumerate(held.documents):
        for document in np.unique(documents[documents >= 0]):
            mine = rows["tokens"][row][documents == document]
            whole = arrays.tokens[arrays.offsets[document] : arrays.offsets[document + 1]]
            windows = np.lib.stride_tricks.sliding_window_view(whole, len(mine))
            assert (windows == mine).all(axis=1).any()
        same = rows["segment_ids"][row][1:] == rows["segment_ids"][row][:-1]
        assert (same == (documents[1:] == documents[:-1])).all()


@pytest.mark.slow
def test_held_out_loss_is_that_of_every_predicted_token(folders, numbers):
    found = numbers["held_out"]
    assert list(found) == ["t0", "gsm8k", "all"]
    # Documents, one a row: what follows a token is not seen by it.
    tokens, targets, mask, kinds = [], [], [], []
    for kind, source in data.make_source(folders["data"], SEQ_LEN, "heldout").items():
        for row in source:
            for segment in range(1, row["segment_ids"].max() + 1):
                here = np.argsort(row["segment_ids"] != segment, kind="stable")
                tokens.append(row["tokens"][here])
                targets.append(row["targets"][here])
                mask.append((row["mask"] * (row["segment_ids"] == segment))[here])
                kinds.append(kind)
    law = np.asarray(jax.nn.log_softmax(load_target(folders["model"])(np.stack(tokens))))
    nats = -np.take_along_axis(law, np.stack(targets)[..., None], -1)[..., 0] * np.stack(mask)
    for kind in ("t0", "gsm8k"):
        mine = np.array(kinds) == kind
        assert found[kind]["tokens"] == np.stack(mask)[mine].sum()
        assert found[kind]["loss"] == pytest.approx(
            nats[mine].sum() / found[kind]["tokens"], rel=1e-5
        )
    parts = [found["t0"], found["gsm8k"]]
    assert found["all"]["tokens"] == sum(p["tokens"] for p in parts)
    for row in found.values():
        assert row["loss"] * row["tokens"] == pytest.approx(
            row["bits_per_byte"] * row["bytes"] * np.log(2)
        )
        assert row["ratio"] == row["bits_per_byte"] / row["trigram"]


def test_a_trigram_table_of_other_text_is_refused(folders, teacher, tmp_path):
    other = shutil.copytree(folders["data"], tmp_path / "data")
    table = json.loads((other / "trigram.json").read_text())
    table["gsm8k"]["tokens"] += 1
    (other / "trigram.json").write_text(json.dumps(table))
    call = dict(seq_len=SEQ_LEN, byte_lengths=np.ones(300, int))
    with pytest.raises(UsageError, match="tokens of gsm8k, the held-out split has"):
        card_measures.held_out_loss(teacher, other, **call)
    (other / "trigram.json").unlink()
    with pytest.raises(UsageError, match="python -m train.trigram"):
        card_measures.held_out_loss(teacher, other, **call)


# --- routed experts --------------------------------------------------------------------------


@pytest.mark.slow
def test_arms_are_the_models_they_are_called(teacher, held, numbers):
    arms = numbers["arms"]
    assert list(arms) == ["full", "shared only", "shared + top-1", "routing shuffled"]
    silent = dataclasses.replace(teacher.params, routed=jnp.zeros_like(teacher.params.routed))
    alone = teacher_forced(dataclasses.replace(teacher, params=silent), None, held.batches, r=0)
    assert arms["shared only"]["loss"] == pytest.approx(alone["loss_full"], rel=1e-5)
    assert arms["full"]["agreement"] == 1 > arms["shared + top-1"]["agreement"]


def test_other_tokens():
    segments = np.array([[1, 1, 2, 2], [1, 1, 0, 0]])
    sources = card_measures.other_tokens(segments, layers=3, rng=np.random.default_rng(0))
    assert sources.shape == (3, 8) and (sources[:, 6:] == [6, 7]).all()
    for row in sources:
        assert sorted(row[:6]) == list(range(6)) and (row[:6] != np.arange(6)).all()
    assert (sources[0] != sources[1]).any()


def test_shuffled_routing_and_the_record(teacher, held, numbers, monkeypatch):
    arm, record = card_measures.shuffled_arm(teacher, held, seed=numbers["measured"]["seed"])
    full = numbers["arms"]["full"]
    assert arm == numbers["arms"]["routing shuffled"]
    assert arm["agreement"] < 1 and arm["loss"] != pytest.approx(full["loss"], rel=1e-5)
    # The last batch, padding left out, is the end of the record.
    batch, layers = held.batches[-1], len(record.ids)
    sources = np.tile(np.arange(batch["tokens"].size, dtype=np.int32), (layers, 1))
    _, ids = card_measures._beside_shuffled(
        teacher.definition, teacher.params, batch, sources, dtype=teacher.dtype
    )
    ids = np.asarray(ids)[:, batch["segment_ids"] > 0]
    assert 0 < ids.shape[1] < batch["tokens"].size
    assert (record.ids[:, -ids.shape[1] :] == ids).all()
    assert record.ids.shape[1] == (held.documents >= 0).sum()

    # With everyone's own routing it is the target itself.
    def own(segments, *, layers, rng):
        return np.tile(np.arange(segments.size, dtype=np.int32), (layers, 1))

    monkeypatch.setattr(card_measures, "other_tokens", own)
    arm, _ = card_measures.shuffled_arm(teacher, held)
    assert arm["agreement"] == 1 and arm["loss"] == pytest.approx(full["loss"], rel=1e-6)


def test_dropped_assignments_are_counted(teacher, held, monkeypatch):
    _, record = card_measures.shuffled_arm(teacher, held)
    assert card_measures.dropped_assignments(record, block=8) == 0
    honest = card_measures.experts_of_tokens

    def forgetful(h, ids, gates, stack, *, block):
        return honest(h, ids, gates * (ids != 2), stack, block=block)

    monkeypatch.setattr(card_measures, "experts_of_tokens", forgetful)
    assert card_measures.dropped_assignments(record, block=8) == (record.ids == 2).sum() > 0


# --- the card ------------------------------------------------------------------------------


def test_the_program_writes_three_files(card, folders):
    assert sorted(p.name for p in card.iterdir()) == ["README.md", "card.json", "loss_curve.png"]
    assert 1000 < (card / "loss_curve.png").stat().st_size < 60_000
    text = (card / "README.md").read_text()
    for path in folders.values():
        assert str(path) not in text + (card / "card.json").read_text()
    assert re.findall(r"^## .*", text, re.MULTILINE) == [
        "## What it is",
        "## How it was made",
        "## Data",
        "## Held-out loss",
        "## What the routed experts do",
        "## Expert load",
        "## Overlap of adjacent tokens",
        "## Samples",
        "## Limits",
    ]


def test_the_text_says_what_the_numbers_say(card, numbers):
    text = (card / "README.md").read_bytes().decode()  # a sample may hold a carriage return
    arms = numbers["arms"]
    gain = arms["shared only"]["loss"] - arms["full"]["loss"]
    assert f"{gain:.3f} nats" in " ".join(text.split())
    for name in arms:
        assert f"| {name} | {arms[name]['loss']:.3f} |" in text
    for kind, row in numbers["held_out"].items():
        assert f"| {kind} | {row['tokens']:,} | {row['loss']:.3f} |" in text
    pairs = numbers["routing"]["tokens"] * 2 * 2  # MoE layers, experts of a token
    assert f"0 of {pairs:,} (token, expert) pairs" in " ".join(text.split())
    flat = " ".join(text.split())
    assert "At step 20 it still had `loop.steps` = `90`." in flat
    assert "`spread` is in its log from step 30 on only" in flat
    assert "Other than in that file now, the run had" in flat and "`seed`" not in flat
    # The first of each category that leaves room in the context.
    assert [sample["id"] for sample in numbers["samples"]] == ["b", "c"]
    for sample in numbers["samples"]:
        assert sample["greedy"]["text"] in text and sample["seeded"]["text"] in text
    tables = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    assert len(tables) == 10
    for table in tables:
        assert len({line.count(" | ") for line in table.splitlines()[2:]}) == 1


def test_a_failing_criterion_is_said(numbers):
    numbers = copy.deepcopy(numbers)
    numbers["arms"]["shared only"]["loss"] = numbers["arms"]["full"]["loss"] + 0.1
    numbers["held_out"]["t0"]["ratio"] = 0.95
    numbers["held_out"]["gsm8k"]["ratio"] = 0.85
    numbers["routing"]["by_kind"]["t0"]["overlap_shuffled"] = None
    text = card_text.render(numbers, curve="c.png", numbers_file="n.json")
    flat = " ".join(text.split())
    assert "matter? **no**: the full model is 0.100 nats a token below" in flat
    assert "0.950 | **no** |" in text and "0.850 | yes |" in text
    assert "![Loss against tokens](c.png)" in text


def test_a_run_as_its_file_says_needs_no_excuse(numbers):
    numbers = copy.deepcopy(numbers)
    numbers["run"] |= {"differences": {}, "earlier": {}, "late_metrics": {}}
    text = card_text.render(numbers, curve="c.png", numbers_file="n.json", note="It was cold.")
    assert "does not repeat" not in text and "\n\nIt was cold.\n\n" in text


def test_a_sample_cannot_end_its_block(numbers):
    numbers = copy.deepcopy(numbers)
    numbers["samples"][0]["greedy"]["text"] = "```\n## Not a heading\n````"
    text = card_text.render(numbers, curve="c.png", numbers_file="n.json")
    assert "`````text\n```\n## Not a heading\n````\n`````\n" in text


def test_another_tokenizer_is_refused(folders, tmp_path):
    model = write_folder(tmp_path / "bare", RAW)
    with pytest.raises(UsageError, match="its tokenizer is not that of"):
        model_card.check_tokenizer(load_target(model), folders["data"])


def test_the_run_that_gave_the_first_weights_is_told(folders, tmp_path):
    start = shutil.copytree(folders["model"], tmp_path / "start")
    with pytest.raises(UsageError, match="not readable as a card's numbers"):
        first_run(str(start))
    run = {"step": 7, "tokens": 700, "seconds": 3600.0, "config": {"spread_weight": 0.5}}
    card = {"model": {"name": "small", "identity": "abc"}, "run": run}
    (start / "card.json").write_text(json.dumps(card))
    started = dataclasses.replace(read_run(folders["run"]), config={})
    started.config.update(to_json(CONFIG) | {"start": str(start)})
    found = describe_run(started, "pretrain_tiny")
    assert found["first"]["tokens"] == 700 and found["config"]["start"] == "small abc"
    assert str(tmp_path) not in json.dumps(found)
    rows = dict(card_text._first_rows(found))
    assert rows["first weights"] == "those of small `abc`: 7 steps, 700 tokens, 1.00 h, spread 0.5"
    hours = 1 + found["seconds"] / 3600
    assert rows["both together"] == f"{found['tokens'] + 700:,} tokens, {hours:.2f} h in steps"

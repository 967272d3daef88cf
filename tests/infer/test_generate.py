"""`generate` and `dejax generate`: prompts in, the JSON contract out, one line for a wrong call."""

import dataclasses
import json
import re
import sys

import pytest

from dejax import cli
from dejax.ckpt.draft_state import save_draft
from dejax.errors import FailedError, UsageError
from dejax.spec.control import ControlConfig
from dejax.spec.governor import Decision
from dejax.target import load_target
from infer import buckets
from infer import generate as generate_module
from infer.decode_options import Mode
from infer.decoder import Decoder
from infer.generate import generate
from infer.prompts import encode_prompt
from infer.trace import read_trace
from tests.infer.random_target import draft_of
from tests.train.small_model import VOCAB, write_model
from train.documents import open_data

CONTRACT = {
    *("id", "prompt", "prompt_tokens", "tokens", "text", "finish_reason", "mode", "lossless"),
    "stats",
}
STATS = {
    *("drafted", "accepted", "acceptance_rate", "rounds", "emitted", "tokens_per_round"),
    *("alpha_pos", "unique_layer_experts", "prefetch_recall", "prefetch_precision", "loads"),
    *("prefill_seconds", "decode_seconds", "decode_tps"),
}
TREE = ["--mode", "top-r", "--tree"]
SHORT = ControlConfig(draft_length=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="module")
def target(folder):
    return load_target(folder)


def tokens_of(results):
    return [result.tokens for result in results]


# Prompts.


def test_prompts_are_texts_token_ids_or_records(target):
    text = "the draft path"
    ids = encode_prompt(target, text)
    record = {"id": 7, "prompt": text, "task": "chat", "turns": [1, 2], "text": "not ours"}
    results = generate(target, [text, ids, record], max_new_tokens=4)
    assert [result.id for result in results] == ["0", "1", "7"]
    assert [result.prompt for result in results] == [text, "", text]
    assert [result.prompt_tokens for result in results] == [ids] * 3
    assert tokens_of(results) == [results[0].tokens] * 3
    assert results[0].text == target.tokenizer.decode(results[0].tokens, skip_special_tokens=True)
    plain = results[2].to_json()
    assert set(plain) == CONTRACT | {"task", "turns"}  # other keys pass through
    assert plain["turns"] == [1, 2] and plain["text"] == results[0].text
    assert set(results[0].to_json()) == CONTRACT


def test_the_chat_template_is_used_unless_told_otherwise(target):
    (chat,) = generate(target, ["the draft"], max_new_tokens=1)
    (plain,) = generate(target, ["the draft"], max_new_tokens=1, chat=False)
    assert plain.prompt_tokens == target.tokenizer.encode("the draft")
    assert len(chat.prompt_tokens) > len(plain.prompt_tokens)
    assert "the draft" in target.tokenizer.decode(chat.prompt_tokens)


def test_a_target_without_tokenizer_takes_token_ids_only(target):
    bare = dataclasses.replace(target, tokenizer=None)
    (result,) = generate(bare, [[1, 2, 3]], max_new_tokens=2)
    assert result.text == "" and len(result.tokens) == 2
    with pytest.raises(UsageError, match="has no tokenizer; give prompts as token ids"):
        generate(bare, ["the draft"])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], "prompt 0 has no tokens"),
        ([[1], [2, -1]], f"prompt 1 has token -1; the vocabulary has {VOCAB} tokens"),
        ([[VOCAB]], f"prompt 0 has token {VOCAB}"),
        ([[1] * 128], "prompt 0 has 128 tokens; the context of 128 leaves no room for a new one"),
        ([{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}], "two prompts have the id 'a'"),
        ([{"id": 1, "prompt": "x"}, {"id": "1", "prompt": "y"}], "two prompts have the id '1'"),
        ([{"id": "a"}], "prompt a has no text under 'prompt'"),
        ([{"id": "a", "prompt": 3}], "prompt a has no text under 'prompt'"),
        ("the draft path", "prompts is one text; expected a list of prompts"),
    ],
)
def test_prompts_that_cannot_be_decoded(target, prompts, message):
    with pytest.raises(UsageError, match=message):
        generate(target, prompts)


def test_no_prompts_is_no_work(target):
    assert generate(target, []) == []


def test_ends_near_the_context(target):
    for length, new, expected, reason in [
        (127, 9, 1, "context"),
        (120, 9, 8, "context"),
        (120, 8, 8, "length"),
        (119, 8, 8, "length"),
    ]:
        (result,) = generate(target, [[9] * length], max_new_tokens=new)
        assert (len(result.tokens), result.finish_reason) == (expected, reason)


def test_capacity_is_rounded_up_and_changes_nothing(target, monkeypatch):
    prompts = [[5] * 30, [6] * 7]
    expected = tokens_of(generate(target, prompts, max_new_tokens=20))
    monkeypatch.setattr(buckets, "CAPACITY_STEP", 50)  # exactly the longest
    results = generate(target, prompts, max_new_tokens=20)
    assert tokens_of(results) == expected
    assert all(result.finish_reason == "length" for result in results)


# Modes.


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 40, "seed": 3}])
def test_every_mode_gives_the_same_tokens_and_the_contract(target, sampling):
    prompts, draft = ["the draft path", "experts"], draft_of(target)
    expected = generate(target, prompts, max_new_tokens=12, **sampling)
    runs: list[tuple[Mode, dict]] = [
        ("n-gram", {"governor": False}),
        ("top-r", {"control": ControlConfig(controller="cost"), "governor": False}),
        ("top-r", {"r": 2, "device_cache": None}),
        ("draft-expert", {"draft": draft, "link": "sim:10", "prefetch": False}),
    ]
    for mode, options in runs:
        seen = []
        results = generate(
            target,
            prompts,
            mode=mode,
            max_new_tokens=12,
            on_round=lambda index, record, seen=seen: seen.append((index, record)),
            **sampling,
            **{"control": SHORT, **options},
        )
        assert tokens_of(results) == tokens_of(expected)
        assert seen == [(i, record) for i, r in enumerate(results) for record in r.trace]
        for result, reference in zip(results, expected, strict=True):
            plain = json.loads(json.dumps(result.to_json(), allow_nan=False))
            assert plain["mode"] == mode and plain["lossless"] is True
            assert plain["finish_reason"] == reference.finish_reason
            assert STATS <= set(plain["stats"])
            assert set(plain["stats"]["loads"]) == {"draft", "prefetch", "demand"}
            for entry in plain["stats"]["loads"].values():
                assert set(entry) == {"count", "bytes", "seconds"}
            assert plain["stats"]["emitted"] == len(plain["tokens"]) - 1


def test_the_governor_measures_first_and_tells_what_it_made_of_it(target):
    made: list[Decision] = []
    options = dict(mode="top-r", max_new_tokens=40, control=SHORT, on_decision=made.append)
    (result,) = generate(target, ["the draft path"], **options)
    rounds = [record for record in result.trace if record.kind == "round"]
    assert [record.governed for record in rounds[:7]] == [True] * 6 + [False]
    assert result.stats["governed_rounds"] >= 6
    assert made[0].first and made[0].tokens >= 1 and made[0].steps > 0
    made.clear()
    (free,) = generate(target, ["the draft path"], governor=False, **options)
    assert free.tokens == result.tokens and free.stats["governed_rounds"] == 0 and made == []


@pytest.mark.parametrize(
    ("made", "lines"),
    [
        (
            Decision(True, tokens=2.9, steps=1.93, retry_tokens=0, first=True),
            ["speculation: 2.9 tokens a round at 1.9 autoregressive steps: 1.5 x expected"],
        ),
        (
            Decision(False, tokens=2.1, steps=2.6, retry_tokens=64, first=False),
            [
                "speculation off: a round gives 2.1 tokens and costs 2.6 autoregressive steps; "
                "tried again after 64 tokens"
            ],
        ),
        (
            Decision(True, tokens=3.0, steps=2.0, retry_tokens=0, first=False),
            ["speculation on: 1.5 x"],
        ),
    ],
)
def test_what_is_said_of_speculation(made, lines, capsys):
    generate_module.say_decision(made)
    assert capsys.readouterr().err.splitlines() == lines


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "top-r", "r": 4}, "r is 4; the target routes to 3 experts per token"),
        ({"mode": "top-r", "r": 99}, "r is 99; the target routes to 3 experts per token"),
        ({"mode": "draft-expert"}, "mode draft-expert needs draft experts"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature must be a finite number >= 0"),
        ({"top_p": 0.0}, "top_p must be a number above 0"),
        ({"seed": -1}, "seed must be an integer from 0"),
        ({"link": "sim:0"}, "link 'sim:0'"),
        ({"device_cache": -1}, "expected >= 0"),
        ({"host_cache": 100}, "is not converted and its experts .* exceed the host cache .100"),
    ],
)
def test_options_that_do_not_fit(target, options, message):
    with pytest.raises(UsageError, match=message):
        generate(target, ["the draft"], **options)


def test_draft_experts_of_another_target_are_refused(target):
    other = dataclasses.replace(draft_of(target), identity="another")
    with pytest.raises(
        UsageError, match=f"trained for target another, not for .*{target.identity}"
    ):
        generate(target, ["the draft"], mode="draft-expert", draft=other)


# The program.


def test_the_program_writes_json_and_trace(folder, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": "a", "prompt": "the draft"}, {"prompt": "experts", "task": "chat"}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    out, trace = tmp_path / "out.json", tmp_path / "trace.jsonl"
    base = ["generate", str(folder), "--prompts", str(prompts), "--max-new-tokens", "6"]
    drafting = ["--mode", "draft-expert", "--draft", "init:2", "--draft-length", "2"]
    drafting += ["--no-governor"]  # it would measure first, and not draft within six tokens
    assert cli.main([*base, *drafting, "--json", str(out), "--trace", str(trace)]) == 0
    printed = capsys.readouterr()
    assert "6 tokens" not in printed.out and "accepted" in printed.err
    result = json.loads(out.read_text())
    written = result.pop("generations")
    assert result.pop("peak_rss_bytes") > 2**20 and result.pop("memory_plan") is None
    counts = {"input": 2, "written": 2, "failed": 0, "skipped": 0}
    assert result == {"counts": counts, "failed": [], "skipped": []}
    assert [g["id"] for g in written] == ["a", "2"]
    assert [g.get("task") for g in written] == [None, "chat"]
    assert printed.out.splitlines() == [f"[{g['id']}] {g['text']}" for g in written]
    header, rounds = read_trace(trace)
    assert header["mode"] == "draft-expert" and list(rounds) == ["a", "2"]
    for generation in written:
        emitted = [t for record in rounds[generation["id"]] for t in record.emitted]
        assert emitted == generation["tokens"]
    assert cli.main([*base, "--json", "-"]) == 0
    again = json.loads(capsys.readouterr().out)["generations"]  # nothing else is printed there
    assert [g["tokens"] for g in again] == [g["tokens"] for g in written]


@pytest.fixture
def mixed(tmp_path):
    """A call with prompts of which two can be decoded, and the places of its results."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    lines = [
        {"id": "a", "prompt": "the draft"},
        {"id": "long", "prompt": "the " * 200},
        {"id": "b", "prompt": [1, 2, 3]},
        {"id": "a", "prompt": "again"},
        {"id": "other", "prompt": [VOCAB]},
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)) + '\n{"prompt": \n')
    return [*("--prompts", str(prompts), "--max-new-tokens", "4", "--json", str(out))], out


def test_prompts_that_cannot_be_decoded_can_be_left_out(folder, mixed, capsys):
    argv, out = mixed
    assert cli.main(["generate", str(folder), *argv, "--skip-bad"]) == 0
    result = json.loads(out.read_text())
    assert [g["id"] for g in result["generations"]] == ["a", "b"]
    assert result["counts"] == {"input": 6, "written": 2, "failed": 0, "skipped": 4}
    skipped = {(entry["id"], entry["reason"].split(";")[0]) for entry in result["skipped"]}
    assert ("a", "two prompts have the id 'a'") in skipped
    assert {name for name, _ in skipped} == {"long", "a", "other", "6"}
    said = "prompts: 6 input, 2 written, 0 failed, 4 skipped; the first left out: "
    assert said in capsys.readouterr().err
    # What was written is data to distill from.
    data = open_data(str(out), None, vocab_size=VOCAB, seq_len=8, batch_size=1, loss_on="assistant")
    batches = [data.batch_at(step) for step in range(32)]
    counted = {t for b in batches for t in b["targets"][b["mask"] > 0].tolist()}
    assert counted == {t for g in result["generations"] for t in g["tokens"]}


def test_a_prompt_that_fails_is_counted_and_the_next_is_decoded(folder, mixed, monkeypatch, capsys):
    argv, out = mixed
    decode = Decoder.run

    def run(self, ids, *args, **kwargs):
        if ids == [1, 2, 3]:
            raise FailedError("layer 2, expert 3: bad sector")
        return decode(self, ids, *args, **kwargs)

    monkeypatch.setattr(Decoder, "run", run)
    assert cli.main(["generate", str(folder), *argv, "--skip-bad"]) == 1
    result = json.loads(out.read_text())
    assert [g["id"] for g in result["generations"]] == ["a"]
    assert result["counts"] == {"input": 6, "written": 1, "failed": 1, "skipped": 4}
    assert result["failed"] == [{"id": "b", "reason": "layer 2, expert 3: bad sector"}]


def test_no_prompt_that_can_be_decoded_is_one_line(folder, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": []}\n{"prompt": 3}')
    argv = ["generate", str(folder), "--prompts", str(prompts), "--skip-bad"]
    assert cli.main(argv) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "error: none of 2 prompts was decoded; the first: " in message and "line 1" in message


def test_a_terminal_sees_the_text_as_it_comes(folder, capsys, monkeypatch):
    argv = ["generate", str(folder), "--prompt", "the draft", "--max-new-tokens", "16"]
    assert cli.main([*argv, "--json", "-"]) == 0
    text = json.loads(capsys.readouterr().out)["generations"][0]["text"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli.main(argv) == 0
    # A character that the last token left unfinished is not shown.
    assert capsys.readouterr().out == text.rstrip("\ufffd") + "\n"


def complaint(argv, capsys):
    """What a wrong call prints: one line, on standard error, with exit status 2."""
    assert cli.main(argv) == 2
    printed = capsys.readouterr()
    *before, line = printed.err.splitlines()
    assert not before or (before[0] == f"loading {argv[1]}" and re.match("load: ", before[-1]))
    assert printed.out == "" and line.startswith("dejax: error: ")
    return line


PROMPT = ["--prompt", "x"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([*PROMPT, "--r", "0"], "--r: '0' is out of range; expected a whole number >= 1"),
        ([*PROMPT, "--budget", "-1"], "--budget: '-1' is out of range"),
        ([*PROMPT, "--budget", "most"], "--budget: 'most' is not a whole number"),
        ([*PROMPT, "--device-cache", "-1"], "--device-cache: '-1' is not a size"),
        ([*PROMPT, "--host-cache", "-5MiB"], "--host-cache: '-5MiB' is not a size"),
        ([*PROMPT, "--max-new-tokens", "0"], "--max-new-tokens: '0' is out of range"),
        ([*PROMPT, "--temperature", "-1"], "--temperature: '-1' is out of range"),
        ([*PROMPT, "--temperature", "nan"], "--temperature: 'nan' is not a number"),
        ([*PROMPT, "--top-k", "-1"], "--top-k: '-1' is out of range"),
        ([*PROMPT, "--top-p", "1.5"], "--top-p: '1.5' is out of range; expected a number above 0"),
        (
            [*PROMPT, "--seed", "4294967296"],
            "--seed: '4294967296' is out of range; expected 0 to 4294967295",
        ),
        ([*PROMPT, "--tau", "-0.1"], "--tau: '-0.1' is out of range"),
        ([*PROMPT, "--link", "sim:0"], "link 'sim:0': expected real"),
        ([*PROMPT, "--link", "fast"], "link 'fast': expected real"),
        ([*PROMPT, "--mode", "best"], "--mode: 'best' is not one of ar, top-r, draft-expert"),
        ([*PROMPT, "--keep", "2"], "--keep: '2' is out of range; expected a number from 0 to 1"),
        (
            [*PROMPT, "--mode", "n-gram", "--r", "2"],
            "--r is for --mode top-r or draft-expert",
        ),
        ([*PROMPT, "--mode", "n-gram", "--draft", "init"], "--draft is for --mode draft-expert"),
        ([*PROMPT, "--controller", "x"], "--controller: 'x' is not one of consumer, producer"),
        ([*PROMPT, *TREE, "bush"], "--tree: 'bush' is no tree; expected chain, BxD"),
        ([*PROMPT, *TREE, "static:0,5"], "--tree: parent of node 2 is 5; expected an earlier node"),
        (
            [*PROMPT, "--tree", "2x2"],
            "--tree is for --mode top-r or draft-expert",
        ),
        ([*PROMPT, *TREE, "2x2", "--strict"], "--strict is for chains"),
        ([*PROMPT, "--rule", "R9"], "--rule: 'R9' is not one of match, R1, R2, R3, R4"),
        ([*PROMPT, "--rule", "R1"], "controller consumer drops a drafted token for what its own"),
        ([*PROMPT, *TREE, "2x2", "--rule", "R1"], "rule R1 is for chains"),
        ([*PROMPT, *TREE, "best8", "--rule", "R3"], "this tree keeps nodes by the confidence"),
        ([*PROMPT, "--draft-length", "0"], "--draft-length: '0' is out of range"),
        ([*PROMPT, "--draft-length", "33"], "draft_length"),
        ([*PROMPT, "--mode", "top-r", "--r", "4"], "r is 4; the target routes to 3 experts"),
        ([*PROMPT, "--dtype", "int8"], "--dtype: 'int8' is not one of float32, bfloat16"),
        ([*PROMPT, "--no-such-flag"], "unknown option --no-such-flag"),
        (
            [*PROMPT, "--draft", "init"],
            "--draft is for --mode draft-expert or ecospec or moe-spec, not ar",
        ),
        ([*PROMPT, "--mode", "draft-expert"], "--mode draft-expert needs --draft"),
        ([*PROMPT, "--prompts", "/dev/null"], "give either --prompt TEXT or --prompts FILE"),
        ([], "give either --prompt TEXT or --prompts FILE"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
        ([*PROMPT, "--skip-bad"], "--skip-bad is for --prompts FILE"),
        (["--prompt", "the " * 200], "leaves no room for a new one"),
        (["--prompt", "", "--no-chat"], "prompt 0 has no tokens"),
        ([*PROMPT, "--host-cache", "1KiB"], "exceed the host cache (1 KiB); run: dejax conv"),
        (
            [*PROMPT, "--mode", "draft-expert", "--draft", "nowhere"],
            "nowhere does not exist; expected an adapter folder",
        ),
        ([*PROMPT, "--mode", "draft-expert", "--draft", "init:x"], "'x' is no seed"),
    ],
    ids=lambda value: " ".join(value[-2:])[:40] if isinstance(value, list) else "",
)
def test_a_wrong_call_is_one_line(folder, capsys, argv, message):
    assert message in complaint(["generate", str(folder), *argv], capsys)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no prompts; expected JSON lines"),
        (b"\n \n", "no prompts; expected JSON lines"),
        (b"hello", "line 1 is not JSON"),
        (b'{"id": "a"}', "line 1: no prompt; expected an object"),
        (b'{"prompt": 3}', "line 1: prompt is 3; expected a string"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}', "two prompts have the id 1"),
    ],
)
def test_a_wrong_prompt_file_is_one_line(folder, tmp_path, capsys, content, message):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    assert message in complaint(["generate", str(folder), "--prompts", str(path)], capsys)


def test_a_wrong_model_is_one_line(tmp_path, capsys):
    for model, message in [
        (tmp_path / "none", "does not exist; expected a model folder, or the name tiny"),
        (tmp_path, "no config.json; expected a Hugging Face or converted folder"),
    ]:
        assert message in complaint(["generate", str(model), *PROMPT], capsys)
    assert "MODEL" in complaint(["generate", *PROMPT], capsys)
    assert "did you mean 'generate'?" in complaint(["generat", "x", *PROMPT], capsys)


@pytest.mark.slow
def test_trees_and_rules_by_name(folder, tmp_path):
    """Trees emit the tokens of mode ar; a rejection rule's run is lossless too and repeats."""

    def tokens(*argv):
        out = tmp_path / "out.json"
        flags = ["--max-new-tokens", "12", "--temperature", "1", "--json", str(out)]
        assert cli.main(["generate", str(folder), *PROMPT, *flags, *argv]) == 0
        (generation,) = json.loads(out.read_text())["generations"]
        assert generation["lossless"]
        return generation["tokens"]

    plain = tokens()
    assert tokens(*TREE, "best8") == tokens(*TREE, "eagle:4,2,2") == plain
    assert tokens(*TREE, "2x2", "--rule", "R4") == tokens("--rule", "R4") != plain
    assert tokens(*TREE, "2x2", "--rule", "R3") == tokens(*TREE, "2x2", "--rule", "R3")
    chain = ["--mode", "top-r", "--rule", "R1", "--controller", "producer"]
    assert tokens(*chain) == tokens(*chain)


def test_an_adapter_of_another_target_is_one_line(folder, target, tmp_path, capsys):
    other = dataclasses.replace(draft_of(target), identity="another")
    adapter = save_draft(tmp_path / "adapter", other, target.config)
    for mode in ("draft-expert", "ecospec"):
        argv = ["generate", str(folder), *PROMPT, "--mode", mode, "--draft", str(adapter)]
        line = complaint(argv, capsys)
        assert "another" in line and target.identity in line


def test_weights_held_in_float16_are_stored_as_what_holds_them(folder):
    target = load_target(folder, dtype="float16")
    wide = load_target(folder)
    (result,) = generate(target, ["the draft path"], max_new_tokens=3)
    assert len(result.tokens) == 3 and target.routed[1].dtype == "float16" != wide.routed[1].dtype


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--mode", "top-r", "--r", "9"], "r is 9; the target routes to"),
        (["--draft-length", "33"], "draft_length 33 exceeds 32"),
        ([*TREE, "2x5"], "the tree has 62 nodes; a pass verifies at most 32"),
        ([*TREE, "eagle:8,16,9"], "the tree is drafted in passes of 16, 16, 16"),
        (["--host-cache", "1KiB"], "exceed the host cache (1 KiB)"),
        (["--dtype", "float64"], "dtype float64 needs JAX's 64-bit mode"),
        (["--trace", "-"], "--trace: expected a file"),
    ],
)
def test_options_are_held_against_the_target_before_it_is_loaded(
    folder, capsys, monkeypatch, argv, message
):
    monkeypatch.setattr("infer.loading.load_target", None)
    assert message in complaint(["generate", str(folder), *PROMPT, *argv], capsys)

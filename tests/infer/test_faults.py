"""Whatever fails, a decode gives the right tokens or a clean failure: no wrong token, no hang."""

import json
import random
import threading
import time

import jax
import numpy as np
import pytest

from dejax import cli
from dejax.ckpt.expert_store import ExpertReadError, ExpertStore
from dejax.errors import FailedError
from dejax.spec.control import ControlConfig
from infer import buckets
from infer import generate as generate_module
from infer.decode import decode, make_drafter
from infer.decode_options import DecodeOptions
from infer.decoder import Decoder, Offload
from infer.drafters import DraftStep
from infer.generate import generate
from infer.link import parse_link
from tests.infer.random_target import (
    CONTEXT,
    VOCAB,
    draft_of,
    random_prompt,
    store_of,
)
from tests.train.small_model import write_model

PROMPT = random_prompt(12)
CONTROL = ControlConfig(draft_length=4, truncate=False)


pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture(scope="module")
def store(target):
    return store_of(target)


@pytest.fixture(scope="module")
def expected(target, store):
    with jax.enable_x64(True):
        return tokens_of(run(target, store, mode="ar"))


@pytest.fixture(autouse=True)
def no_thread_stays():
    yield
    assert not transfer_threads()


def transfer_threads():
    return [thread for thread in threading.enumerate() if thread.name == "dejax-transfer"]


class Troubled(ExpertStore):
    """A store with something in the way of reading it."""

    def __init__(self, store, before_read):
        vars(self).update(vars(store))
        self.before_read = before_read

    def read(self, layer, expert, into=None):
        self.before_read((layer, expert))
        return super().read(layer, expert, into)


def open_decoder(target, store, mode, offload=None):
    draft = draft_of(target) if mode == "draft-expert" else None
    return Decoder(target, draft=draft, offload=offload, store=store)


def decode_with(decoder, mode, *, drafter=None):
    options = DecodeOptions(mode=mode, max_new_tokens=16, control=CONTROL)
    drafter = make_drafter(decoder.engine, options) if drafter is None else drafter
    return tuple(decode(decoder.engine, PROMPT, options, drafter=drafter))


def run(target, store, *, mode, offload=None):
    with open_decoder(target, store, mode, offload) as decoder:
        return decode_with(decoder, mode)


def tokens_of(trace):
    return [token for record in trace for token in record.emitted]


def in_time(function, seconds=120):
    """The result of a call that must not hang; x64 is of the thread that sets it."""
    results = []

    def body():
        with jax.enable_x64(True):
            try:
                results.append(function())
            except Exception as error:
                results.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "the decode hangs"
    return results[0]


# Reads that fail.


@pytest.mark.parametrize("mode", ["ar", "top-r", "draft-expert"])
def test_reads_that_fail_once_are_retried(target, store, expected, mode):
    failed = set()

    def first_time(pair):
        if pair not in failed:
            failed.add(pair)
            raise OSError("try again")

    with open_decoder(target, Troubled(store, first_time), mode) as decoder:
        assert tokens_of(decode_with(decoder, mode)) == expected
        assert decoder.residency.stager.retried_reads == len(failed) > 8


@pytest.mark.parametrize("mode", ["ar", "top-r", "draft-expert"])
def test_an_expert_that_cannot_be_read_is_named_and_the_decoder_lives_on(
    target, store, expected, mode
):
    broken = {(2, 3)}

    def never(pair):
        if pair in broken:
            raise OSError("bad sector")

    with open_decoder(target, Troubled(store, never), mode) as decoder:
        failure = "layer 2, expert 3: .*bad sector.* .3 attempts. .*expert_00003"
        for _ in range(2):
            with pytest.raises(FailedError, match=failure):
                decode_with(decoder, mode)
        broken.clear()
        assert tokens_of(decode_with(decoder, mode)) == expected


def test_a_prefetch_that_fails_is_only_a_miss(target, store, expected):
    failing = False

    def fail(pair):
        if failing:
            raise OSError("not now")

    class Predictor:
        """Drafts nothing useful, and has experts prefetched while none can be read."""

        def consume(self, token, *, position, kept=False):
            nonlocal failing
            before, failing = decoder.residency.prefetch_failures, True
            decoder.residency.prefetch(store.pairs)
            while decoder.residency.prefetch_failures < before + 3:
                time.sleep(0.001)
            while decoder.residency.available() != decoder.residency.resident():
                time.sleep(0.001)
            failing = False
            return DraftStep(logits=np.zeros(VOCAB), routes=frozenset(), used=frozenset())

    with open_decoder(target, Troubled(store, fail), "top-r") as decoder:
        trace = in_time(lambda: decode_with(decoder, "top-r", drafter=Predictor()))
        assert tokens_of(trace) == expected
        assert not any(record.prefetched for record in trace)


# Anything at any time.


@pytest.mark.parametrize("link", ["real", "sim:10,200"])
@pytest.mark.parametrize("cache", [0, 3, None])
def test_late_experts_change_no_token(target, store, expected, link, cache):
    noise = random.Random(0)
    slow = Troubled(store, lambda pair: time.sleep(noise.random() * 0.002))
    size = store.bytes_per_expert
    offload = Offload(None if cache is None else cache * size, 0, parse_link(link))
    trace = in_time(lambda: run(target, slow, mode="draft-expert", offload=offload))
    assert tokens_of(trace) == expected


def test_under_random_faults_the_tokens_are_right_or_the_failure_is_clean(target, store, expected):
    outcomes = []
    for seed in range(24):
        noise = random.Random(seed)

        def trouble(pair, noise=noise, rate=0.4 if seed % 2 else 0.05):
            time.sleep(noise.random() * 0.001)
            if noise.random() < rate:
                raise OSError("trouble")

        offload = Offload(noise.choice([0, 2, 9]) * store.bytes_per_expert, 0)
        mode = noise.choice(["ar", "top-r", "draft-expert"])
        troubled = Troubled(store, trouble)
        result = in_time(lambda s=troubled, m=mode, o=offload: run(target, s, mode=m, offload=o))
        if isinstance(result, Exception):
            assert type(result) is ExpertReadError, result
        else:
            assert tokens_of(result) == expected
        outcomes.append(isinstance(result, Exception))
    assert set(outcomes) == {True, False}


# Callers that leave early.


@pytest.mark.parametrize("error", [RuntimeError("enough"), KeyboardInterrupt()], ids=type)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_error_of_the_caller_leaves_no_thread_behind(target, error, at, monkeypatch):
    monkeypatch.setattr(buckets, "CAPACITY_STEP", CONTEXT)  # as above: nothing to compile
    seen = []

    def on_round(index, record):
        seen.append(record)
        if len(seen) == at + 1:
            raise error

    with pytest.raises(type(error)):
        generate(target, [PROMPT], max_new_tokens=8, mode="ar", on_round=on_round)
    assert len(seen) == at + 1 and not transfer_threads()


def test_a_decode_that_was_left_is_no_trouble_for_the_next(target, store, expected):
    with open_decoder(target, store, "top-r") as decoder:
        for rounds in (1, 2, 3):
            options = DecodeOptions(mode="top-r", max_new_tokens=16, control=CONTROL)
            drafter = make_drafter(decoder.engine, options)
            left = decode(decoder.engine, random_prompt(30), options, drafter=drafter)
            for _ in range(rounds):
                next(left)
            assert tokens_of(decode_with(decoder, "top-r")) == expected


@pytest.mark.parametrize("kind", ["draft", "demand"])
def test_an_error_in_the_middle_of_a_round_is_no_trouble_for_the_next(
    target, store, expected, monkeypatch, kind
):
    with open_decoder(target, store, "draft-expert") as decoder:
        request, calls = decoder.residency.request, []

        def interrupted(layer, ids, *, kind):
            calls.append(kind)
            if calls.count(wanted) == 5:
                raise KeyboardInterrupt
            return request(layer, ids, kind=kind)

        wanted = kind
        monkeypatch.setattr(decoder.residency, "request", interrupted)
        with pytest.raises(KeyboardInterrupt):
            decode_with(decoder, "draft-expert")
        monkeypatch.undo()
        assert tokens_of(decode_with(decoder, "draft-expert")) == expected


def test_a_closed_decoder_says_so(target, store):
    decoder = open_decoder(target, store, "ar")
    decoder.close()
    decoder.close()
    with pytest.raises(FailedError, match="the residency is closed"):
        decode_with(decoder, "ar")


# The program.


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "plain")
    assert cli.main(["convert", str(folder / "plain"), "--out", str(folder / "converted")]) == 0
    return folder


def call(folder, *options):
    return ["generate", str(folder), "--prompt", "the draft path", "--draft-length", "2", *options]


@pytest.mark.slow
def test_a_converted_model_decodes_like_the_folder_it_is_from(converted, capsys):
    tokens = []
    for name in ("plain", "converted"):
        for mode in ("ar", "top-r"):
            options = ["--max-new-tokens", "8", "--mode", mode, "--json", "-"]
            assert cli.main(call(converted / name, *options)) == 0
            generation = json.loads(capsys.readouterr().out)["generations"][0]
            tokens.append((generation["prompt_tokens"], generation["tokens"]))
    assert tokens == tokens[:1] * 4


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ar", "top-r"])
def test_a_flipped_byte_ends_the_program_with_one_line(converted, capsys, mode):
    """Every record of a layer has a byte flipped: which expert is read first does not matter."""
    files = sorted((converted / "converted" / "experts" / "layer_00001").iterdir())
    whole = [file.read_bytes() for file in files]
    try:
        for file, data in zip(files, whole, strict=True):
            file.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
        assert cli.main(call(converted / "converted", "--mode", mode)) == 1
    finally:
        for file, data in zip(files, whole, strict=True):
            file.write_bytes(data)
    printed = capsys.readouterr()
    (line,) = (text for text in printed.err.splitlines() if "error" in text)
    assert printed.out == "" and line.startswith("dejax: error: layer 1, expert ")
    assert "checksum" in line and "layer_00001" in line
    assert cli.main(call(converted / "converted", "--mode", mode, "--max-new-tokens", "2")) == 0


def test_an_interrupt_ends_the_program(converted, capsys, monkeypatch):
    def interrupt(self, index, record):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_module._Stream, "__call__", interrupt)
    assert cli.main(call(converted / "plain")) == cli.INTERRUPTED
    assert capsys.readouterr().err.splitlines()[-1] == "dejax: error: interrupted"

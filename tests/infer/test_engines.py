"""T0 for every engine: in float64, the tokens of the host-driven engine's autoregressive decoding.

Passes of two engines may differ by the order of additions inside a matrix product, as those of
different sizes do in `test_engine`.
"""

import dataclasses
import functools
import json
import random
import threading
import time
from contextlib import ExitStack

import jax
import numpy as np
import pytest

from dejax import cli
from dejax.ckpt.expert_store import ExpertReadError
from dejax.config import DraftConfig
from dejax.draft.expert import random_draft
from dejax.errors import FailedError, UsageError
from dejax.spec.control import ControlConfig
from dejax.spec.sampling import SamplingConfig
from dejax.target import load_target
from infer import callback_engine
from infer.decode import decode, make_drafter
from infer.decode_options import DecodeOptions
from infer.decoder import Decoder, Offload
from infer.engines import ENGINES, EngineLike, ResidencyLike
from infer.generate import generate
from infer.passes import Drafting
from infer.resident import load_resident
from tests.families.configurations import FIRST, MOE_CONFIGS
from tests.families.random_folder import raw_config, write_folder
from tests.infer.random_target import draft_of, random_prompt, random_target, store_of
from tests.infer.test_engine import compilations
from tests.infer.test_faults import Troubled, in_time, transfer_threads
from tests.infer.test_quantized import quantised

PROMPT = random_prompt(12)
MODES = ("ar", "top-r", "draft-expert")
TOLERANCE = 1e-10


pytestmark = pytest.mark.usefixtures("x64")


def tokens_of(trace):
    return [token for record in trace for token in record.emitted]


def open_decoder(target, engine, mode="ar", *, cache=0, store=None):
    """A decoder with this many experts cached (None: all, as the resident engine needs it)."""
    draft = draft_of(target) if mode == "draft-expert" else None
    size = np.dtype(np.float64).itemsize * int(np.prod(target.config.expert_shape))
    cache = None if engine == "resident" or cache is None else cache * size
    return Decoder(target, draft=draft, offload=Offload(cache, engine=engine), store=store)


def decode_with(decoder, mode, *, prompt=PROMPT, new=16, r=1, prefetch=True, sampling=None, k=1):
    options = DecodeOptions(
        mode=mode,
        r=r,
        max_new_tokens=new,
        sampling=sampling or SamplingConfig(),
        control=ControlConfig(draft_length=k, truncate=False),
        prefetch=prefetch,
    )
    drafter = make_drafter(decoder.engine, options)
    with jax.transfer_guard("disallow"):
        return tuple(decode(decoder.engine, prompt, options, drafter=drafter))


@pytest.fixture(scope="module")
def expected(target):
    with jax.enable_x64(True), open_decoder(target, "host") as decoder:
        return tokens_of(decode_with(decoder, "ar"))


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_has_the_protocols(target, engine):
    with open_decoder(target, engine) as decoder:
        assert isinstance(decoder.engine, EngineLike)
        assert isinstance(decoder.residency, ResidencyLike)
        assert decoder.engine.residency is decoder.residency


@pytest.mark.parametrize(
    ("engine", "mode"),
    [
        ("callback", "top-r"),
        ("resident", "top-r"),
        *(
            pytest.param(engine, mode, marks=pytest.mark.slow)
            for engine in ("callback", "resident")
            for mode in ("ar", "draft-expert")
        ),
    ],
)
def test_every_mode_emits_the_tokens_of_the_host_engine(target, expected, engine, mode):
    with open_decoder(target, engine, mode) as decoder:
        trace = decode_with(decoder, mode)
        events = [load for record in trace for load in record.loads]
        assert tokens_of(trace) == expected
        assert bool(events) == (engine == "callback")
        assert decoder.residency.resident() == set() or engine == "resident"
        rounds = [record for record in trace if record.kind == "round"]
        assert mode == "ar" or 0 < sum(len(record.drafted) for record in rounds)


SAMPLINGS = (SamplingConfig(), SamplingConfig(temperature=1.0, seed=4, top_k=9))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "mode"), [*(("shared", mode) for mode in MODES), ("bare", "top-r")]
)
def test_no_cache_prefetch_or_sampling_changes_a_token(shape, mode):
    target = random_target(shape)
    experts = len(target.config.moe_layers) * target.config.moe.num_experts
    runs = [("resident", None, False)]
    runs += [("callback", cache, on) for cache in (0, experts // 2, None) for on in (False, True)]
    with ExitStack() as stack:
        enter = lambda *a, **k: stack.enter_context(open_decoder(target, *a, **k))  # noqa: E731
        host = enter("host")
        decoders = {(e, c): enter(e, mode, cache=c) for e, c, _ in runs}
        for prompt in (random_prompt(1), random_prompt(130)):
            for sampling in SAMPLINGS:
                common = dict(prompt=prompt, sampling=sampling, new=20)
                reference = tokens_of(decode_with(host, "ar", **common))
                for engine, cache, prefetch in runs:
                    decoder = decoders[engine, cache]
                    trace = decode_with(decoder, mode, r=2, prefetch=prefetch, k=2, **common)
                    assert tokens_of(trace) == reference, (engine, cache, prefetch)


# Passes, and every family.

FAMILIES = [FIRST[family] for family in FIRST if FIRST[family] in MOE_CONFIGS]
TREE = [-1, 0, 0, 1, -1, 2, 4, 4, 6]


@functools.cache
def passes(folder, engine):
    """Nine rows as a prompt, a tree of nine, and a draft row."""
    target = load_target(folder, "float64")
    draft = random_draft(target.config, DraftConfig(width=8), seed=0, identity=target.identity)
    cache = None if engine == "resident" else 0
    with Decoder(target, draft=draft, offload=Offload(cache, engine=engine), capacity=64) as d:
        d.engine.begin()
        d.residency.begin_round()
        prompt = d.engine.target_rows(list(range(3, 12)), start=0)
        tree = d.engine.target_rows(list(range(20, 29)), start=9, parents=TREE)
        return prompt, tree, d.engine.draft_row(7, start=9, drafting=Drafting(r=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [*FAMILIES, "gpt-oss-clamped"],
)
def test_passes_of_every_family_are_those_of_the_host_engine(tmp_path, name):
    """Latent attention and grouped, windows, sinks, biases, dense layers; rows in a tree."""
    layers = {} if name == "gpt-oss-clamped" else {"num_hidden_layers": 2}
    folder = write_folder(tmp_path / "m", raw_config(name, **layers))
    for engine in ("callback", "resident"):
        for result, host in zip(passes(folder, engine), passes(folder, "host"), strict=True):
            np.testing.assert_allclose(result.logits, host.logits, rtol=0, atol=TOLERANCE)
            np.testing.assert_allclose(result.gates, host.gates, rtol=0, atol=TOLERANCE)
            assert (result.routes, result.used) == (host.routes, host.used)


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 3])
def test_experts_that_come_in_groups_add_up_to_the_same(target, expected, monkeypatch, group):
    monkeypatch.setattr(callback_engine, "GROUP", group)
    with open_decoder(target, "callback", "top-r") as decoder:
        assert tokens_of(decode_with(decoder, "top-r", r=2)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["int4", "fp8"])
def test_quantised_experts_are_unpacked_in_the_step(encoding):
    stored, plain = quantised(random_target("bare"), encoding)
    with open_decoder(plain, "host") as decoder:
        reference = tokens_of(decode_with(decoder, "ar"))
    for engine in ("callback", "resident"):
        offload = Offload(None if engine == "resident" else 0, unpack="device", engine=engine)
        with Decoder(stored, offload=offload) as decoder:
            assert (decoder.engine.residency.packing is None) == (engine == "resident")
            assert tokens_of(decode_with(decoder, "top-r")) == reference


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["callback", "resident"])
def test_after_warm_up_nothing_compiles_and_warm_up_loads_nothing(engine):
    """Of dimensions that no other test uses, so that nothing has been compiled before."""
    config = dataclasses.replace(random_target("bare").config, width=28, vocab_size=52)
    target = random_target(config)
    for mode in ("top-r", "draft-expert")[engine == "callback" :]:
        options = DecodeOptions(
            mode=mode, max_new_tokens=12, control=ControlConfig(draft_length=2, truncate=False)
        )
        with open_decoder(target, engine, mode) as decoder:
            with compilations() as compiled:
                decoder.warm_up(options)
            assert compiled and not decoder.residency.take_events()
            with compilations() as compiled:
                for length in (1, 130):
                    decoder.run(random_prompt(length, vocab=52), options)
            assert compiled == [], mode


# Faults.


def test_reads_that_fail_once_are_retried(target, expected):
    failed = set()

    def first_time(pair):
        if pair not in failed:
            failed.add(pair)
            raise OSError("try again")

    store = Troubled(store_of(target), first_time)
    with open_decoder(target, "callback", "top-r", store=store) as decoder:
        assert tokens_of(decode_with(decoder, "top-r")) == expected
        assert decoder.residency.stager.retried_reads == len(failed) > 8


def test_the_callbacks_own_error_comes_out_and_the_decoder_lives_on(target, expected, caplog):
    broken = {(2, 3)}

    def never(pair):
        if pair in broken:
            raise OSError("bad sector")

    store = Troubled(store_of(target), never)
    with open_decoder(target, "callback", "top-r", store=store) as decoder:
        for _ in range(2):
            with pytest.raises(FailedError, match="layer 2, expert 3: .*bad sector") as failure:
                decode_with(decoder, "top-r")
            assert failure.type is ExpertReadError
        broken.clear()
        assert tokens_of(decode_with(decoder, "top-r")) == expected
    assert not caplog.records  # the runtime has not seen an error


@pytest.mark.parametrize("error", [UsageError("no"), KeyboardInterrupt()], ids=type)
@pytest.mark.parametrize("kind", ["draft", "demand"])
def test_any_error_of_the_residency_is_the_pass_s_own(target, expected, monkeypatch, error, kind):
    with open_decoder(target, "callback", "top-r") as decoder:
        acquire, calls = decoder.residency.acquire, []

        def interrupted(layer, ids, **of):
            calls.append(of["kind"])
            if calls.count(kind) == 3:
                raise error
            return acquire(layer, ids, **of)

        monkeypatch.setattr(decoder.residency, "acquire", interrupted)
        with pytest.raises(type(error)) as raised:
            decode_with(decoder, "top-r")
        assert raised.value is error
        monkeypatch.undo()
        assert tokens_of(decode_with(decoder, "top-r")) == expected


@pytest.mark.slow
def test_a_callback_never_hangs_while_the_machine_is_busy(target):
    """200 passes whose experts are late, with threads that compute all the while."""
    noise, stop = random.Random(0), threading.Event()
    slow = Troubled(store_of(target), lambda pair: time.sleep(noise.random() * 0.001))

    def busy():
        square = np.ones((300, 300))
        while not stop.is_set():
            square @ square

    def many():
        with open_decoder(target, "callback", "top-r", store=slow) as decoder:
            runs = [decode_with(decoder, "top-r", new=20) for _ in range(10)]
        passes = sum(1 + record.draft_passes for trace in runs for record in trace)
        return passes, {tuple(tokens_of(trace)) for trace in runs}

    threads = [threading.Thread(target=busy, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        passes, outcomes = in_time(many)
    finally:
        stop.set()
    assert passes >= 200 and len(outcomes) == 1


# The resident engine's experts.


def test_a_store_is_loaded_whole(target, expected):
    converted = dataclasses.replace(target, routed=None, store=store_of(target))
    loaded = load_resident(converted)
    for layer, stack in target.routed.items():
        np.testing.assert_array_equal(loaded.stacks[layer], stack)
    assert loaded.device_bytes == sum(stack.nbytes for stack in target.routed.values())
    assert loaded.bytes_per_expert * len(loaded.resident()) == loaded.device_bytes
    with open_decoder(converted, "resident") as decoder:
        assert tokens_of(decode_with(decoder, "ar")) == expected
        decoder.close()
        with pytest.raises(FailedError, match="the residency is closed"):
            decode_with(decoder, "ar")


def test_a_store_that_cannot_be_read_is_told_and_leaves_no_thread(target):
    def never(pair):
        if pair == (2, 5):
            raise OSError("bad sector")

    with pytest.raises(ExpertReadError, match="layer 2, expert 5: .*bad sector"):
        load_resident(target, store=Troubled(store_of(target), never))
    assert not transfer_threads()


def test_a_device_cache_that_is_too_small_is_refused(target):
    size = load_resident(target).device_bytes
    load_resident(target, device_cache=size)
    with pytest.raises(UsageError, match="give --device-cache all, or take --engine host"):
        load_resident(target, device_cache=size - 1)


# The programs.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "callback", "strict": True}, "--strict is for --engine host, not callback"),
        ({"engine": "resident", "device_cache": 0}, "--device-cache allows 0;"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(target, options, message):
    with pytest.raises(UsageError, match=message):
        generate(target, [PROMPT], **options)


@pytest.mark.slow
def test_generate_says_which_engine_ran(target, expected):
    for engine in ENGINES:
        (found,) = generate(target, [PROMPT], max_new_tokens=16, engine=engine)
        assert found.stats["engine"] == engine and found.tokens == expected
        assert found.to_json()["stats"]["layout"].startswith("stacks") == (engine == "resident")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["callback", "resident"])
def test_the_programs_take_an_engine(tmp_path, capsys, engine):
    model = str(write_folder(tmp_path / "m", raw_config("no-yarn-all-moe")))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "a", "prompt": [3, 1, 4]}))
    common = ["--max-new-tokens", "4", "--engine", engine, "--draft-length", "2", "--json", "-"]
    with jax.enable_x64(False):
        assert cli.main(["verify", model, "--prompts", str(prompts), *common]) == 0
        assert json.loads(capsys.readouterr().out)["engine"] == engine
        few = ["--prompts", str(prompts), "--device-cache", "1KiB"]
        status = cli.main(["generate", model, *few, *common])
    assert status == (2 if engine == "resident" else 0)
    error = capsys.readouterr().err.splitlines()[-1]
    assert ("give --device-cache all" in error) == (engine == "resident")

"""T2: with strict, a verification's logits have the bits of autoregressive decoding's."""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from dejax import cli, families
from dejax.spec.control import ControlConfig
from infer import verify as program
from infer.decode import decode, make_drafter
from infer.decode_options import DecodeOptions
from infer.decoder import Decoder, Offload
from infer.engines import Watched
from infer.generate import generate
from infer.strict import Bits, compare_bits, strict_rows
from tests.families.configurations import raw_config
from tests.families.random_folder import write_folder
from tests.infer.random_target import draft_of, random_prompt, random_target

PROMPT = random_prompt(9)
NEW = 20
LONGEST = 4  # tokens of a draft
FAMILIES = {"deepseek_v2": "lite", "qwen3_moe": "qwen3-moe", "gpt_oss": "gpt-oss-clamped"}


@functools.cache
def target_of(family, dtype):
    raw = raw_config(FAMILIES[family], eos_token_id=None)
    return random_target(families.model_config(raw), dtype=jnp.dtype(dtype))


def logits_of(target, mode, *, rows, length=LONGEST, truncate=False, r=1):
    """New tokens, the logits that each was chosen from, and the accepted drafts' tokens."""
    draft = draft_of(target) if mode == "draft-expert" else None
    control = ControlConfig(draft_length=length, truncate=truncate)
    options = DecodeOptions(mode=mode, r=r, max_new_tokens=NEW, control=control)
    seen: dict[int, np.ndarray] = {}
    note = lambda at, logits: seen.update({at: logits.copy()})  # noqa: E731
    offload = Offload(device_cache=None)
    with Decoder(target, draft=draft, offload=offload, capacity=64, strict_rows=rows) as decoder:
        # Not `Decoder.run`, which would compile all sizes of which few are needed.
        engine, drafter = decoder.engine, make_drafter(decoder.engine, options)
        trace = tuple(decode(Watched(engine, note), PROMPT, options, drafter=drafter))
    tokens = [token for record in trace for token in record.emitted]
    chosen = np.stack([seen[len(PROMPT) + index] for index in range(NEW)])
    return tokens, chosen, sum(record.accepted for record in trace)


def bits(array):
    return np.frombuffer(array.tobytes(), np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_bitwise_those_of_autoregressive_decoding(family, dtype):
    """Whatever is drafted, kept and rejected; without padding they are not."""
    target, rows = target_of(family, dtype), strict_rows(LONGEST)
    tokens, expected, _ = logits_of(target, "ar", rows=rows)
    runs = [("top-r", dict()), ("top-r", dict(length=2, r=2))]
    runs += [("draft-expert", dict(truncate=True))]
    accepted = 0
    for mode, settings in runs:
        found, logits, count = logits_of(target, mode, rows=rows, **settings)
        assert found == tokens
        assert np.array_equal(bits(logits), bits(expected)), (mode, settings)
        accepted += count
    assert accepted > 0  # so rows beyond the first of a block were compared
    native = logits_of(target, "ar", rows=None)[1]
    drafted = logits_of(target, "top-r", rows=None)[1]
    assert not np.array_equal(bits(native), bits(drafted))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_row_depends_neither_on_its_place_nor_on_the_rows_after_it(dtype):
    target, rows = target_of("deepseek_v2", dtype), strict_rows(LONGEST)
    chain = random_prompt(rows, seed=5, vocab=target.config.vocab_size)
    with Decoder(target, offload=Offload(None), capacity=64, strict_rows=rows) as decoder:
        engine = decoder.engine

        def after(before, block):
            """Logits of a block after rows that went through passes of one row each."""
            engine.begin()
            engine.prefill(PROMPT)
            for index, token in enumerate(before):
                engine.target_rows([token], start=len(PROMPT) + index)
            return engine.target_rows(block, start=len(PROMPT) + len(before)).logits

        whole = after([], chain)
        for place in range(rows):
            alone = after(chain[:place], chain[place : place + 1])
            assert np.array_equal(bits(alone), bits(whole[place : place + 1])), place
            followed = after(chain[:place], [chain[place], *[1] * (rows - 1)])
            assert np.array_equal(bits(followed[:1]), bits(whole[place : place + 1])), place


def test_rows_are_those_of_the_longest_draft():
    assert [strict_rows(length) for length in (1, 2, 4, 8, 32)] == [2, 3, 5, 9, 33]


def test_one_bit_is_a_difference():
    reference, other = Bits(), Bits()
    logits = np.linspace(-1, 1, 7, dtype=np.float32)
    for position in (3, 4, 5):
        reference(0, position, logits)
        other(0, position, logits + 0)
    assert compare_bits(reference, other, [(3, 3)])["logit_rows_differing"] == 0
    negative = np.where(logits == 0, np.float32(-0.0), logits)
    other(0, 4, negative)
    assert np.array_equal(negative, logits)
    assert compare_bits(reference, other, [(3, 3)]) == {"logit_rows": 3, "logit_rows_differing": 1}
    assert compare_bits(reference, other, [(3, 1)]) == {"logit_rows": 1, "logit_rows_differing": 0}


# The program.


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("strict")
    prompts = [{"id": "a", "prompt": [3, 1, 4, 1, 5]}, {"id": "b", "prompt": [9, 2]}]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    return write_folder(folder / "m", raw_config("no-yarn-all-moe", eos_token_id=None))


def verify(model, *more):
    """Exit status and result of the verb on the two prompts."""
    result = model.parent / "result.json"
    result.unlink(missing_ok=True)
    prompts = ["--prompts", str(model.parent / "prompts.jsonl"), "--max-new-tokens", "6"]
    argv = ["verify", str(model), *prompts, "--draft-length", "2", "--json", str(result), *more]
    return cli.main(argv), json.loads(result.read_text()) if result.exists() else None


@pytest.mark.slow
def test_verify_compares_bits_and_tells_the_price(model, capsys):
    status, result = verify(model, "--strict", "--draft", "init")
    assert status == 0 and result is not None
    for row in result["rows"]:
        assert (row["identical"], row["logit_rows"], row["logit_rows_differing"]) == (2, 12, 0)
    (price,) = result["strict_price"]
    assert price["dtype"] == "float32" and price["native_tps"] > 0 and price["strict_tps"] > 0
    said = capsys.readouterr().err
    assert "top-r, float32: 12 rows of logits compared: bitwise equal" in said
    assert "tokens/s in mode ar" in said


@pytest.mark.slow
def test_a_bit_that_differs_fails_the_gate(model, monkeypatch, capsys):
    def spoiled(target, prompts, *, mode, on_logits, **options):
        def told(prompt, position, logits):
            change = mode != "ar" and (prompt, position) == (1, 4)
            on_logits(prompt, position, np.nextafter(logits, 9) if change else logits)

        return generate(target, prompts, mode=mode, on_logits=told, **options)

    monkeypatch.setattr(program, "generate", spoiled)
    status, result = verify(model, "--strict")
    assert status == 1 and result is not None
    assert result["rows"][0]["logit_rows_differing"] == 1 and result["rows"][0]["identical"] == 2
    assert "logits differ from autoregressive decoding: top-r in float32" in capsys.readouterr().err


def test_strict_is_refused_with_other_engines(model, capsys):
    for verb in (["verify", str(model)], ["generate", str(model), "--prompt", "x"]):
        assert cli.main([*verb, "--strict", "--engine", "resident"]) == 2
        assert "--strict is for --engine host, not resident" in capsys.readouterr().err


@pytest.mark.slow
def test_generate_says_that_it_was_strict():
    target = target_of("deepseek_v2", "float32")
    found = [
        generate(target, [PROMPT], mode=mode, max_new_tokens=NEW, strict=True, device_cache=None)
        for mode in ("ar", "top-r")
    ]
    assert found[0][0].tokens == found[1][0].tokens
    assert [generation.stats["strict_rows"] for (generation,) in found] == [9, 9]

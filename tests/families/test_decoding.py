"""Every family with routed experts through the engine: in float64, drafts change no token."""

import jax
import numpy as np
import pytest

from dejax.config import DraftConfig
from dejax.draft.expert import random_draft
from dejax.spec.control import ControlConfig
from dejax.spec.sampling import SamplingConfig
from dejax.target import load_target
from infer.decode import decode, make_drafter
from infer.decode_options import DecodeOptions
from infer.decoder import Decoder, Offload, expert_store
from infer.report import stats
from tests.families.configurations import FIRST, MOE_CONFIGS
from tests.families.random_folder import raw_config, write_folder

PROMPT, NEW, CONTEXT = 24, 24, 128
SAMPLINGS = (SamplingConfig(), SamplingConfig(temperature=1.0, seed=3))
NAMES = [n for n in FIRST.values() if n in MOE_CONFIGS] + ["qwen3-moe-sparse", "gpt-oss-clamped"]


def tokens_of(trace) -> list[int]:
    return [token for record in trace for token in record.emitted]


def whole_passes(target, tokens: list[int]) -> list[int]:
    """Greedy tokens, one forward pass over the whole sequence each."""
    tokens = list(tokens)
    for _ in range(NEW):
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(tokens)] = tokens
        tokens.append(int(np.asarray(target(padded))[0, len(tokens) - 1].argmax()))
    return tokens[PROMPT:]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_drafts_change_no_token(tmp_path, name):
    """Nothing cached and half of the experts cached, with prefetch, greedy and sampled.

    The rows pass every window of the small configurations, in the prompt and beyond it.
    """
    folder = write_folder(tmp_path / "m", raw_config(name, eos_token_id=None))
    prompt = np.random.default_rng(0).integers(0, 256, PROMPT).tolist()
    with jax.enable_x64(True):
        target = load_target(folder, "float64")
        draft = random_draft(target.config, DraftConfig(width=8), seed=0, identity=target.identity)

        def decoded(decoder, mode, sampling):
            options = DecodeOptions(
                mode=mode,
                max_new_tokens=NEW,
                sampling=sampling,
                control=ControlConfig(draft_length=4, truncate=False),
                prefetch=mode != "ar",
            )
            drafter = make_drafter(decoder.engine, options)
            return tuple(decode(decoder.engine, prompt, options, drafter=drafter))

        with Decoder(target, capacity=CONTEXT) as decoder:
            expected = [tokens_of(decoded(decoder, "ar", sampling)) for sampling in SAMPLINGS]
        assert expected[0] == whole_passes(target, prompt)
        store = expert_store(target, Offload())
        half = len(target.config.moe_layers) * target.config.moe.num_experts // 2
        for cached in (0, half):
            offload = Offload(device_cache=cached * store.bytes_per_expert)
            with Decoder(target, draft=draft, offload=offload, capacity=CONTEXT) as decoder:
                traces = [decoded(decoder, "draft-expert", sampling) for sampling in SAMPLINGS]
            assert [tokens_of(trace) for trace in traces] == expected
            counts = stats([record for trace in traces for record in trace])
            assert 0.05 < counts["acceptance_rate"] < 0.95  # both ends of a draft are met

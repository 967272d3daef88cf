"""Every family against `transformers` (eager, float32): logits and experts, however computed."""

import jax
import numpy as np
import pytest

from dejax import families
from dejax.target import load_target
from tests.families import reference
from tests.families.cached_rows import CachedRows
from tests.families.configurations import CONFIGS, DEEPSEEK_V2, FAMILIES, FIRST
from tests.families.parity import (
    TOKENS,
    TOLERANCE,
    assert_same,
    assert_same_experts,
    difference,
    run,
)

PROMPT, SLOTS = 40, 104


def slow_unless(fast) -> list:
    """All configurations, those marked slow that are not in `fast`."""
    return [n if n in fast else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS]


@pytest.mark.parametrize("name", slow_unless(FIRST.values()))
def test_whole_sequences(case, name):
    this = case(name)
    assert_same(this.ours, this.logits)
    assert_same_experts(this.our_ids, this.ids)


@pytest.mark.parametrize("name", slow_unless({"gpt-oss"}))
def test_the_public_call_computes_what_its_tapped_layers_do(case, name):
    assert_same(case(name).target(TOKENS), case(name).logits)


@pytest.fixture(scope="module")
def prefilled(case):
    """By name: rows of our target with a cache of the first PROMPT tokens of either sequence."""

    def make(name, row):
        rows = CachedRows(case(name).target, SLOTS, rows=PROMPT)
        return rows, rows(TOKENS[row, :PROMPT].tolist(), 0)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_then_token_by_token(case, prefilled, name):
    """Rows over the cache give the logits and the experts of the whole sequence."""
    rows, logits = prefilled(name, 0)
    later = [rows([token], PROMPT + i) for i, token in enumerate(TOKENS[0, PROMPT:].tolist())]
    assert_same(np.concatenate([logits, *later]), case(name).logits[0])
    ours = {layer: np.concatenate(ids) for layer, ids in rows.ids.items()}
    assert_same_experts(ours, {layer: ids[0] for layer, ids in case(name).ids.items()})


@pytest.mark.parametrize("name", slow_unless(DEEPSEEK_V2))
def test_a_tree_of_rows_is_its_chains(case, prefilled, name):
    """Each node of a tree gets the logits and experts that it has as the end of its own chain."""
    parents = [-1, 0, 0, 1, 1, 2, 5, -1]
    nodes = np.random.default_rng(1).integers(0, 256, len(parents)).tolist()
    chains: list[list[int]] = []
    for node, parent in enumerate(parents):
        chains.append([*(chains[parent] if parent >= 0 else []), node])
    ancestors = np.array([[node in chain for node in range(len(parents))] for chain in chains])
    rows, _ = prefilled(name, 1)
    ours = rows(nodes, PROMPT, ancestors)
    for node, chain in enumerate(chains):
        sequence = [*TOKENS[1, :PROMPT], *(nodes[i] for i in chain)]
        logits, ids = reference.run(case(name).model, np.array([sequence]))
        assert_same(ours[node], logits[0, -1])
        chosen = {layer: blocks[-1][node] for layer, blocks in rows.ids.items()}
        assert_same_experts(chosen, {layer: expected[0, -1] for layer, expected in ids.items()})


@pytest.mark.slow
def test_the_releases_window_and_a_context_beyond_it(tmp_path):
    """A window of 128, as gpt-oss has it: whole, and by a cache filled beyond it row by row."""
    length, filled = 224, 212
    sizes = dict(sliding_window=128, max_position_embeddings=512)
    model = reference.random_model("gpt-oss", **sizes)
    target = load_target(reference.save(model, tmp_path / "m"))
    assert target.config.window == 128
    tokens = np.random.default_rng(0).integers(0, 256, (1, length))
    expected, ids = reference.run(model, tokens)
    ours, our_ids = run(target, tokens)
    # The longer the rows, the more there is to round.
    assert difference(ours, expected) <= 2 * TOLERANCE
    assert_same_experts(our_ids, ids)
    rows = CachedRows(target, length + filled, rows=filled)
    rows(tokens[0, :filled].tolist(), 0)
    later = [rows([token], filled + i) for i, token in enumerate(tokens[0, filled:].tolist())]
    assert difference(np.concatenate(later), expected[0, filled:]) <= 2 * TOLERANCE
    model.config.sliding_window = 129
    assert difference(ours, reference.logits(model, tokens)) > 50 * TOLERANCE


def test_float64(case):
    this = case("no-yarn-all-moe")
    with jax.enable_x64(True):
        logits = load_target(this.folder, "float64")(TOKENS)
    assert logits.dtype == np.float64
    # The reference routes in float32 always, so that its own float64 is no better than this.
    assert_same(logits, this.logits)


def test_every_family_is_here():
    assert set(FAMILIES) == set(families.FAMILIES)


@pytest.mark.parametrize("name", slow_unless(FIRST.values()))
def test_the_config_file_of_the_reference_says_the_same(case, name):
    """Keys left out have the reference's defaults: they are in the file that it writes."""
    assert case(name).target.config == families.model_config(CONFIGS[name])

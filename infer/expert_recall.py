"""How well the experts of drafted tokens are foretold: recall by depth of every predictor.

All predictors are asked about the same nodes of the same rounds: a tree that is one level deeper
than what is scored, so that the draft router has seen every scored node, is drafted and its most
confident nodes are verified, which tells what each of them really used.
"""

import statistics
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from dejax.spec.confidence import ByProbability
from dejax.spec.expert_use import ExpertUse, Flat
from dejax.spec.rules import make_rule
from dejax.spec.sampling import SamplingConfig
from dejax.spec.tree import Node, Paid, accepted_path, most_confident
from dejax.spec.tree_options import parse_tree
from infer.decode import decode
from infer.decode_options import DecodeOptions
from infer.decoder import Decoder
from infer.node_predictor import NodePredictor
from infer.timing import Timings
from infer.trace import Round
from infer.tree_drafter import TreePhase

TREE, DEPTHS = "2x5:30", 4
NAMES = ("persistence", "table", "router, no pass", "trained", "router")
"""Of the draft router: what it says of a node that it has not seen, and of one that it has."""


@dataclass
class _Look:
    """Chooses the most confident nodes and remembers all: `dejax.spec.tree.ChooseNodes`."""

    nodes: Sequence[Node] = ()
    kept: Sequence[int] = ()
    root: frozenset = field(default_factory=frozenset)

    def __call__(self, nodes: Sequence[Node], most: int, paid: Paid) -> Collection[int]:
        self.nodes, self.root = nodes, paid.root
        self.kept = sorted(most_confident(nodes, most))
        return self.kept


def recall_by_depth(
    decoder: Decoder, prompts: Sequence[Sequence[int]], *, max_new_tokens: int
) -> list[dict[str, Any]]:
    """A row for each depth, of all verified nodes and of the accepted ones.

    Recall is the share of the layer-experts that a node used which were among as many predicted
    ones, the mean over nodes.

    Args:
      decoder: with draft experts and a trained predictor.
    """
    predictor = decoder.engine.predictor
    assert predictor is not None
    use = ExpertUse(predictor.grid)
    found: dict[tuple[str, int], list[list[float]]] = {}
    for prompt in prompts:
        for record, look, before in _rounds(decoder, prompt, max_new_tokens):
            path = accepted_path(record.drafted, record.parents, record.emitted[: record.accepted])
            for place, row in enumerate(look.kept, start=1):
                node = look.nodes[row - 1]
                if node.depth > DEPTHS or node.routes is None:  # an end token, or no room left
                    continue
                needed = predictor.grid.flat(record.rows_routes[place])
                told = _predictions(node, look, use)
                recalls = [float(np.isin(needed, told[name]).mean()) for name in NAMES]
                found.setdefault(("all", node.depth), []).append(recalls)
                if place in path:
                    found.setdefault(("accepted", node.depth), []).append(recalls)
            use.observe([before, *record.drafted], record.rows_routes, (0, *path))
    return [
        {"nodes": among, "depth": depth, "count": len(rows)}
        | dict(zip(NAMES, np.mean(rows, axis=0).tolist(), strict=True))
        for (among, depth), rows in sorted(found.items())
    ]


def _rounds(
    decoder: Decoder, prompt: Sequence[int], max_new_tokens: int
) -> Iterator[tuple[Round, _Look, int]]:
    """Rounds of a greedy decode that drafted, each with its nodes and its pending token."""
    engine, look = decoder.engine, _Look()
    vocab = engine.target.config.vocab_size
    rule = make_rule("match", SamplingConfig(), sample=0, vocab_size=vocab)
    assert engine.draft is not None
    options = DecodeOptions(
        mode="draft-expert",
        r=max(1, engine.draft.config.top_r),
        tree=parse_tree(TREE),
        max_new_tokens=max_new_tokens,
        stop_at_eos=False,
    )
    decoder.warm_up(options)
    phase = TreePhase(
        engine,
        options.tree,
        options.r,
        ByProbability(rule.draft),
        Timings(),
        prefetch=False,
        eos_ids=(),
        choose=look,
        predictor=engine.predictor,
    )
    pending = -1
    for record in decode(engine, prompt, options, drafter=phase):
        if record.drafted:
            yield record, look, pending
        pending = record.emitted[-1]


def _predictions(node: Node, look: _Look, use: ExpertUse) -> dict[str, Flat]:
    grid = use.grid
    parent = look.nodes[node.parent - 1].routes if node.parent else look.root
    assert parent is not None and node.routes is not None and node.predicted is not None
    last, known = use.last(), use.of_token(node.token)
    last = grid.flat(look.root) if last is None else last
    values = (
        last,
        last if known is None else known,
        grid.flat(parent) if known is None else known,
        node.predicted,
        grid.flat(node.routes),
    )
    return dict(zip(NAMES, values, strict=True))


def prediction_cost(predictor: NodePredictor, *, count: int = 64, repeats: int = 30) -> dict:
    """Median microseconds of predicting `count` nodes: of the device's step, and of all of it."""
    grid, width = predictor.grid, predictor.width
    generator = np.random.default_rng(0)
    states = list(generator.standard_normal((count, width)))
    first = np.arange(len(grid.layers), dtype=np.int32)[:, None] * grid.experts
    chosen = np.arange(grid.top_k, dtype=np.int32)
    routes = [
        grid.pairs((first + (chosen + parent) % grid.experts).ravel())
        for parent in range(count // 2)
    ]
    parents = routes * 2
    predictor.warm_up(count)
    seconds, on_device = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        inputs = predictor.inputs(states, range(count), parents, count)
        placed = jax.device_put(inputs)
        jax.block_until_ready(placed)
        stepped = time.perf_counter()
        found = predictor.step(placed)
        jax.block_until_ready(found)
        on_device.append(time.perf_counter() - stepped)
        jax.device_get(found)
        seconds.append(time.perf_counter() - began)
    whole, device = statistics.median(seconds) * 1e6, statistics.median(on_device) * 1e6
    return {"candidates": count, "device_us": device, "host_us": whole - device}

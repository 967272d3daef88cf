"""A target's tensors under llama.cpp's names, in its orders of rows, read one at a time.

Names are made from the paths of the arrays in `Transformer`, so that families need no tables here.
What differs from the checkpoint: `kv_b_proj` of MLA is split in two, experts are stacked, rows of
queries and keys are interleaved where llama.cpp rotates neighbours.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from dejax.ckpt.hf_weights import abstract_model, array_paths
from dejax.ckpt.tensor_files import read_tensor
from dejax.config import MLAConfig, ModelConfig
from dejax.export.fold import Neurons, joined
from dejax.export.gguf_config import architecture
from dejax.export.gguf_file import Piece
from dejax.export.source import Source
from dejax.nn.rope import inverse_frequencies

_ROOT = {"embedding": "token_embd.weight", "norm.weight": "output_norm.weight"}
_ROOT |= {"head": "output.weight"}
_BLOCK = {
    "input_norm": "attn_norm",
    "attention.q_proj": "attn_q",
    "attention.k_proj": "attn_k",
    "attention.v_proj": "attn_v",
    "attention.o_proj": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention.q_a_proj": "attn_q_a",
    "attention.q_a_layernorm": "attn_q_a_norm",
    "attention.q_b_proj": "attn_q_b",
    "attention.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "attention.kv_a_layernorm": "attn_kv_a_norm",
    "mlp_norm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "shared.gate_proj": "ffn_gate_shexp",
    "shared.up_proj": "ffn_up_shexp",
    "shared.down_proj": "ffn_down_shexp",
    "router": "ffn_gate_inp",
}
_OTHER = {
    "attention.sinks": "attn_sinks.weight",
    "router.selection_bias": "exp_probs_b.bias",
}
_DIVISORS = "rope_freqs.weight"
_EXPERTS = ("gate", "up", "down")
OWN_HEAD = ("gpt-oss", "olmoe")
"""Architectures that take no head from the embedding."""

_POST_NORM = ("gpt-oss", "glm4moe")  # call the norm before the feed-forward by another name

Shape = tuple[int, ...]
Change = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class _Part:
    """A tensor made from one array of the checkpoint."""

    name: str
    shape: Shape
    change: Change


def shapes(config: ModelConfig, joining: Neurons | None = None) -> dict[str, Shape]:
    """Name -> shape of every tensor; `joining` neurons lie behind those of the shared experts."""
    rope = config.attention.rope
    found = {} if _divisors(config) is None else {_DIVISORS: (rope.dim // 2,)}
    found |= {part.name: part.shape for _, part in _parts(config, joining or {})}
    for layer in config.moe_layers:
        e, f, d = config.moe.num_experts, config.moe.expert_width, config.width
        for kind, shape in zip(_EXPERTS, ((f, d), (f, d), (d, f)), strict=True):
            name = f"blk.{layer}.ffn_{kind}_exps"
            found[f"{name}.weight"] = (e, *shape)
            if config.moe.expert_bias:
                found[f"{name}.bias"] = (e, shape[0])
    return found


def pieces(source: Source, joining: Neurons | None = None) -> Iterator[Piece]:
    """Every tensor's numbers, one array of the checkpoint or one expert in memory at a time."""
    config = source.plan.config
    divisors = _divisors(config)
    if divisors is not None:
        yield Piece(_DIVISORS, divisors)
    for path, part in _parts(config, joining or {}):
        yield Piece(part.name, part.change(read_tensor(source.plan.resident[path])))
    for layer in config.moe_layers:
        for expert in range(config.moe.num_experts):
            for name, array in _expert_arrays(config, source.expert(layer, expert)):
                yield Piece(f"blk.{layer}.{name}", array, index=expert)


def _divisors(config: ModelConfig) -> np.ndarray | None:
    """What each pair's frequency is divided by [dim / 2], if anything."""
    rope = config.attention.rope
    if rope.llama3 is None and rope.divisors is None:
        return None
    plain = dataclasses.replace(rope, llama3=None, divisors=None)
    return (inverse_frequencies(plain) / inverse_frequencies(rope)).astype(np.float32)


def _expert_arrays(config: ModelConfig, record: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """(name below the layer, array) of one expert's record."""
    f, d = config.moe.expert_width, config.width
    gate, up, down = record[:, :f, :d]
    for kind, matrix in zip(_EXPERTS, (gate, up, down.T), strict=True):
        yield f"ffn_{kind}_exps.weight", matrix
    if config.moe.expert_bias:
        biases = record[0, :f, d], record[1, :f, d], record[2, f, :d]
        for kind, bias in zip(_EXPERTS, biases, strict=True):
            yield f"ffn_{kind}_exps.bias", bias


def _parts(config: ModelConfig, joining: Neurons) -> Iterator[tuple[str, _Part]]:
    """(path of an array, a tensor made from it), for all arrays but the routed experts."""
    own_head = config.tied and architecture(config) in OWN_HEAD
    for path, leaf in array_paths(abstract_model(config)[1]).items():
        shape = tuple(leaf.shape)
        if path in _ROOT:
            yield path, _Part(_ROOT[path], shape, _same)
            if path == "embedding" and own_head:
                yield path, _Part(_ROOT["head"], shape, _same)
            continue
        _, layer, rest = path.split(".", 2)
        for part in _layer_parts(config, rest, shape, joining.get(int(layer))):
            yield path, dataclasses.replace(part, name=f"blk.{layer}.{part.name}")


def _layer_parts(
    config: ModelConfig, rest: str, shape: Shape, neurons: np.ndarray | None
) -> list[_Part]:
    """The tensors made from one array of a layer, named below the layer."""
    a = config.attention
    stem, kind = rest.rsplit(".", 1)
    if rest in _OTHER:
        return [_Part(_OTHER[rest], shape, _same)]
    if stem == "attention.kv_b_proj":
        assert isinstance(a, MLAConfig)
        keys, values = (a.heads, a.kv_rank, a.nope_dim), (a.heads, a.value_dim, a.kv_rank)
        change = partial(_up_projection, config=a)
        return [
            _Part("attn_k_b.weight", keys, partial(change, values=False)),
            _Part("attn_v_b.weight", values, partial(change, values=True)),
        ]
    name = _BLOCK[stem]
    if stem == "mlp_norm" and architecture(config) in _POST_NORM:
        name = "post_attention_norm"
    if stem.startswith("shared.") and neurons is not None:
        axis, added = int(stem.endswith("down_proj")), neurons.shape[1]
        shape = tuple(n + added * (i == axis) for i, n in enumerate(shape))
        return [_Part(f"{name}.{kind}", shape, partial(joined, stem, neurons=neurons))]
    return [_Part(f"{name}.{kind}", shape, _row_change(config, stem))]


def _row_change(config: ModelConfig, stem: str) -> Change:
    """How rows of queries and keys are reordered: to neighbours where llama.cpp rotates those."""
    a = config.attention
    if isinstance(a, MLAConfig):
        if a.rope.interleaved:
            return _same
        if stem in ("attention.q_proj", "attention.q_b_proj"):
            return partial(interleaved_rows, heads=a.heads, rotated=a.rope.dim)
        if stem == "attention.kv_a_proj_with_mqa":
            return partial(interleaved_rows, heads=1, rotated=a.rope.dim)
    elif architecture(config) == "llama" and stem in ("attention.q_proj", "attention.k_proj"):
        heads = a.heads if stem == "attention.q_proj" else a.kv_heads
        return partial(interleaved_rows, heads=heads, rotated=a.head_dim)
    return _same


def interleaved_rows(array: np.ndarray, *, heads: int, rotated: int) -> np.ndarray:
    """Rows [heads * M, ...], the last `rotated` of each head from half-split to interleaved."""
    rows = array.reshape(heads, -1, *array.shape[1:])
    halves = rows[:, -rotated:].reshape(heads, 2, -1, *array.shape[1:])
    turned = halves.swapaxes(1, 2).reshape(heads, rotated, *array.shape[1:])
    return np.concatenate([rows[:, :-rotated], turned], axis=1).reshape(array.shape)


def _up_projection(array: np.ndarray, *, config: MLAConfig, values: bool) -> np.ndarray:
    """One half of kv_b_proj: keys [H, C, M], transposed, or values [H, W, C]."""
    rows = array.reshape(config.heads, -1, config.kv_rank)
    return rows[:, config.nope_dim :] if values else rows[:, : config.nope_dim].swapaxes(1, 2)


def _same(array: np.ndarray) -> np.ndarray:
    return array

"""Targets, and drafters as models of their own, as Hugging Face folders in shards.

What is written is what `transformers` and `dejax.load_target` read without further code: the
checkpoint's own tensors, or those of the draft path as an ordinary model (`dejax.export.fold`).
"""

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import dejax
from dejax import families
from dejax.ckpt.draft_state import draft_facts
from dejax.ckpt.hf_weights import resident_keys
from dejax.ckpt.tensor_files import (
    INDEX_FILE,
    SINGLE_FILE,
    read_json,
    read_tensor,
    write_tensors,
)
from dejax.config import ModelConfig
from dejax.draft.expert import Draft
from dejax.export.fold import Neurons, fold, joined
from dejax.export.provenance import licence, without_folders, without_origin
from dejax.export.source import Source, open_source
from dejax.target import Outline, model_folder

DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
"""What `--dtype` names."""

_NOT_WRITTEN = ("quantization_config", "auto_map", "torch_dtype")
"""Keys of a configuration that are about another form of the weights, or another code."""


@dataclass(frozen=True)
class Tensor:
    """A tensor to be written: what it will be, and how its numbers are read."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class Folder:
    """A model folder before it is written: its `config.json` and its tensors, in their order."""

    config: dict[str, Any]
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def write(
        self, folder: Path, most: int | None, advance: Callable[[int], None] = lambda count: None
    ) -> int:
        """Writes configuration and weights into an empty folder; returns the number of files.

        A file holds at most `most` bytes of tensors (None: any number), but at least one tensor.
        """
        parts = shards(self.tensors, most)
        names = [SINGLE_FILE]
        if len(parts) > 1:
            count = len(parts)
            names = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        for name, part in zip(names, parts, strict=True):
            by_name = {tensor.name: tensor for tensor in part}
            told = {tensor.name: (tensor.dtype, tensor.shape) for tensor in part}
            write_tensors(folder / name, told, lambda key, t=by_name: _numbers(t[key]), advance)
        if len(parts) > 1:
            pairs = zip(names, parts, strict=True)
            index = {
                "metadata": {"total_size": self.nbytes},
                "weight_map": {tensor.name: name for name, part in pairs for tensor in part},
            }
            _write_json(folder / INDEX_FILE, index)
        _write_json(folder / "config.json", self.config)
        return len(parts)


def shards(tensors: tuple[Tensor, ...], most: int | None) -> list[list[Tensor]]:
    """Tensors in their order, in groups of at most `most` bytes; a larger one is alone."""
    parts: list[list[Tensor]] = [[]]
    room = most
    for tensor in tensors:
        if room is not None and parts[-1] and tensor.nbytes > room:
            parts.append([])
            room = most
        parts[-1].append(tensor)
        room = None if room is None else room - tensor.nbytes
    return parts


def target_folder(model: str | Path, outline: Outline, dtype: str | None = None) -> Folder:
    """The target itself, from a Hugging Face or a converted folder.

    Args:
      outline: what was read of the model; dtype: a key of `DTYPES`, None is what is stored.

    Raises:
      UsageError: as `load_target`.
    """
    return _folder(model, outline, dtype, outline.config, {}, {})


def draft_model_folder(
    model: str | Path, outline: Outline, draft: Draft, dtype: str | None = None
) -> Folder:
    """Shared + top-r + draft expert as a model of its own (arguments as `target_folder`).

    Raises:
      UsageError: as `load_target`, or the draft path is no such model exactly (`fold`).
    """
    folded, neurons = fold(outline.config, draft)
    told = {
        "draft": draft_facts(draft.config),
        "training": without_folders(dict(draft.training)),
    }
    return _folder(model, outline, dtype, folded, neurons, told)


def _folder(
    model: str | Path,
    outline: Outline,
    dtype: str | None,
    described: ModelConfig,
    neurons: Neurons,
    told: dict[str, Any],
) -> Folder:
    place = model_folder(model)
    source = open_source(place)
    wanted = None if dtype is None else np.dtype(jnp.dtype(DTYPES[dtype]))
    tensors = tuple(_tensors(source, wanted, neurons))
    raw = without_folders(without_origin(read_json(place / "config.json")))
    raw = {key: value for key, value in raw.items() if key not in _NOT_WRITTEN}
    raw |= {"dtype": tensors[0].dtype.name}
    if neurons:
        raw |= _folded_keys(raw, described)
    assert families.model_config(raw) == described, "the written configuration is another one"
    origin = {"version": dejax.__version__, "target": outline.identity} | told
    return Folder(raw | {"dejax": origin | licence(place / "README.md")}, tensors)


def _folded_keys(raw: dict[str, Any], folded: ModelConfig) -> dict[str, Any]:
    """What a folded drafter's `config.json` has otherwise than its target's."""
    moe = folded.moe
    keys: dict[str, Any] = {
        "num_experts_per_tok": moe.top_k,
        "n_shared_experts": moe.shared_width // moe.expert_width,
        "norm_topk_prob": False,
    }
    if raw.get("topk_method") == "group_limited_greedy" and moe.groups == 1:
        keys["topk_method"] = "greedy"
    return keys


def _tensors(source: Source, wanted: np.dtype | None, neurons: Neurons) -> Iterator[Tensor]:
    """Every tensor under its name in a checkpoint; one array or one expert is read at a time.

    Where a family's experts lie in one tensor a layer, that is read whole.
    """
    config = source.plan.config
    for key, path in resident_keys(config).items():
        entry = source.plan.resident[path]
        # A selection bias is a float32 buffer in `transformers` whatever the weights are.
        dtype = entry.numbers if wanted is None else wanted
        if path.endswith("selection_bias"):
            dtype = np.dtype(np.float32)
        tensor = Tensor(key, entry.shape, dtype, functools.partial(read_tensor, entry))
        yield _widened(tensor, path, neurons)
    for layer in config.moe_layers:
        yield from _expert_tensors(source, layer, wanted)


def _widened(tensor: Tensor, path: str, neurons: Neurons) -> Tensor:
    """A tensor of the shared experts with the neurons of its layer behind its own."""
    _, _, rest = path.partition("layers.")
    layer, _, rest = rest.partition(".")
    stem, _, kind = rest.rpartition(".")
    if not stem.startswith("shared.") or not neurons:
        return tensor
    added, down = neurons[int(layer)], stem.endswith("down_proj")
    if kind == "bias":
        if down:
            return tensor
        more = added.shape[1]
        read = lambda: np.concatenate([tensor.read(), np.zeros(more, tensor.dtype)])  # noqa: E731
        return replace(tensor, shape=(tensor.shape[0] + more,), read=read)
    f, d = tensor.shape[int(down)] + added.shape[1], tensor.shape[1 - int(down)]
    shape = (d, f) if down else (f, d)
    return replace(tensor, shape=shape, read=lambda: joined(stem, tensor.read(), added))


def _expert_tensors(source: Source, layer: int, wanted: np.dtype | None) -> Iterator[Tensor]:
    config = source.plan.config
    family, prefix = families.family_of(config.family), f"model.layers.{layer}."
    record = functools.lru_cache(maxsize=1)(functools.partial(source.expert, layer))
    dtype = record(0).dtype if wanted is None else wanted
    single = getattr(family, "expert_keys", None)
    if single is None:
        form, count = family.FUSED, config.moe.num_experts
        assert form.unpack is not None
        for place, (key, shape) in enumerate(zip(form.keys, form.shapes(config), strict=True)):

            def read(place: int = place) -> np.ndarray:
                return np.stack([form.unpack(record(expert))[place] for expert in range(count)])

            yield Tensor(prefix + key, shape, dtype, read)
        return
    f, d = config.moe.expert_width, config.width
    for expert in range(config.moe.num_experts):
        keys = zip(single(expert), ((f, d), (f, d), (d, f)), strict=True)
        for place, (key, shape) in enumerate(keys):

            def read_one(expert: int = expert, place: int = place) -> np.ndarray:
                matrix = record(expert)[place]
                return matrix.T if place == 2 else matrix

            yield Tensor(prefix + key, shape, dtype, read_one)


def _numbers(tensor: Tensor) -> Iterator[np.ndarray]:
    array = np.ascontiguousarray(tensor.read()).astype(tensor.dtype, copy=False)
    assert array.shape == tensor.shape, f"{tensor.name}: {array.shape}, planned {tensor.shape}"
    yield array


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

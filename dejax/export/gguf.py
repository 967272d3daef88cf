"""Targets, draft experts and drafters as GGUF files.

Three kinds of file: a *target*, which llama.cpp runs; an *adapter*, the draft experts alone, for
programs that compute the draft path; and a *draft model*, shared + top-r + draft expert as an
ordinary model of llama.cpp's, the draft expert's neurons joining those of the shared experts.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

import dejax
from dejax.ckpt.draft_state import target_facts
from dejax.ckpt.gguf_draft import ADAPTER_TYPE
from dejax.config import ModelConfig
from dejax.draft.expert import Draft
from dejax.errors import UsageError
from dejax.export import gguf_tensors
from dejax.export.fold import Neurons, fold
from dejax.export.gguf_config import ARCHITECTURES, architecture, differences, metadata
from dejax.export.gguf_file import BLOCK, KINDS, Piece, TensorPlan, Value, write_gguf
from dejax.export.gguf_tokenizer import tokenizer_differences, tokenizer_metadata
from dejax.export.provenance import licence, without_folders
from dejax.export.source import Source, open_source
from dejax.target import Outline, load_tokenizer, model_folder

DTYPES = tuple(kind.lower() for kind in KINDS)
"""What `--dtype` names; "mxfp4" is for gpt-oss."""

_STORED = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_EXACT = re.compile(r"ffn_gate_inp|exp_probs_b|rope_freqs|attn_sinks|\.bias$|\.scale$")
"""What stays float32: the router, and what is added or multiplied one by one."""
_ENDS = ("token_embd.weight", "output.weight")


@dataclass(frozen=True)
class Export:
    """A GGUF file before it is written.

    Attributes:
      dtype: what most of its tensors are stored as, a key of `DTYPES`.
      pieces: the numbers, read as they are asked for.
      warnings: what a reader of the file should know, a sentence each.
    """

    architecture: str
    dtype: str
    metadata: dict[str, Value]
    tensors: list[TensorPlan]
    pieces: Callable[[], Iterator[Piece]]
    warnings: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def write(self, path: Path, advance: Callable[[int], None] | None = None) -> None:
        """Writes the file, whole or not at all (`write_gguf`)."""
        parts = self.architecture, self.metadata, self.tensors, self.pieces()
        write_gguf(path, *parts, advance)


def export_target(model: str | Path, outline: Outline, dtype: str | None = None) -> Export:
    """The target itself.

    Args:
      model: a Hugging Face or converted folder, or "tiny"; outline: what was read of it.
      dtype: a key of `DTYPES`; None is what the checkpoint has.

    Raises:
      UsageError: llama.cpp has no place for this configuration or tokenizer, or `dtype` does not
        fit the family.
    """
    return _export_model(model, outline, dtype, outline.config, None)


def export_draft_model(
    model: str | Path, outline: Outline, draft: Draft, dtype: str | None = None
) -> Export:
    """Shared + top-r + draft expert as a model of its own (arguments as `export_target`).

    Raises:
      UsageError: as `export_target`, or the draft path is no such model exactly.
    """
    folded, neurons = fold(outline.config, draft)
    export = _export_model(model, outline, dtype, folded, neurons)
    keys = export.metadata | _draft_metadata(draft)
    name = f"{outline.name} drafter"
    return dataclasses.replace(export, metadata=keys | {"general.name": name})


def export_adapter(
    model: str | Path, outline: Outline, draft: Draft, dtype: str | None = None
) -> Export:
    """The draft experts alone, in float32 unless told otherwise (arguments as `export_target`).

    Raises:
      UsageError: `dtype` is "mxfp4".
    """
    dtype = "f32" if dtype is None else dtype
    if dtype == "mxfp4":
        raise UsageError("mxfp4 is for the experts of gpt-oss; draft experts have none of these")
    arrays = adapter_tensors(draft)
    tensors = [TensorPlan(name, a.shape, _kind(name, a.shape, dtype)) for name, a in arrays.items()]
    keys = _general_metadata(model, outline, dtype) | _draft_metadata(draft)
    keys |= {"general.type": "adapter", "adapter.type": ADAPTER_TYPE}
    for key, value in target_facts(outline.config).items():
        keys[f"dejax.target.{key}"] = value
    return Export(
        architecture=ARCHITECTURES[outline.config.family],
        dtype=dtype,
        metadata=keys,
        tensors=tensors,
        pieces=lambda: (Piece(name, array) for name, array in arrays.items()),
    )


def adapter_tensors(draft: Draft) -> dict[str, np.ndarray]:
    """Name -> array: ffn_gate_draft, ffn_up_draft [F, D], ffn_down_draft [D, F], scale [1]."""
    arrays = {}
    for layer in sorted(draft.experts):
        params = jax.device_get(draft.layer_params(layer))
        gate, up, down = np.asarray(params["weights"], np.float32)
        for kind, matrix in (("gate", gate), ("up", up), ("down", down.T)):
            arrays[f"blk.{layer}.ffn_{kind}_draft.weight"] = matrix
        gamma = np.asarray(params["gamma"], np.float32)
        arrays[f"blk.{layer}.ffn_draft.scale"] = gamma.reshape(1)
    return arrays


def _export_model(
    model: str | Path,
    outline: Outline,
    dtype: str | None,
    described: ModelConfig,
    neurons: Neurons | None,
) -> Export:
    """The checkpoint's tensors, `neurons` joined, with the metadata of `described`."""
    name = architecture(described)
    folder = model_folder(model)
    source = open_source(folder)
    config = source.plan.config
    dtype = _stored_dtype(source) if dtype is None else dtype
    if dtype == "mxfp4" and config.family != "gpt_oss":
        raise UsageError(f"mxfp4 is for the experts of gpt-oss; {config.family} has none of these")
    tokenizer = load_tokenizer(folder)
    keys = _general_metadata(model, outline, dtype) | {"general.type": "model"}
    keys |= metadata(described)
    keys |= tokenizer_metadata(
        tokenizer,
        family=config.family,
        vocab_size=config.vocab_size,
        eos_ids=config.eos_ids,
    )
    found = differences(described) + tokenizer_differences(keys)
    warnings = [f"llama.cpp differs: {line}" for line in found]
    if tokenizer is None:
        warnings.append("the model has no tokenizer: the file takes token ids, not text")
    return Export(
        architecture=name,
        dtype=dtype,
        metadata=keys,
        tensors=[
            TensorPlan(name, shape, _kind(name, shape, dtype))
            for name, shape in gguf_tensors.shapes(config, neurons).items()
        ],
        pieces=lambda: gguf_tensors.pieces(source, neurons),
        warnings=tuple(warnings),
    )


def _stored_dtype(source: Source) -> str:
    """The `--dtype` that a checkpoint has itself; FP8 and converted experts follow the rest."""
    if any(form.numbers is not None for form in source.plan.forms.values()):
        return "mxfp4"
    return _STORED.get(source.plan.resident["embedding"].dtype.name, "f32")


def _kind(name: str, shape: tuple[int, ...], dtype: str) -> str:
    """How one tensor of a file is stored."""
    if len(shape) == 1 or _EXACT.search(name):
        return "F32"
    if dtype == "mxfp4":
        return "MXFP4" if "_exps." in name else "BF16"
    if dtype not in ("q8_0", "q4_0"):
        return dtype.upper()
    if shape[-1] % BLOCK:
        return "F16"
    return "Q8_0" if name in _ENDS else dtype.upper()


def _general_metadata(model: str | Path, outline: Outline, dtype: str) -> dict[str, Value]:
    """What the file is, and of which target."""
    keys: dict[str, Value] = {
        "general.name": outline.name,
        "general.file_type": KINDS[dtype.upper()],
        "dejax.version": dejax.__version__,
        "dejax.target.identity": outline.identity,
        "dejax.target.family": outline.config.family,
    }
    if dtype in ("q8_0", "q4_0", "mxfp4"):
        keys["general.quantization_version"] = 2
    said = licence(model_folder(model) / "README.md")
    return keys | {f"general.{key.replace('_', '.')}": text for key, text in said.items()}


def _draft_metadata(draft: Draft) -> dict[str, Value]:
    training = json.dumps(without_folders(dict(draft.training)), sort_keys=True)
    return {
        "dejax.draft.width": draft.config.width,
        "dejax.draft.top_r": draft.config.top_r,
        "dejax.draft.training": training,
    } | ({"dejax.draft.gates": draft.config.gates} if draft.plain else {})

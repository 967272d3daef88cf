"""A loaded target: configuration, resident weights, routed experts, tokenizer, identity.

Two kinds of folder hold a target. A Hugging Face folder is read whole. A converted folder has the
resident weights in one file and the routed experts in an expert store, and its experts are
streamed, never all held.
"""

import hashlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from dejax import families
from dejax.ckpt import hf_weights
from dejax.ckpt.expert_store import ExpertStore
from dejax.ckpt.gguf_weights import GGUFFile
from dejax.ckpt.tensor_files import read_tensor
from dejax.ckpt.tiktoken_file import TIKTOKEN_FILE, load_tiktoken
from dejax.config import ClampedSwiGLU, ModelConfig
from dejax.draft.path import routed_output
from dejax.errors import UsageError
from dejax.model import (
    Params,
    Transformer,
    embed,
    layer_full,
    logits_of,
    sequence_masks,
    split_layer,
)
from dejax.paths import existing_folder, kind_of, shown

DTYPES = ("float32", "bfloat16", "float16", "float64")
STORE_DIR = "experts"
"""Folder of the expert store inside a converted model."""
BUILT_IN = Path(__file__).parent / "assets" / "tiny"
"""The embedded target."""


@dataclass(frozen=True, eq=False)
class Target:
    """A frozen MoE and what it needs to run.

    Attributes:
      config: its dimensions and rules.
      model: resident weights (everything but the routed experts).
      routed: layer -> [E, 3, F, D], or None when the experts lie in `store`.
      store: the expert store of a converted folder, or None.
      tokenizer: a `transformers` tokenizer, or None when the folder has none.
      identity: hash of configuration and routers, which adapters are bound to.
      name: what to call it in messages.
    """

    config: ModelConfig
    model: Transformer
    routed: dict[int, Float[Array, "E 3 F D"]] | None
    store: ExpertStore | None
    tokenizer: Any
    identity: str
    name: str

    @property
    def compute_dtype(self) -> Any:
        """The dtype of activations: float64 for float64 weights, else float32."""
        held = self.model.embedding[...].dtype
        return jnp.promote_types(held, jnp.float32)

    def layer_experts(self, layer: int) -> Float[Array, "E 3 F D"]:
        """All routed experts of one MoE layer, read from the store if need be."""
        if self.routed is not None:
            return self.routed[layer]
        assert self.store is not None
        store, experts = self.store, range(self.config.moe.num_experts)
        return jnp.asarray(np.stack([store.decode(store.read(layer, e)) for e in experts]))

    def __call__(self, tokens: Any) -> Float[Array, "B T V"]:
        """Next-token logits of whole sequences, each seen as one document from position 0.

        Args:
          tokens: integers [B, T], of any kind of array or as nested lists.

        Raises:
          UsageError: they are not that, a sequence is longer than the context, or an id is outside
            the vocabulary.
        """
        ids = jax.device_put(self._checked(tokens))
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
        masks = sequence_masks(self.config, positions, jnp.zeros_like(ids))
        activation = self.config.moe.activation if self.config.experts else None
        x = embed(self.model, ids, self.compute_dtype)
        for index, layer in enumerate(self.model.layers):
            definition, params = split_layer(layer)
            stack = self.layer_experts(index) if index in self.config.moe_layers else None
            mask = masks.of_layer(self.config.is_windowed(index))
            x = _whole_layer(definition, activation, params, stack, x, positions, mask)
        return logits_of(self.model, x)

    def _checked(self, tokens: Any) -> Int[np.ndarray, "B T"]:
        try:
            ids = np.asarray(jax.device_get(tokens))
        except ValueError:
            raise UsageError(
                "tokens are sequences of unequal length; expected one length"
            ) from None
        if ids.ndim != 2 or ids.size == 0:
            raise UsageError(f"tokens have shape {list(ids.shape)}; expected [batch, length]")
        if not np.issubdtype(ids.dtype, np.integer):
            raise UsageError(f"tokens are {ids.dtype}; expected integers")
        if ids.shape[1] > self.config.context:
            raise UsageError(
                f"{ids.shape[1]} tokens are more than the context of {self.config.context}"
            )
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            wrong, last = ids.min() if ids.min() < 0 else ids.max(), self.config.vocab_size - 1
            raise UsageError(f"token {wrong} is not in the vocabulary; expected 0 to {last}")
        return ids.astype(np.int32)


@partial(jax.jit, static_argnums=(0, 1))
def _whole_layer(
    definition: nnx.GraphDef,
    activation: ClampedSwiGLU | None,
    params: Params,
    stack: Any,
    x: Array,
    positions: Array,
    mask: Array,
) -> Float[Array, "B T D"]:
    """One layer over whole sequences with the full MoE."""

    # A dense layer has no stack (None), and asks for no expert.
    experts = partial(routed_output, stack=stack, block=16, activation=activation)
    layer = nnx.merge(definition, params)
    return layer_full(layer, x, positions=positions, mask=mask, experts=experts)[0]


def target_identity(config: ModelConfig, model: Transformer) -> str:
    """Hash of the configuration and of every router (as float32), as hexadecimal.

    A dense target is told by its embedding instead, rounded to bfloat16.
    """
    routers = (layer.router for layer in model.layers if layer.router is not None)
    arrays = [jax.device_get(router.weight[...]) for router in routers]
    return _identity(config, arrays or [_rounded(jax.device_get(model.embedding[...]))])


def gguf_identity(file: GGUFFile) -> str:
    """`target_identity` of a GGUF file, of which no other weights are read."""
    return _identity(file.config(), [_rounded(file.embedding())])


def _rounded(array: np.ndarray) -> np.ndarray:
    """The same numbers whatever dtype an array is held in."""
    return array.astype(jnp.bfloat16)


def checkpoint_identity(plan: hf_weights.CheckpointPlan) -> str:
    """`target_identity` of a checkpoint, read router by router without loading the rest."""
    paths = (f"layers.{index}.router.weight" for index in plan.config.moe_layers)
    arrays = [read_tensor(plan.resident[path]) for path in paths]
    return _identity(plan.config, arrays or [_rounded(read_tensor(plan.resident["embedding"]))])


def _identity(config: ModelConfig, routers: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256(config.identity().encode())
    for router in routers:
        digest.update(np.asarray(router).astype(np.float32).tobytes())
    return digest.hexdigest()[:32]


def is_gguf(path: str | Path) -> bool:
    """Whether a path names a GGUF file, be it there or not."""
    return Path(path).suffix == ".gguf" and kind_of(path) != "folder"


def model_folder(path: str | Path) -> Path:
    """The folder that `path` names; "tiny" is the embedded target.

    Raises:
      UsageError: it is missing, not a folder, has no `config.json`, or is half converted.
    """
    if str(path) == "tiny":
        return BUILT_IN
    if is_gguf(path):
        raise UsageError(
            f"{shown(path)}: a GGUF file; `dejax generate`, `dejax inspect` and pretrain's setting "
            "start read one, here give a Hugging Face folder"
        )
    folder = existing_folder(path, "a model folder, or the name tiny")
    if kind_of(folder / "config.json") != "file":
        if kind_of(folder / STORE_DIR):
            raise UsageError(
                f"{folder}: the conversion is unfinished; run the same `dejax convert` again"
            )
        raise UsageError(
            f"{shown(folder)}: no config.json; expected a Hugging Face or converted folder"
        )
    return folder


@dataclass(frozen=True)
class Outline:
    """What is known of a target before its weights are read: enough to check a call against it.

    Attributes:
      config, identity, name: as of `Target`.
      converted: whether its experts lie in a store.
    """

    config: ModelConfig
    identity: str
    name: str
    converted: bool


def read_outline(path: str | Path) -> Outline:
    """The outline of a model folder or GGUF file; of its weights only the routers are read.

    Of a dense target the embedding is read, which its identity is made of.

    Raises:
      UsageError: as `load_target`, but for the tokenizer.
    """
    if is_gguf(path):
        file = GGUFFile(Path(path))
        file.names()  # its checks
        return Outline(file.config(), gguf_identity(file), Path(path).name, converted=False)
    folder = model_folder(path)
    config = load_config(folder)
    converted = (folder / STORE_DIR).exists()
    plan = hf_weights.plan_checkpoint(folder, config, resident_only=converted)
    return Outline(config, checkpoint_identity(plan), _name(path, folder), converted)


def _name(path: str | Path, folder: Path) -> str:
    if str(path) == "tiny":
        return "tiny"
    whole = folder.resolve()
    # A run of training keeps the model that it made as `model`: the run's name tells them apart.
    return whole.parent.name if whole.name == "model" else whole.name


def load_config(folder: Path) -> ModelConfig:
    """The configuration of a model folder, from its `config.json`; no weights are needed.

    Raises:
      UsageError: it cannot be read, or asks for what dejax does not compute.
    """
    file = folder / "config.json"
    try:
        return families.model_config(hf_weights.read_json(file))
    except UsageError as error:
        problem = str(error).removeprefix(f"{file}: ").removeprefix("config.json: ")
        raise UsageError(f"{file}: {problem}") from None


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer through `transformers` (without torch), or None if it has none.

    Code that a folder brings along is never run: a tiktoken file is read by dejax itself.

    Raises:
      UsageError: it cannot be read.
    """
    names = ("tokenizer.json", "tokenizer_config.json", TIKTOKEN_FILE)
    there = [name for name in names if (folder / name).exists()]
    if not there:
        return None
    from transformers import AutoTokenizer

    try:
        if TIKTOKEN_FILE in there and "tokenizer.json" not in there:
            tokenizer = load_tiktoken(folder)
        else:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except UsageError:
        raise
    except Exception as error:  # damaged files end in whatever exception they happen to cause
        first_line = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise UsageError(f"{folder}: the tokenizer cannot be read ({first_line})") from None
    tokenizer.model_max_length = sys.maxsize  # lengths are checked against the context, by us
    return tokenizer


def check_dtype(dtype: str) -> Any:
    """The jax dtype of a name in `DTYPES`; UsageError otherwise, or without x64 for float64."""
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is unknown; expected one of {', '.join(DTYPES)}")
    if dtype == "float64" and jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
        raise UsageError("dtype float64 needs JAX's 64-bit mode: set JAX_ENABLE_X64=1")
    return jnp.dtype(dtype)


def load_target(
    path: str | Path,
    dtype: str = "float32",
    *,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Target:
    """Loads a target from a Hugging Face folder, a converted folder, or by the name "tiny".

    Args:
      path: the folder, or "tiny", or a GGUF file of a dense Llama model.
      dtype: what weights are held in; computation is in float32 (float64 for float64).
      on_bytes: told how many bytes each array that is loaded has (not of a GGUF file).

    Raises:
      UsageError: the folder, its configuration or its tensors are not what is expected.
    """
    held = check_dtype(dtype)
    if is_gguf(path):
        return _load_gguf(Path(path), held)
    folder = model_folder(path)
    config = load_config(folder)
    if (folder / STORE_DIR).exists():
        store = ExpertStore.open(folder / STORE_DIR)
        store.check_fits(config)
        plan = hf_weights.plan_checkpoint(folder, config, resident_only=True)
        routed = None
    else:
        store = None
        plan = hf_weights.plan_checkpoint(folder, config)
        routed = {}
        for layer in config.moe_layers:
            routed[layer] = _read_stack(plan, layer, held)
            on_bytes(routed[layer].nbytes)
    model = hf_weights.read_resident(plan, held, on_bytes)
    identity = target_identity(config, model)
    if store is not None and store.identity != identity:
        raise UsageError(
            f"{folder}: the expert store is of target {store.identity}, the resident weights of "
            f"{identity}; convert the model again"
        )
    return Target(
        config=config,
        model=model,
        routed=routed,
        store=store,
        tokenizer=load_tokenizer(folder),
        identity=identity,
        name=_name(path, folder),
    )


def _load_gguf(path: Path, dtype: Any) -> Target:
    file = GGUFFile(path)
    config, model = file.config(), file.read_model(dtype)
    return Target(
        config=config,
        model=model,
        routed={},
        store=None,
        tokenizer=file.tokenizer(),
        identity=target_identity(config, model),
        name=path.name,
    )


def _read_stack(plan: hf_weights.CheckpointPlan, layer: int, dtype) -> Float[Array, "E 3 F D"]:
    config = plan.config
    stack = np.empty((config.moe.num_experts, *config.expert_shape), dtype)
    for expert, record in hf_weights.read_layer_experts(plan, layer, dtype=dtype):
        stack[expert] = record
    return jax.device_put(stack)

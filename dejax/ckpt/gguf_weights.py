"""GGUF files of dense Llama models as targets: configuration, weights and tokenizer.

llama.cpp keeps query and key rows in interleaved order, so that its rotation works on neighbours;
they are put back into the half-split order of the Hugging Face layout here. Quantised tensors are
dequantised by the `gguf` package. Reading is as strict as that of safetensors: a missing, unknown
or misshapen tensor is an error that lists them all.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from dejax import families
from dejax.ckpt.hf_weights import abstract_model, array_paths, resident_keys
from dejax.ckpt.tensor_files import bad_tensors
from dejax.config import GQAConfig, ModelConfig
from dejax.errors import UsageError
from dejax.model import Transformer

ARCHITECTURE = "llama"
_ROOT = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_DIVISORS = "rope_freqs.weight"


class GGUFTensors:
    """A GGUF file open for reading: metadata and tensors, of whatever kind.

    Raises:
      UsageError: `gguf` is not installed, or the file is none.
    """

    def __init__(self, path: Path):
        try:
            import gguf
        except ImportError:
            raise UsageError(
                f"{path}: GGUF files need the gguf package; pip install gguf"
            ) from None
        self.path = path
        self._gguf = gguf
        try:
            self._reader = gguf.GGUFReader(path)
        except FileNotFoundError:
            raise UsageError(f"{path}: no such file; expected a GGUF file") from None
        except Exception as error:  # a damaged file ends in whatever exception it happens to cause
            raise UsageError(f"{path}: not a readable GGUF file ({error})") from None
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def value(self, key: str, default: Any = None) -> Any:
        """A metadata value, or `default`."""
        field = self._reader.get_field(key)
        try:
            return default if field is None else field.contents()
        except Exception as error:  # as above: of a damaged file
            raise UsageError(f"{self.path}: {key} is not readable ({error})") from None

    def numbers(self, name: str) -> np.ndarray:
        """A tensor in float32."""
        tensor = self.tensors[name]
        try:
            array = self._gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise UsageError(
                f"{self.path}: {name} is stored as {kind}, which is not read"
            ) from None
        return array.reshape(tuple(int(n) for n in reversed(tensor.shape)))


class GGUFFile(GGUFTensors):
    """A GGUF file of a dense Llama model.

    Raises:
      UsageError: as `GGUFTensors`, or its architecture is not Llama's.
    """

    def __init__(self, path: Path):
        super().__init__(path)
        architecture = self.value("general.architecture")
        if architecture != ARCHITECTURE:
            raise UsageError(
                f"{path}: architecture {architecture!r}; GGUF files of {ARCHITECTURE!r} are read "
                "(give other models as Hugging Face folders)"
            )

    def raw_config(self) -> dict[str, Any]:
        """The metadata as the content of a Hugging Face `config.json`."""

        def own(key: str, default: Any = None) -> Any:
            value = self.value(f"{ARCHITECTURE}.{key}", default)
            if value is None:
                raise UsageError(f"{self.path}: the key {ARCHITECTURE}.{key} is missing")
            return value

        if own("expert_count", 0):
            raise UsageError(f"{self.path}: a mixture of experts; dense models are read from GGUF")
        scaling = own("rope.scaling.type", "none")
        if scaling != "none":
            raise UsageError(f"{self.path}: rope scaling {scaling!r} is not read; expected none")
        width, heads = own("embedding_length"), own("attention.head_count")
        embedding = self.tensors.get("token_embd.weight")
        vocabulary = int(embedding.shape[1]) if embedding is not None else own("vocab_size")
        return {
            "model_type": "llama",
            "vocab_size": vocabulary,
            "hidden_size": width,
            "intermediate_size": own("feed_forward_length"),
            "num_hidden_layers": own("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": own("attention.head_count_kv", heads),
            "head_dim": own("attention.key_length", width // max(heads, 1)),
            "max_position_embeddings": own("context_length"),
            "rms_norm_eps": own("attention.layer_norm_rms_epsilon"),
            "rope_theta": own("rope.freq_base", 10000.0),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self.tensors,
            "eos_token_id": self.value("tokenizer.ggml.eos_token_id"),
        }

    def config(self) -> ModelConfig:
        """The target's configuration, with the file's own frequency divisors if it has any."""
        config = families.model_config(self.raw_config())
        if _ROPE_DIVISORS not in self.tensors:
            return config
        return config.with_rope_divisors(tuple(self.numbers(_ROPE_DIVISORS).tolist()))

    def read_model(self, dtype: Any) -> Transformer:
        """The weights in `dtype`.

        Raises:
          UsageError: listing every missing, unknown or misshapen tensor.
        """
        config = self.config()
        definition, state = abstract_model(config)
        names = self.names()
        attention = config.attention
        assert isinstance(attention, GQAConfig)

        def load(path: Any, leaf: Any) -> jax.Array:
            name = names[".".join(str(part.key) for part in path)]
            array = self.numbers(name)
            if ".attn_q." in name:
                array = half_split_rows(array, attention.heads)
            if ".attn_k." in name:
                array = half_split_rows(array, attention.kv_heads)
            return jax.device_put(array.astype(dtype))

        pure = nnx.to_pure_dict(state)
        return nnx.merge(definition, jax.tree_util.tree_map_with_path(load, pure))

    def names(self) -> dict[str, str]:
        """Path of every array of the model -> name of its tensor.

        Raises:
          UsageError: listing every missing, unknown or misshapen tensor.
        """
        config = self.config()
        leaves = array_paths(abstract_model(config)[1])
        shapes = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
        names = {path: _gguf_name(key) for key, path in resident_keys(config).items()}
        self._check(names, shapes)
        return names

    def embedding(self) -> np.ndarray:
        """The embedding [V, D] in float32."""
        return self.numbers(_gguf_name("model.embed_tokens.weight"))

    def stored(self) -> tuple[str, int]:
        """How the model's tensors are stored, such as "Q8_0 and F32", and their bytes."""
        tensors = [self.tensors[name] for name in self.names().values()]
        kinds = sorted({tensor.tensor_type.name for tensor in tensors})
        return " and ".join(kinds), sum(int(tensor.n_bytes) for tensor in tensors)

    def _check(self, names: dict[str, str], shapes: dict[str, tuple[int, ...]]) -> None:
        known = {*names.values(), _ROPE_DIVISORS}
        problems = [f"{name}: unknown" for name in self.tensors.keys() - known]
        for path, name in names.items():
            if name not in self.tensors:
                problems.append(f"{name}: missing")
                continue
            found = tuple(int(n) for n in reversed(self.tensors[name].shape))
            if found != shapes[path]:
                problems.append(f"{name}: shape {list(found)}, expected {list(shapes[path])}")
        if problems:
            raise UsageError(f"{self.path}: {bad_tensors(problems)}")

    def tokenizer(self) -> Any:
        """The file's tokenizer and chat template through `transformers`, or None without one."""
        if self.value("tokenizer.ggml.model", "none") == "none":
            return None
        from tokenizers import pre_tokenizers
        from transformers import PreTrainedTokenizerFast
        from transformers.integrations.gguf.gguf_tokenizer_mapping import (
            convert_gguf_tokenizer,
            get_gguf_tokenizer,
        )

        try:
            architecture, parts, options = get_gguf_tokenizer(str(self.path))
            backend, more = convert_gguf_tokenizer(architecture, parts)
            if self.value("tokenizer.ggml.pre") == "smollm":  # which the conversion leaves out
                digits = pre_tokenizers.Digits(individual_digits=True)
                both = [digits, backend.pre_tokenizer]
                backend.pre_tokenizer = pre_tokenizers.Sequence(both)
            return PreTrainedTokenizerFast(tokenizer_object=backend, **options, **more)
        except Exception as error:
            line = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            raise UsageError(f"{self.path}: the tokenizer cannot be read ({line})") from None


def half_split_rows(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * M, ...] of a projection from interleaved to half-split order, head by head."""
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)


def _gguf_name(key: str) -> str:
    """The GGUF name of a Hugging Face key."""
    stem, kind = key.rsplit(".", 1)
    for ours, theirs in _ROOT.items():
        if stem == theirs:
            return f"{ours}.{kind}"
    layer, rest = stem.removeprefix("model.layers.").split(".", 1)
    (ours,) = (ours for ours, theirs in _BLOCK.items() if rest == theirs)
    return f"blk.{layer}.{ours}.{kind}"

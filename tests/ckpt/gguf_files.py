"""GGUF files of a random Llama of `transformers`."""

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_parameters=dict(rope_type="default", rope_theta=5e3),
    tie_word_embeddings=False,
    eos_token_id=2,
)
BLOCK = {
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


def random_llama():
    """A random Llama of `transformers`, eager and float32."""
    config = AutoConfig.for_model("llama", **SIZES)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.2 * noise if "norm" in name else noise * parameter.shape[-1] ** -0.5
    return model


def tensors_of(model) -> dict[str, np.ndarray]:
    """The model's weights under their GGUF names, rows of queries and keys interleaved."""
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}

    def interleaved(array, heads):
        halves = array.reshape(heads, 2, -1, array.shape[1])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)

    result = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    for layer in range(SIZES["num_hidden_layers"]):
        for ours, name in BLOCK.items():
            array = state[f"model.layers.{layer}.{name}.weight"]
            heads = {"attn_q": 4, "attn_k": 2}.get(ours)
            array = array if heads is None else interleaved(array, heads)
            result[f"blk.{layer}.{ours}.weight"] = array
    return result


def write(path: Path, tensors, *, kind="F32", architecture="llama", **more) -> Path:
    """A GGUF file of these tensors, matrices stored as `kind`."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5e3)
    writer.add_string("tokenizer.ggml.model", "none")
    for key, value in more.items():
        getattr(writer, f"add_{key}")(value)
    for name, array in tensors.items():
        stored = gguf.GGMLQuantizationType[kind if array.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

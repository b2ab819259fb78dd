"""Tiny random-weight models of several architectures, in float32. Windows are shorter than the prompts."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 320  # the byte tokenizer's 261, and padding rows of the head

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "qwen2": COMMON,
    "gpt2": {
        "vocab_size": VOCAB_SIZE,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 512,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "gemma3_text": {**COMMON, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
    | {"num_hidden_layers": 4},
}


def tiny_model(architecture: str) -> PreTrainedModel:
    """Return a model whose weights depend on nothing but the architecture."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **ARCHITECTURES[architecture])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    # Fresh weights give nearly uniform rows; larger ones make tokens and windows matter.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model.eval()

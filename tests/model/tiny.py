"""Tiny random-weight models of many architectures, in float32. Windows are shorter than the prompts."""

from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 320  # the byte tokenizer's 261, and padding rows of the head

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

BATCHED: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "qwen2": COMMON,
    "qwen3": COMMON,
    "gemma2": {**COMMON, **WINDOWS, "query_pre_attn_scalar": 8},
    "gemma3_text": {**COMMON, **WINDOWS, "query_pre_attn_scalar": 8},
    "mistral": {**COMMON, "sliding_window": 6},
    "phi3": {**COMMON, "sliding_window": 6},
    "gpt2": {
        "vocab_size": VOCAB_SIZE,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "gpt_neox": {**COMMON, "rotary_pct": 0.5},
    "olmo2": COMMON,
    "mixtral": {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**COMMON, **EXPERTS, "num_experts": 4, "decoder_sparse_step": 1},
    "deepseek_v3": {
        **COMMON,
        **EXPERTS,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}
ONE_AT_A_TIME: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **COMMON,
        **EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}
ONE_AT_A_TIME |= {
    # Its positions come from a 2-D mask.
    "bloom": {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon_h1": {**COMMON, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8},
}
ARCHITECTURES = BATCHED | ONE_AT_A_TIME
EAGER_ONLY = {"gemma2", "bloom"}


@cache
def tiny_model(architecture: str) -> PreTrainedModel:
    """Return a model whose weights depend on nothing but the architecture. Shared: do not change it."""
    config = AutoConfig.for_model(architecture, **ARCHITECTURES[architecture])
    attention = "eager" if architecture in EAGER_ONLY else "sdpa"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    # Fresh weights give nearly uniform rows; larger ones make tokens and windows matter.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model.eval()

"""Tiny random Hugging Face models, built from a configuration: nothing is downloaded."""

from __future__ import annotations

import torch

LLAMA, QWEN3, OLMO2 = "LlamaForCausalLM", "Qwen3ForCausalLM", "Olmo2ForCausalLM"
GEMMA2, GEMMA3 = "Gemma2ForCausalLM", "Gemma3ForCausalLM"
CHAMELEON = "ChameleonForConditionalGeneration"
SHAPE = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
# Image ids are 5 to 36; code n has id 5 + n.
VOCABULARY = {"<image>": 4} | {f"IMGIMG{''.join(chr(65 + int(c)) for c in str(code))}Z": 5 + code for code in range(32)}
VQ = {"base_channels": 32, "channel_multiplier": [1, 2], "num_embeddings": 32, "embed_dim": 8, "latent_channels": 8}


def tiny(architecture: str, dtype: torch.dtype = torch.float64, std: float = 0.1, **fields):
    """Return a model of this class with normal weights of standard deviation `std`, and with a random number from
    -0.3 to 0.3 added to every gain and bias.

    Unit gains hide errors: without gains, RMS over a head commutes with RoPE's rotation.
    """
    import transformers

    kind = getattr(transformers, architecture)
    if architecture.startswith("Chameleon"):
        fields = {"vocabulary_map": VOCABULARY, "vq_config": VQ} | fields
    if architecture.startswith(("Gemma", "Qwen3")):
        fields = {"head_dim": 16} | fields
    config = kind.config_class(**SHAPE | {"initializer_range": std} | fields)
    config._attn_implementation = "eager"  # sdpa does not support a cap
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and "vqmodel" not in name:
                parameter += torch.empty_like(parameter).uniform_(-0.3, 0.3)
    # Convert parameters only: `.to` would also round the rotary frequencies, which from_pretrained leaves in fp32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.eval()


def logits_of(hf_model, ids_BT: torch.Tensor) -> torch.Tensor:
    """Return the logits of a model. Chameleon's forward sets the logits of image ids to the lowest number; here they
    are unchanged."""
    if type(hf_model).__name__.startswith("Chameleon"):
        return hf_model.lm_head(hf_model.model(ids_BT).last_hidden_state)
    return hf_model(ids_BT).logits


def some_ids() -> torch.Tensor:
    """Return two rows of ids, longer than any window."""
    return torch.randint(0, 96, (2, 33), generator=torch.Generator().manual_seed(1))

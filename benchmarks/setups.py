"""The runs that are measured, and their batches. The parser of mmqk.train resolves their configurations."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.flops import step_flops
from benchmarks.harness import Context
from mmqk.config import RunConfig, resolve
from mmqk.data.batch import TokenBatch
from mmqk.data.datamodule import TokenDataModule
from mmqk.data.loader import MicroBatches
from mmqk.model import EarlyFusionTransformer
from mmqk.training.device import resolve_device

# Width, number of layers, number of heads with head_dim 64. With the head tied to the embedding of 32,768 ids the
# models have 25.0, 124.3 and 348.6 million parameters in total. The 124M model needs as many operations per token
# as GPT-2 124M.
SIZES = {"25M": (384, 7, 6), "124M": (768, 14, 12), "350M": (1024, 25, 16)}
QK_NORM = "--model.qk_norm={kind: rms}"
BATCHES = 8  # number of distinct batches that a loop cycles through


def toy(context: Context, *flags: str) -> RunConfig:
    """Return the run of the demonstration on a CPU."""
    threads = f"--threads={context.threads}"
    return resolve([*context.toy, threads, "--trainer.accelerator=cpu", "--quiet", *flags])


def full(size: str, *flags: str, tokens: int = 1024, batch: int = 32, vocabulary: int = 32768) -> RunConfig:
    """Return a run of one of `SIZES` on a GPU: bf16-mixed, compiled, on documents of the dial. Three quarters of
    the ids belong to text."""
    width, layers, heads = SIZES[size]
    text, image = vocabulary * 3 // 4, vocabulary // 4
    half = tokens // 2
    return resolve([
        f"--model.d_model={width}", f"--model.n_layers={layers}", f"--model.n_heads={heads}",
        "--model.tie_embeddings=true", "--data.mix={dial: 1.0}", "--data.workers=4", "--data.val_sequences=32",
        f"--data.dial.vocabulary={{text: {text}, image: {image}}}",
        "--data.dial.entropy={text: 6.0, image: 6.0}",
        f"--data.dial.tokens={{text: {half}, image: {half}}}",
        f"--data.seq_len={tokens}", f"--data.batch_size={batch}", "--optim.lr=6e-4", "--optim.warmup_steps=500",
        "--trainer.precision=bf16-mixed", "--trainer.accelerator=gpu", "--trainer.max_steps=100000", "--quiet",
        "--compile=true", *flags,
    ])  # fmt: skip


def batches_of(run: RunConfig, n: int = BATCHES) -> list[TokenBatch]:
    """Return the first batches that the run trains on, in memory."""
    data = TokenDataModule(run.data, run.seed)
    data.setup()
    made = MicroBatches(data.order, run.data.batch_size, 1, 0, 1, n, run.data.documents_apart)
    return [made[i] for i in range(n)]


def labels_of(batch: TokenBatch) -> Tensor:
    """Return the targets for cross-entropy: -100 at positions that are not trained."""
    return torch.where(batch.target_mask_BT, batch.targets_BT, -100)


def work_of(run: RunConfig) -> dict[str, float]:
    """Return the steps, tokens and flops of one step."""
    B, T = run.data.batch_size, run.data.seq_len
    return {"steps": 1, "tokens": B * T, "flops": step_flops(run.model, B, T)}


def facts_of(run: RunConfig, device: str) -> dict[str, object]:
    """Return the size, precision and kernels of a run, for the text above a table."""
    c = run.model
    return {
        "parameters": parameters_of(run),
        "model": f"d_model {c.d_model}, {c.n_layers} layers, {c.n_heads} heads, {c.vocab_size:,} ids",
        "tokens_a_step": f"{run.data.batch_size} x {run.data.seq_len}",
        "precision": run.trainer.precision,
        "qk_norm": c.qk_norm.kind,
        "attention": resolve_device(run, torch.device(device))["attention"],
        "compiled": run.compile,
    }


def parameters_of(run: RunConfig) -> int:
    """Return the number of parameters; tied parameters count once."""
    with torch.device("meta"):
        return sum(p.numel() for p in EarlyFusionTransformer(run.model, run.backend).parameters())

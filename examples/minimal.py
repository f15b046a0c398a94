"""The whole of mmqk's experiment in one file: shards, tokens, batch, model, loss by modality, optimizer, probe.

`python examples/minimal.py` trains a model of 0.4M parameters on the shipped pictures and captions for 100 steps,
without and with QK-Norm, at a learning rate that is too high on purpose. It prints losses and the largest attention
logits by modality. `mmqk.train` does the same with resumes, ranks, logging and alarms around it.

Shapes: B batch, T tokens, V vocabulary, M modalities.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from mmqk.data.batch import TokenBatch
from mmqk.data.shards.manifest import read_pairs
from mmqk.data.tokens.encode import DocumentEncoder
from mmqk.model import EarlyFusionTransformer, ModelConfig, QKNormConfig
from mmqk.monitors import probe
from mmqk.training.losses import modality_losses, total_loss

DATA = Path(__file__).parents[1] / "data"
MODALITIES = ("text", "image")


def read_documents(shards: Path, tokenizers: Path, count: int) -> tuple[DocumentEncoder, list[np.ndarray]]:
    """Read pairs from tar shards, and return the ids of each document.

    A document is a caption and a picture, `caption <image> 64 codes </image> <eos>`, or the picture first.
    """
    encoder = DocumentEncoder(tokenizers)
    for n, pair in enumerate(islice(read_pairs(shards, "train"), count)):
        encoder.add([pair.caption, pair.image] if n % 2 else [pair.image, pair.caption])
    return encoder, encoder.take()


def make_batch(encoder: DocumentEncoder, documents: list[np.ndarray], seq_len: int) -> TokenBatch:
    """Put each document into one sequence: `<bos>`, the document, padding. Every next token is a trained target."""
    layout = encoder.layout
    ids_BT = torch.full((len(documents), seq_len), layout.pad)
    ids_BT[:, 0] = layout.bos
    for ids_T, document in zip(ids_BT, documents, strict=True):
        ids_T[1 : len(document) + 1] = torch.from_numpy(document[: seq_len - 1].astype(np.int64))
    valid_BT = ids_BT != layout.pad
    target_mask_BT = valid_BT.roll(-1, dims=1)  # position t predicts token t + 1
    target_mask_BT[:, -1] = False
    return TokenBatch(
        ids_BT=ids_BT,
        modality_BT=(ids_BT >= layout.vocab_sizes["text"]).long(),  # the block of an id decides its modality
        target_mask_BT=target_mask_BT,
        valid_BT=valid_BT,
        step_targets=target_mask_BT.sum(),
    )


def train(qk_norm: str, encoder: DocumentEncoder, documents: list[np.ndarray], args: argparse.Namespace) -> None:
    """Train one model with a plain PyTorch loop, and print losses and the largest attention logits."""
    torch.manual_seed(args.seed)
    config = ModelConfig(
        vocab_sizes=encoder.layout.vocab_sizes, d_model=64, n_layers=4, n_heads=4, qk_norm=QKNormConfig(kind=qk_norm)
    )
    model = EarlyFusionTransformer(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    order = np.random.default_rng(args.seed)
    print(f"\nqk_norm={qk_norm}: {sum(p.numel() for p in model.parameters()):,} parameters")
    for step in range(args.steps + 1):
        chosen = order.choice(len(documents), args.batch_size, replace=False)
        batch = make_batch(encoder, [documents[n] for n in chosen], args.seq_len)
        logits_BTV = model(batch.ids_BT, batch.modality_BT)
        sums = modality_losses(
            logits_BTV, batch.targets_BT, batch.target_modality_BT, batch.target_mask_BT, len(MODALITIES)
        )
        loss = total_loss(sums, torch.ones(len(MODALITIES)), z_loss=0.0, normalizer=batch.step_targets)
        if step % args.every == 0:
            losses_M = (sums.ce / sums.count).tolist()
            # A separate forward pass in fp32: q, k, v, logits and norms by layer and modality.
            found = probe(model, batch.first(4)).flat()
            logits = [
                max(v for tag, v in found.items() if tag.startswith(f"attn_logit_absmax/{name}-"))
                for name in MODALITIES
            ]
            print(
                f"step {step:4d}",
                *(f"loss/{name} {value:.2f}" for name, value in zip(MODALITIES, losses_M, strict=True)),
                *(f"largest logit/{name} {value:.1f}" for name, value in zip(MODALITIES, logits, strict=True)),
                sep="   ",
            )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=Path, default=DATA / "emoji", help="folder of tar shards with a manifest")
    parser.add_argument("--tokenizers", type=Path, default=DATA / "tokenizers")
    parser.add_argument("--documents", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    encoder, documents = read_documents(args.shards, args.tokenizers, args.documents)
    for qk_norm in ("none", "rms"):
        train(qk_norm, encoder, documents, args)


if __name__ == "__main__":
    main()

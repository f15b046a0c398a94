"""Does a model that shares no code with mmqk fail as in docs/late_divergence.md? Run from the root of the repository:

    python docs/experiments/late_independent.py --steps 9000               trains, writes late_independent_plain.csv
    python docs/experiments/late_independent.py --steps 9000 --qk-norm     the same with QK-Norm
    python docs/experiments/late_independent.py --draw                     draws both files into late_independent.png

Shared with mmqk are only the batches of configs/failures/late_base.yaml: the training sequences of the seed in their
order, the 128 held-out sequences, and their targets with the modality of each. Model, loss, training and evaluation are
written here in plain PyTorch. RoPE turns pairs of neighboring channels (mmqk pairs channel i with i + K/2). Initial
weights are those of GPT-2: normal with a standard deviation of 0.02, in the last matrix of a sublayer divided by
sqrt(2 * layers). Sizes, learning rate, betas and eps are those of late_base.yaml.

A row of the CSV has the held-out losses, the mean training losses and the largest gradient norm (before clipping) of
the last 500 steps, and the largest absolute attention logit of the first 8 held-out sequences; it is written at once.
A step takes 0.13 s (QK-Norm: 0.15 s) of a core whose neighbor is busy, so 10,000 steps take 22 to 26 core minutes.

Shapes: B sequences, T tokens, N trained targets, D width, H heads, K head_dim, P pairs of channels, V vocabulary.
"""

import argparse
import time
from collections import deque
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

HERE = Path(__file__).parent
COLUMNS = ("step", "heldout_text", "heldout_image", "train_text", "train_image", "largest_grad_norm", "largest_logit")
WIDTH, LAYERS, HEADS, HIDDEN, HEAD_DIM = 48, 24, 4, 128, 12
EPS, THETA, RATE, WARMUP, CLIP = 1e-5, 10_000.0, 0.01, 50, 1.0
EVERY, EARLY, PROBED = 500, (50, 250), 8  # rows of the CSV, held-out sequences of the largest logit


def open_data(seed, steps):
    """Return mmqk's training batches of this seed, one per step, and the held-out ones, each with 32 sequences."""
    from mmqk.config import resolve
    from mmqk.data.datamodule import TokenDataModule
    from mmqk.data.loader import MicroBatches

    run = resolve(["--config=configs/demo.yaml", "--config=configs/failures/late_base.yaml", f"--seed={seed}"])
    data = TokenDataModule(run.data, seed)
    data.setup()
    training = MicroBatches(data.order, run.data.batch_size, accumulate=1, rank=0, world=1, steps=steps)
    heldout = [data.builder.batch(data.val_rows[i : i + 32]) for i in range(0, len(data.val_rows), 32)]
    return training, heldout, data.builder.batch(data.val_rows[:PROBED]), sum(data.vocab_sizes.values())


def rotate(x_BTHK):
    """Turn each pair of neighboring channels, as a complex number, by its position times THETA^(-2p/K)."""
    angle_TP = torch.outer(torch.arange(x_BTHK.shape[1]), THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    turn_T1P = torch.polar(torch.ones_like(angle_TP), angle_TP)[:, None]
    return torch.view_as_real(torch.view_as_complex(x_BTHK.unflatten(-1, (-1, 2))) * turn_T1P).flatten(-2)


class Block(nn.Module):
    def __init__(self, qk_norm):
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.RMSNorm(WIDTH, EPS), nn.RMSNorm(WIDTH, EPS)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.norm_q, self.norm_k = (nn.RMSNorm(HEAD_DIM, EPS) if qk_norm else nn.Identity() for _ in "qk")
        self.attention_out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.mlp_out = nn.Linear(HIDDEN, WIDTH, bias=False)

    def heads(self, x_BTD):
        """Return q, k and v of each head, (B, H, T, K)."""
        q_BTHK, k_BTHK, v_BTHK = self.qkv(self.norm_attention(x_BTD)).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        q_BTHK, k_BTHK = rotate(self.norm_q(q_BTHK)), rotate(self.norm_k(k_BTHK))
        return q_BTHK.transpose(1, 2), k_BTHK.transpose(1, 2), v_BTHK.transpose(1, 2)

    def forward(self, x_BTD):
        out_BHTK = F.scaled_dot_product_attention(*self.heads(x_BTD), is_causal=True)
        x_BTD = x_BTD + self.attention_out(out_BHTK.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm_mlp(x_BTD)).chunk(2, dim=-1)
        return x_BTD + self.mlp_out(F.silu(gate) * up)


class Decoder(nn.Module):
    def __init__(self, vocabulary, qk_norm):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block(qk_norm) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, EPS)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02 / (2 * LAYERS) ** 0.5 if name.endswith("_out.weight") else 0.02)

    def forward(self, ids_BT, wanted_BT):
        """Return the logits of the next token at the wanted positions, (N, V)."""
        x_BTD = self.embed(ids_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD[wanted_BT]))


def summed_losses(model, batch):
    """Return the sum of the losses and the number of the trained targets, (2,) each: text, image."""
    wanted_BT = batch.target_mask_BT
    loss_N = F.cross_entropy(model(batch.ids_BT, wanted_BT), batch.targets_BT[wanted_BT], reduction="none")
    modality_N = batch.target_modality_BT[wanted_BT]
    return torch.zeros(2).index_add(0, modality_N, loss_N), modality_N.bincount(minlength=2)


def largest_logit(model, batch):
    """Return the largest absolute attention logit of all layers, of tokens to themselves and earlier tokens."""
    pairs_B1TT = batch.valid_BT[:, None, :, None] & torch.ones(batch.ids_BT.shape[1:] * 2).tril().bool()
    x_BTD, largest = model.embed(batch.ids_BT), torch.zeros(())
    for block in model.blocks:
        q_BHTK, k_BHTK, _ = block.heads(x_BTD)
        logits_BHTT = (q_BHTK @ k_BHTK.mT / HEAD_DIM**0.5).where(pairs_B1TT, 0)
        largest = torch.maximum(largest, logits_BHTT.abs().max())
        x_BTD = block(x_BTD)
    return float(largest)


def train(args):
    training, heldout, probed, vocabulary = open_data(args.seed, args.steps)
    torch.manual_seed(args.seed)
    model = Decoder(vocabulary, args.qk_norm)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, (0.9, 0.95), 1e-8, weight_decay=0.0, fused=True)
    recent, start = deque(maxlen=EVERY), time.process_time()
    with open(args.out or HERE / f"late_independent_{'qk' if args.qk_norm else 'plain'}.csv", "x") as file:
        print(*COLUMNS, sep=",", file=file, flush=True)
        for step in range(1, args.steps + 1):
            optimizer.param_groups[0]["lr"] = RATE * min(1, step / WARMUP)
            sums, counts = summed_losses(model, training[step - 1])
            optimizer.zero_grad()
            (sums.sum() / counts.sum()).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            recent.append(torch.cat([sums.detach(), counts, norm.detach()[None]]))
            if step % EVERY == 0 or step in EARLY or step == args.steps:
                with torch.no_grad():
                    held_sums, held_counts = map(sum, zip(*(summed_losses(model, b) for b in heldout), strict=True))
                    logit = largest_logit(model, probed)
                sums, counts, norms = torch.stack(list(recent)).split([2, 2, 1], dim=1)
                values = [*(held_sums / held_counts), *(sums.sum(0) / counts.sum(0)), norms.max(), logit]
                print(step, *(f"{float(value):.5g}" for value in values), sep=",", file=file, flush=True)
                print(f"step {step}: {(time.process_time() - start) / step:.3f} core seconds per step", flush=True)


def draw():
    figure, panels = plt.subplots(1, 3, figsize=(9.5, 3.2), layout="constrained")
    for name, label, color in (("plain", "no QK-Norm", "C3"), ("qk", "QK-Norm", "C0")):
        of = np.genfromtxt(HERE / f"late_independent_{name}.csv", delimiter=",", names=True)
        for panel, modality in zip(panels, ("text", "image"), strict=False):
            panel.plot(of["step"], of[f"heldout_{modality}"], color=color, label=label)
            panel.plot(of["step"], of[f"train_{modality}"], color=color, lw=1, ls=":")
            panel.set(title=f"{modality} loss (dotted: training)", xlabel="step", ylabel="nats per token")
        panels[2].plot(of["step"], of["largest_logit"], color=color)
    panels[2].set(title="largest attention logit", xlabel="step", yscale="log")
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(HERE / "late_independent.png", dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--qk-norm", action="store_true", help="RMSNorm of q and k per head, with gains, before RoPE")
    parser.add_argument("--seed", type=int, default=11, help="seed of the batches and of the initial weights")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--out", type=Path, help="a new CSV file")
    parser.add_argument("--draw", action="store_true", help="draw the two files beside this script")
    torch.set_num_threads(1)
    args = parser.parse_args()
    draw() if args.draw else train(args)

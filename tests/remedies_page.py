"""Write docs/remedies.md from `mmqk.remedies`, from measured steps and from the lists of peers.

``python -m tests.remedies_page`` writes the page; a test checks that the committed page is up to date.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

import mmqk.model.norms
from mmqk.model import ModelConfig
from mmqk.remedies import MARKS, REMEDIES, Remedy
from tests.one_step import build, step, token_batch
from tests.peers import Peer

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/remedies.md"
# The model of configs/demo.yaml.
REFERENCE = ModelConfig(vocab_sizes={"text": 1029, "image": 512}, d_model=64, n_layers=4, n_heads=4)
SEQUENCES, TOKENS = 8, 128

Peers = dict[str, list[Peer]]


# Peers --------------------------------------------------------------------------------------------------


def peer_modules() -> list[str]:
    """Return the names of the test modules that list peers."""
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if re.search(r"^PEERS\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]


def all_peers() -> list[Peer]:
    """Return the peers of all test modules."""
    return [peer for module in peer_modules() for peer in importlib.import_module(module).PEERS]


def by_remedy(peers: Iterable[Peer], remedies: Sequence[Remedy] = REMEDIES) -> Peers:
    """Return the peers of each remedy, in the given order.

    Raises:
        ValueError: a peer names an unknown remedy, or a remedy has no peer.
    """
    found: Peers = {remedy.key: [] for remedy in remedies}
    for peer in peers:
        for key in peer.remedies:
            if key not in found:
                raise ValueError(f"the peer {peer.name!r} names {key!r}, which is not in mmqk.remedies.")
            found[key].append(peer)
    for key, its in found.items():
        if not its:
            raise ValueError(f"the remedy {key} has no peer: list one in the PEERS of a test module.")
    return found


def equals(peers: Sequence[Peer]) -> str:
    """Return each peer once, with the largest tolerance among its comparisons."""
    widest: dict[tuple[str, str], float] = {}
    for peer in peers:
        key = (peer.name, peer.precision)
        widest[key] = max(peer.tolerance, widest.get(key, 0.0))
    return "; ".join(f"{name} ({number(tol)}, {precision})" for (name, precision), tol in widest.items())


def number(value: float) -> str:
    """Format a number with the shortest exponent: 1e-5, 5e-6, 0."""
    return re.sub(r"e([+-])0*", r"e\1", f"{value:.2g}").replace("e+", "e") if value else "0"


# Cost ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """Number of parameters, and floating-point operations of the matrix products of one training step."""

    parameters: int
    flops: int


def _matrix_vector_flops(matrix, vector, *args, out_shape=None, **kwargs) -> int:
    return 2 * matrix[0] * matrix[1]


def measure(settings: dict) -> Size:
    """Return the size of the reference model with these settings and dense attention."""
    module = build({**settings, "backend": "math"}, REFERENCE)
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(REFERENCE.vocab_size, (SEQUENCES, TOKENS), generator=generator)
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.mv: _matrix_vector_flops})
    with counter:
        step(module, token_batch(ids_BT, REFERENCE.vocab_sizes))
    return Size(sum(p.numel() for p in module.model.parameters()), counter.get_total_flops())


def cost(remedy: Remedy, control: Size, its: Size) -> str:
    """Return the parameters and operations that the remedy adds to the control, and its other costs in words."""
    parts = []
    if its.parameters != control.parameters:
        parts.append(f"{its.parameters - control.parameters:+,} parameters")
    if its.flops != control.flops:
        share = f"{100 * (its.flops / control.flops - 1):+.1f} % FLOPs"
        parts.append("below 0.1 % FLOPs" if share[1:4] == "0.0" else share)
    return "; ".join([*parts, *([remedy.cost] if remedy.cost != "none" or not parts else [])])


# The page ------------------------------------------------------------------------------------------------

HEAD = """\
# Remedies

Every published remedy is a switch that is off in the control, and most can be combined. This page is written by
`python -m tests.remedies_page` from `mmqk.remedies`, from measured training steps and from the tests; do not edit it.
`python -m mmqk.remedies` prints the same switches in a terminal. [add_a_norm.md](add_a_norm.md) shows how to add one.

## Columns

- **Switch**: the flags to add to `python -m mmqk.train --config configs/demo.yaml`, and what they are for. The
  control is pre-norm with RMSNorm, softmax attention with scale 1 / √head_dim, and AdamW. Values are those of the
  source, or of the same order of magnitude: choose your own.
- **Formula**: in the symbols of the code. q, k and v are the queries, keys and values of a head, x is the residual
  stream, W a matrix and g its gradient. eps and the initial values of gains are fields too.
- **Source**: {marks}.
- **Acts on**: see the two softmaxes below.
- **Cost**: the change in parameters and in floating-point operations of all matrix products of a training step
  (forward, backward, update). The control has {parameters:,} parameters and {gflops:.2f} GFLOP, measured with dense
  attention at the size of `configs/demo.yaml` (d_model {d_model}, {n_layers} layers, {n_heads} heads, {vocabulary:,}
  ids, {sequences} times {tokens} tokens). Other costs are described in words. Times are left out,
  because they depend on the machine.
- **Equals**: the outside implementation, or the formula in the test, that the remedy was compared with. The
  brackets give the largest difference that the test allows, and the precision of the computation. The test compares
  values and gradients of a forward pass with random gains and biases, the weights after an update, or the standard
  deviations of initial weights. Each comparison has negative controls: wrong variants that must fail it.

Two remedies can be combined, or the combination is refused with a sentence that names both. For example, QK-Clip is
refused with QK-Norm or σReparam, which cancel its scaling. An option of QK-Norm is refused with a kind of QK-Norm
that does not use it. Fields without a row here (shape, data, schedule) are not remedies.

A copy of a layer for one modality (Untying) gets the gradient 0, not None, from a batch without that modality. So DDP
does not wait for it, and AdamW goes on decaying it.

## Two softmaxes

There is an **attention softmax** over the keys in every head, and one **output softmax** over the vocabulary. A
bound on the logits of one does not affect the other.

| switch | attention softmax | output softmax |
| --- | --- | --- |
{softmaxes}

z-loss does *not* act on attention logits, and QK-Norm does not bound log Z of the output: Chameleon uses both
(arXiv 2405.09818, section 2.3 [V]). Residual dropout acts on neither softmax. Attention dropout acts on the weights
after the attention softmax, so they no longer sum to 1. `--model.attention=sigmoid` has no attention softmax, and
adding a constant to a row of logits changes the output.

## Rounding order of the norms

{rounding}
"""
SOFTMAXES = (
    ("`attn_scale`", "factor on its logits", "–"),
    ("QK-Norm, cosine attention", "bounds its logits, by the gains or the scale", "–"),
    ("`attn_softcap`", "bounds its logits, before the mask", "–"),
    ("QK-Clip", "scales its logits to below the threshold", "–"),
    ("`attention=sigmoid`", "replaces it", "–"),
    ("`attn_dropout`", "acts on its weights", "–"),
    ("`final_softcap`", "–", "bounds its logits"),
    ("`z_loss`", "–", "regularizes its log Z to 0"),
    ("`residual_dropout`, LayerScale, norm placement", "–", "–"),
)
COLUMNS = ("switch", "formula", "source", "acts on", "cost", "equals")


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def render(peers: Peers, sizes: dict[str, Size], control: Size) -> str:
    """Return the text of the page."""
    head = HEAD.format(
        marks="; ".join(f"[{mark}] {meaning}" for mark, meaning in MARKS.items()),
        parameters=control.parameters,
        gflops=control.flops / 1e9,
        d_model=REFERENCE.d_model,
        n_layers=REFERENCE.n_layers,
        n_heads=REFERENCE.n_heads,
        vocabulary=REFERENCE.vocab_size,
        sequences=SEQUENCES,
        tokens=TOKENS,
        softmaxes="\n".join(row(cells) for cells in SOFTMAXES),
        rounding="\n\n".join((mmqk.model.norms.__doc__ or "").strip().split("\n\n")[1:]),
    )
    lines = [head]
    for group in dict.fromkeys(remedy.group for remedy in REMEDIES):
        lines += [f"## {group[0].upper()}{group[1:]}", "", row(COLUMNS), row(["---"] * len(COLUMNS))]
        for r in (remedy for remedy in REMEDIES if remedy.group == group):
            switch = f"{r.title}: {' '.join(f'`{flag}`' for flag in r.flags)} {r.purpose}"
            lines.append(
                row(
                    [
                        switch,
                        r.formula,
                        r.source,
                        r.acts_on,
                        cost(r, control, sizes[r.key]),
                        equals(peers[r.key]),
                    ]
                )
            )
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def page() -> str:
    """Return the page for the current code and tests."""
    sizes = {remedy.key: measure(dict(remedy.settings)) for remedy in REMEDIES}
    return render(by_remedy(all_peers()), sizes, measure({}))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

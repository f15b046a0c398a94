"""Write docs/remedies.md from `mmqk.lab.remedies`, from measured steps and from the lists of peers.

``python -m docs.experiments.remedies_page`` writes the page; a test checks that the committed page is up to date.
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
from mmqk.lab.remedies import REMEDIES, Remedy
from mmqk.model import ModelConfig
from tests.one_step import build, step, token_batch
from tests.peers import Peer

ROOT = Path(__file__).parents[2]
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
                raise ValueError(f"the peer {peer.name!r} names {key!r}, which is not in remedies.yaml.")
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
    found = []
    for (name, precision), tolerance in widest.items():
        named = "" if precision == "fp64" else f", {precision}"
        found.append(f"{name.replace('formula written out', 'formula')} ({number(tolerance)}{named})")
    return "; ".join(found)


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
        parts.append(f"{its.parameters - control.parameters:+,}")
    if its.flops != control.flops:
        share = f"{100 * (its.flops / control.flops - 1):+.1f} % FLOPs"
        parts.append("below 0.1 % FLOPs" if share[1:4] == "0.0" else share)
    return "; ".join([*parts, *([remedy.cost] if remedy.cost != "none" or not parts else [])])


# The page ------------------------------------------------------------------------------------------------

HEAD = """\
# Remedies

```
mmqk train demo --model.qk_norm.kind=rms    # any run with the flags of a row
mmqk remedies                               # purpose, formula and source of each remedy, and what it acts on
```

Every published remedy is a switch that is off in the control. The values are those of the source or of its order of
magnitude. [which_remedy.md](which_remedy.md) compares the remedies, and [add_a_norm.md](add_a_norm.md) adds one.

- **Parameters, other cost**: change in parameters, in floating-point operations of the matrix products of a training
  step, and other costs. The control is pre-norm with RMSNorm, scale 1 / √head_dim and AdamW; it has {parameters:,}
  parameters and {gflops:.2f} GFLOP with dense attention (d_model {d_model}, {n_layers} layers, {n_heads} heads,
  {vocabulary:,} ids, {sequences} times {tokens} tokens).
- **Equals**: the outside implementation, or the formula written out in a test, that values and gradients, updates or
  initial weights were compared with; in brackets the largest difference that the test allows, in fp64 unless named.
- **Two softmaxes.** z-loss acts on the softmax over the vocabulary, not on attention, and QK-Norm not on the output.
- **Untying.** The copy of a layer for one modality gets the gradient 0, not None, from a batch without that modality,
  so DDP does not wait for it and AdamW goes on decaying it.

{rounding}
"""
COLUMNS = ("remedy", "parameters, other cost", "equals")


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def render(peers: Peers, sizes: dict[str, Size], control: Size) -> str:
    """Return the text of the page."""
    norms = (mmqk.model.norms.__doc__ or "").strip()
    sizes_of_control = {"parameters": control.parameters, "gflops": control.flops / 1e9, "sequences": SEQUENCES}
    shape = {name: getattr(REFERENCE, name) for name in ("d_model", "n_layers", "n_heads")}
    rounding = norms.split("\n\n")[1]
    head = HEAD.format(**sizes_of_control, **shape, vocabulary=REFERENCE.vocab_size, tokens=TOKENS, rounding=rounding)
    lines = [head, row(COLUMNS), row(["---"] * len(COLUMNS))]
    for group in dict.fromkeys(remedy.group for remedy in REMEDIES):
        lines.append(row([f"**{group[0].upper()}{group[1:]}**"]))
        for r in (remedy for remedy in REMEDIES if remedy.group == group):
            switch = f"{r.title}: {' '.join(f'`{flag}`' for flag in r.flags)}"
            lines.append(row((switch, cost(r, control, sizes[r.key]), equals(peers[r.key]))))
    return "\n".join(lines).rstrip("\n") + "\n"


def page() -> str:
    """Return the page for the current code and tests."""
    sizes = {remedy.key: measure(dict(remedy.settings)) for remedy in REMEDIES}
    return render(by_remedy(all_peers()), sizes, measure({}))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

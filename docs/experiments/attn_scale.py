"""Predicted and measured variance of q.k at initialization: `python docs/experiments/attn_scale.py`.

The script builds untrained models, runs them on random ids, and writes attn_scale.csv, attn_scale.png and the table
of attn_scale.md in the folder of this file. It takes half a minute on one CPU core.

Names of tensors end with their shape: B batch, T tokens as queries, S tokens as keys, H heads, K head_dim.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from statistics import fmean, stdev

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from torch import Tensor

from mmqk.lab.page.drawing import PALETTE, RC
from mmqk.model import EarlyFusionTransformer, ModelConfig, QKNormConfig

HERE = Path(__file__).parent
HEAD_DIMS, SEEDS, TOKENS, SEQUENCES = (8, 16, 32, 64, 128, 256), 5, 128, 4
SHOWN_HEAD_DIM = 64
FEWEST_KEYS = 8  # the entropy of a row with fewer visible keys is not informative
SIZE = ModelConfig(d_model=256, n_layers=4, n_heads=4, d_ff=256, vocab_sizes={"text": 512, "image": 512})
POST_ALONE = replace(SIZE, pre_norm=False, post_norm=True)
SCALES = ("scale none", "scale rsqrt", "scale inverse")
VARIANTS: dict[str, ModelConfig] = {
    "scale none": replace(SIZE, attn_scale="none"),
    "scale rsqrt": SIZE,
    "scale inverse": replace(SIZE, attn_scale="inverse"),
    "rsqrt, RMS QK-Norm": replace(SIZE, qk_norm=QKNormConfig(kind="rms")),
    "cosine times 10": replace(SIZE, qk_norm=QKNormConfig(kind="l2")),
    "rsqrt, post-norm alone": POST_ALONE,
    "rsqrt, post-norm alone, RMS QK-Norm": replace(POST_ALONE, qk_norm=QKNormConfig(kind="rms")),
}
TITLE = "At initialization the variance of q·k is head_dim; 1/√head_dim brings it to 1"
COLORS = dict(zip(VARIANTS, (PALETTE[i] for i in (0, 1, 2, 5, 6, 3, 4)), strict=True))


@dataclass(frozen=True)
class Measured:
    """Statistics of the logits `scale * q.k` of one layer.

    Attributes:
        variance: Variance over all pairs of a query and an earlier key, pooled over heads and sequences.
        own: Variance of the logits between each query and the key of its own token.
        in_row: Variance over the earlier keys of one query, mean over queries with at least `FEWEST_KEYS` earlier
            keys. A common shift of all logits of a row does not affect the softmax or this variance.
        entropy: Softmax entropy divided by the entropy of equal weights, mean over queries with at least
            `FEWEST_KEYS` keys.
        largest: Largest softmax weight of a query, mean over the queries that `entropy` uses.
    """

    variance: float
    own: float
    in_row: float
    entropy: float
    largest: float


@dataclass(frozen=True)
class Row:
    """A line of the CSV, for one variant, head_dim and layer (from 1): means and standard deviations over seeds."""

    variant: str
    head_dim: int
    layer: int
    seeds: int
    predicted: float
    variance: float
    variance_sd: float
    own: float
    in_row: float
    entropy_predicted: float
    entropy: float
    entropy_sd: float
    largest: float


# Measurement -----------------------------------------------------------------------------------------------


def logits_of(q_BHTK: Tensor, k_BHTK: Tensor, scale: float) -> Tensor:
    """Return logits_BHTS, `scale * q.k` of every pair, in fp64."""
    return scale * q_BHTK.double() @ k_BHTK.double().transpose(-1, -2)


def measure(logits_BHTS: Tensor) -> Measured:
    """Return the statistics of raw logits under a causal mask."""
    T = logits_BHTS.shape[-1]
    earlier_TS = torch.ones(T, T, dtype=torch.bool).tril(-1)
    hidden_TS = torch.ones(T, T, dtype=torch.bool).triu(1)
    n_T = torch.arange(T, dtype=logits_BHTS.dtype)
    mean_BHT = logits_BHTS.masked_fill(~earlier_TS, 0.0).sum(-1) / n_T
    deviation_BHTS = (logits_BHTS - mean_BHT[..., None]).masked_fill(~earlier_TS, 0.0)
    in_row_BHT = deviation_BHTS.square().sum(-1) / (n_T - 1)
    log_p_BHTS = torch.log_softmax(logits_BHTS.masked_fill(hidden_TS, -math.inf), dim=-1)
    p_BHTS = log_p_BHTS.exp()
    entropy_BHT = -(p_BHTS * log_p_BHTS.masked_fill(hidden_TS, 0.0)).sum(-1) / (n_T + 1).log()
    return Measured(
        variance=logits_BHTS[..., earlier_TS].var().item(),
        own=logits_BHTS.diagonal(dim1=-2, dim2=-1).var().item(),
        in_row=in_row_BHT[..., FEWEST_KEYS:].mean().item(),
        entropy=entropy_BHT[..., FEWEST_KEYS - 1 :].mean().item(),
        largest=p_BHTS.amax(-1)[..., FEWEST_KEYS - 1 :].mean().item(),
    )


def measure_model(config: ModelConfig, seed: int) -> list[Measured]:
    """Return the statistics of every layer of an untrained model, on random ids of its whole vocabulary."""
    seen: dict[tuple[str, int], Tensor] = {}
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(0, config.vocab_size, (SEQUENCES, TOKENS), generator=generator)
    model = EarlyFusionTransformer(config, seed=seed).eval()
    with torch.no_grad():
        model(ids_BT, observer=lambda site, layer, x: seen.update({(site, layer): x}))
    layers = range(config.n_layers)
    return [measure(logits_of(seen["q", n], seen["k", n], config.attn_scale_value)) for n in layers]


# Prediction ------------------------------------------------------------------------------------------------


def predicted_variance(config: ModelConfig, layer: int) -> float:
    """Return the variance of a logit of this layer (from 1) if all entries of q and k are independent.

    If W_q and W_k have variance 1 / d_model, the entries of q and k have the mean square m of the input, and q.k has
    variance head_dim * m^2 (Vaswani et al. 2017, arXiv 1706.03762, footnote 4, for m = 1). With pre-norm or RMS
    QK-Norm m is 1. With post-norm alone the input is the residual stream, and m is 1 / d_model from the embedding
    plus 1 for every branch added so far. The cosine of the angle between two random directions has variance 1 /
    head_dim.
    """
    if config.qk_norm.kind == "l2":
        return config.qk_norm.scale_init**2 / config.head_dim
    m = 1.0 if config.pre_norm or config.qk_norm.kind == "rms" else 1 / config.d_model + 2 * (layer - 1)
    return config.attn_scale_value**2 * config.head_dim * m**2


def predicted_entropy(variance: float) -> float:
    """Return the simulated softmax entropy of independent normal logits of this variance, divided by that of equal
    weights."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, 1, TOKENS, TOKENS, generator=generator, dtype=torch.float64)
    return measure(math.sqrt(variance) * logits).entropy


# The CSV ---------------------------------------------------------------------------------------------------


def run(
    variants: Sequence[str] = tuple(VARIANTS), head_dims: Sequence[int] = HEAD_DIMS, seeds: int = SEEDS
) -> list[Row]:
    """Return the rows of every variant, head_dim and layer. No other size changes with head_dim."""
    rows = []
    for name in variants:
        for head_dim in head_dims:
            config = replace(VARIANTS[name], d_head=head_dim)
            of_seed = [measure_model(config, seed) for seed in range(seeds)]
            for layer in range(1, config.n_layers + 1):
                expected = predicted_variance(config, layer)
                of_layer = [layers[layer - 1] for layers in of_seed]
                values = {f.name: [getattr(m, f.name) for m in of_layer] for f in fields(Measured)}
                means = {key: fmean(value) for key, value in values.items()}
                spread = {f"{key}_sd": stdev(values[key]) for key in ("variance", "entropy")}
                rows.append(
                    Row(name, head_dim, layer, seeds, expected, entropy_predicted=predicted_entropy(expected),
                        **means, **spread)
                )  # fmt: skip
    return rows


def to_csv(rows: Sequence[Row]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(field.name for field in fields(Row))
    writer.writerows([f"{v:.5g}" if isinstance(v, float) else v for v in astuple(row)] for row in rows)
    return out.getvalue()


def from_csv(text: str) -> list[Row]:
    kinds = {"str": str, "int": int, "float": float}
    lines = csv.DictReader(io.StringIO(text))
    return [Row(**{f.name: kinds[str(f.type)](line[f.name]) for f in fields(Row)}) for line in lines]


# The page --------------------------------------------------------------------------------------------------


def with_table(page: str, rows: Sequence[Row]) -> str:
    """Return the page with the variances of these rows in its table, which is between two comments."""
    at = {(r.variant, r.head_dim): r for r in rows if r.layer == 1}
    lines = [["head_dim", *SCALES], ["---"] * 4]
    for k in sorted({r.head_dim for r in rows}):
        lines.append([str(k), *(f"{at[v, k].variance:.3g}±{at[v, k].variance_sd:.1g}" for v in SCALES)])
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    before, rest = page.split("<!-- scales -->\n")
    return f"{before}<!-- scales -->\n{table}\n<!-- /scales -->{rest.split('<!-- /scales -->')[1]}"


# The figure ------------------------------------------------------------------------------------------------


def draw(rows: Sequence[Row]) -> Figure:
    """Draw three panels; lines are predictions, points are measurements."""
    by_scale = [[r for r in rows if r.variant == name and r.layer == 1] for name in SCALES]
    placed = ("scale rsqrt", "rsqrt, post-norm alone", "rsqrt, post-norm alone, RMS QK-Norm")
    by_layer = [[r for r in rows if r.variant == name and r.head_dim == SHOWN_HEAD_DIM] for name in placed]
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(13.6, 4.7), facecolor="white")
        FigureCanvasAgg(figure)
        left, middle, right = figure.subplots(
            1, 3, gridspec_kw={"left": 0.06, "right": 0.985, "top": 0.77, "bottom": 0.125, "wspace": 0.24}
        )
        for line in by_scale:
            _series(left, line[0].variant, [(r.head_dim, r.predicted, r.variance) for r in line])
            _series(middle, line[0].variant, [(r.head_dim, r.entropy_predicted, r.entropy) for r in line])
        for line in by_layer:
            _series(right, line[0].variant, [(r.layer, r.predicted, r.variance) for r in line])

        left.set(title="Variance of a logit, first layer", yscale="log", ylim=(1e-3, 1e3), ylabel="variance")
        _label(left, "scale none", 11, 50, "scale none")
        _label(left, "scale rsqrt", 11, 1.7, "1/√head_dim")
        _label(left, "scale inverse", 11, 0.013, "1/head_dim")
        middle.set(title="Entropy of attention, first layer", ylim=(0, 1.08), ylabel="share of its maximum")
        _label(middle, "scale none", 40, 0.26, "scale none")
        _label(middle, "scale rsqrt", 11, 0.81, "1/√head_dim")
        _label(middle, "scale inverse", 11, 1.025, "1/head_dim")
        right.set(title=f"Variance by layer, head_dim {SHOWN_HEAD_DIM}", yscale="log", ylim=(1e-6, 1e3))
        right.set(xlabel="layer", xticks=[r.layer for r in by_layer[0]], ylabel="variance")
        _label(right, "scale rsqrt", 1, 4, "pre-norm")
        _label(right, "rsqrt, post-norm alone, RMS QK-Norm", 2.05, 0.13, "post-norm with QK-Norm")
        _label(right, "rsqrt, post-norm alone", 1.35, 1e-4, "post-norm alone")
        for axes in (left, middle):
            axes.set(xscale="log", xlabel="head_dim", xticks=HEAD_DIMS)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0f}"))
        for axes in (left, middle, right):
            axes.xaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_minor_locator(NullLocator())
        figure.text(0.012, 0.965, TITLE, fontsize=13, fontweight="bold", va="top")
        figure.text(0.012, 0.9, f"Lines: predicted. Points: measured, {rows[0].seeds} seeds.", va="top")
    return figure


def _label(axes: Axes, name: str, x: float, y: float, text: str) -> None:
    axes.text(x, y, text, color=COLORS[name], fontweight="bold", fontsize=10.5)


def _series(axes: Axes, name: str, points: Sequence[tuple[float, float, float]]) -> None:
    x, expected, measured = zip(*points, strict=True)
    axes.plot(x, expected, color=COLORS[name], linewidth=1.6, zorder=2 + (name == "scale rsqrt"))
    if name == "rsqrt, post-norm alone, RMS QK-Norm":  # its points overlap those of another series
        axes.plot(x, measured, "o", color=COLORS[name], markersize=12, fillstyle="none", markeredgewidth=1.6)
    else:
        axes.plot(x, measured, "o", color=COLORS[name], markersize=6.5, markeredgecolor="white", zorder=3)


def main() -> None:
    """Measure, and write the CSV, the figure and the page's table."""
    HERE.joinpath("attn_scale.csv").write_text(to_csv(run()))
    rows = from_csv(HERE.joinpath("attn_scale.csv").read_text())
    page = HERE / "attn_scale.md"
    page.write_text(with_table(page.read_text(), rows))
    draw(rows).savefig(HERE / "attn_scale.png", dpi=130, metadata={"Software": None})


if __name__ == "__main__":
    main()

"""What the weights of a checkpoint say without a batch: `Description`; which numbers grow, and by which law: `grew`.
`tables_of` is all that ``mmqk diagnose --model`` shows.

Shapes: D model width, H query heads, G key heads, K head_dim, E D + 1, V vocabulary.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from mmqk.diagnose.names import PARAMETERS
from mmqk.diagnose.projections import Projections, Side, is_centered, projections
from mmqk.diagnose.tensors import Batch, Blocks, Weights, probe_with, ranges_of, read
from mmqk.monitors.formulas.weights import matrix_sizes
from mmqk.store.metrics import tag
from mmqk.store.rules import GROWTH_FACTOR

_ROWS = {name: re.compile(rf"(.*\.)?({PARAMETERS[name]})\.weight") for name in ("embed", "head")}
_NORM = re.compile(r"(.*[._])?(norm\w*|\w*norm|layernorm\w*|ln\w*|\w+_ln)(\.copies\.\d+)?\.(weight|gain|scale)")
_LARGEST_SVD = 1024  # the spectral norm of larger matrices comes from a Lanczos iteration
_HEAD_COLUMNS = ("qk_spectral", "attn_logit_unrotated", "attn_logit_bound")
_MATRIX_COLUMNS = tuple(f"{w}_{size}" for w in ("w_q", "w_k") for size in ("norm", "spectral", "stable_rank"))


def bounds(layer: Projections) -> tuple[Tensor, Tensor, Tensor]:
    """Return by head the spectral norm of W_q^T W_k, and the largest logit between tokens at equal positions and at
    any positions, in fp64, (H,) each; NaN if the input of the projections has no norm.

    Without QK-Norm the input is x = g u + b with gain g, bias b and |u|^2 <= D (RMSNorm or LayerNorm). With A = W g,
    and the biases as one more column and u as one more 1, a logit is scale u^T A_q^T R A_k u', and R rotates by the
    distance of the two tokens (RoPE). So it is at most scale (D + 1) |A_q^T A_k|_2 if R = 1, and scale (D + 1)
    |A_q|_2 |A_k|_2 for every R; D instead of D + 1 without biases.

    With QK-Norm, a head's vector is g n + b with |n| <= sqrt(head_dim), or sqrt(H head_dim) over the full width. The
    bound is that of `mmqk.monitors.own.probe.logit_bound`, by head: scale times the largest lengths of q and k. RoPE
    mixes channels with different gains, so head_dim max |g_q g_k| bounds the logits of equal positions only.
    """
    q, k, repeat = layer.q, layer.k, len(layer.q.raw[0]) // len(layer.k.raw[0])
    spectral = torch.stack([_product(a, b.repeat_interleave(repeat, 0))[0] for a in q.raw for b in k.raw]).amax(0)
    if q.stretch_NK is not None and k.stretch_NK is not None:
        stretch_HK, shift_H = k.stretch_NK.repeat_interleave(repeat, 0), k.shift_N.repeat_interleave(repeat)
        longest = (q.stretch_NK.amax(-1) + q.shift_N) * (stretch_HK.amax(-1) + shift_H)
        has_bias = bool(q.shift_N.any() or shift_H.any())
        unrotated = longest if has_bias else (q.stretch_NK * stretch_HK).amax(-1)
        return spectral, layer.scale * unrotated.double(), layer.scale * longest.double()
    if not q.folded or not k.folded or q.stretch_NK is not None or k.stretch_NK is not None:
        return spectral, spectral * torch.nan, spectral * torch.nan
    radii = [w.shape[-1] - 1 + bool(w[..., -1].any()) for side in (q, k) for w in side.folded]
    pairs = [_product(a, b.repeat_interleave(repeat, 0)) for a in q.folded for b in k.folded]
    largest = [torch.stack(norms).amax(0) for norms in zip(*pairs, strict=True)]
    return spectral, layer.scale * max(radii) * largest[0], layer.scale * max(radii) * largest[1]


def _product(a_HKE: Tensor, b_HKE: Tensor) -> tuple[Tensor, Tensor]:
    """Return |A^T B|_2 and |A|_2 |B|_2 by head, from the Gram matrices A A^T and B B^T."""
    gram_a, gram_b = (w.double() @ w.double().mT for w in (a_HKE, b_HKE))
    values, vectors = torch.linalg.eigh(gram_a)
    root = vectors * values.clamp_min(0).sqrt()[:, None]
    product = torch.linalg.eigvalsh(root.mT @ gram_b @ root)[:, -1]
    return product.clamp_min(0).sqrt(), (values[:, -1] * torch.linalg.eigvalsh(gram_b)[:, -1]).clamp_min(0).sqrt()


class Description:
    """What the weights of one checkpoint say without a batch.

    Args:
        weights: a checkpoint.
        blocks: the ids of each modality; other ids are text. By default those of an mmqk checkpoint, else all are text.

    Attributes:
        layers: a row per layer: layer, qk_norm (in words), heads, key_heads, head_dim, layout, scale, softcap;
            w_q_norm, w_q_spectral, w_q_stable_rank, and the same of w_k; bounded_by, where the bound comes from.
        heads: a row per query head: layer, head, key_head, qk_spectral, attn_logit_unrotated and attn_logit_bound
            (see `bounds`).
        gains: a row per norm: name, dtype, min, median and max of the gains, and the share that is exactly 1.
        rows: a row per matrix (embed, head) and vocabulary block: number of rows, mean and maximum of their L2 norms.
        faults: a row per tensor with a problem: tensor, problem.
        notes: a sentence on each thing that could not be read.
    """

    def __init__(self, weights: Weights, blocks: Blocks | None = None) -> None:
        layers, heads = [], []
        self.notes: list[str] = []
        for layer in projections(weights, self.notes):
            if not all(w.isfinite().all() for side in (layer.q, layer.k) for w in (*side.raw, *side.folded)):
                self.notes.append(f"The projections of layer {layer.layer} are not finite: the layer has no bounds.")
                continue
            H, G = len(layer.q.raw[0]), len(layer.k.raw[0])
            of_heads = torch.stack(bounds(layer), 1).tolist()
            heads += [(layer.layer, h, h * G // H, *numbers) for h, numbers in enumerate(of_heads)]
            source = "norm before attention" if layer.q.folded else "none"
            source = source if layer.q.stretch_NK is None else "QK-Norm"
            layout = (H, G, layer.q.raw[0].shape[1], layer.layout, layer.scale, layer.softcap)
            layers.append((layer.layer, layer.qk_norm, *layout, *_sizes(layer.q), *_sizes(layer.k), source))
        columns = ["layer", "qk_norm", "heads", "key_heads", "head_dim", "layout", "scale", "softcap"]
        if blocks is None and weights.format == "mmqk checkpoint":
            blocks = ranges_of(weights.config["vocab_sizes"])
        gains, rows, faults = _by_tensor(weights, blocks or {})
        self.layers = pd.DataFrame(layers, columns=[*columns, *_MATRIX_COLUMNS, "bounded_by"])
        self.heads = pd.DataFrame(heads, columns=["layer", "head", "key_head", *_HEAD_COLUMNS])
        self.gains = pd.DataFrame(gains, columns=["name", "dtype", "min", "median", "max", "exactly_1"])
        self.rows = pd.DataFrame(rows, columns=["matrix", "block", "rows", "mean", "max"])
        self.faults = pd.DataFrame(faults, columns=["tensor", "problem"])

    def numbers(self) -> dict[str, float]:
        """Return all numbers by tag."""
        values: dict[str, float] = {}
        for name in _HEAD_COLUMNS:
            for row in self.heads.to_dict("records"):
                values[tag(name, layer=row["layer"], head=row["head"])] = row[name]
            for layer, largest in self.heads.groupby("layer")[name].max().items():
                values[tag(name, layer=int(str(layer)))] = largest
        for row in self.layers.to_dict("records"):
            values |= {tag(name, layer=row["layer"]): row[name] for name in _MATRIX_COLUMNS}
        for row in self.rows.to_dict("records"):
            values[tag(f"{row['matrix']}_row_norm", row["block"])] = row["mean"]
        return values | {f"norm_gain_max/{row['name']}": row["max"] for row in self.gains.to_dict("records")}


def _sizes(side: Side) -> tuple[float, ...]:
    """Return Frobenius norm, spectral norm and stable rank of a projection."""
    from scipy.sparse.linalg import svds

    matrix = side.raw[0][..., :-1].flatten(0, 1)
    if min(matrix.shape) <= _LARGEST_SVD:
        return tuple(map(float, matrix_sizes(matrix)))
    spectral = float(svds(matrix.numpy(), k=1, tol=1e-3, return_singular_vectors=False, rng=0)[0])
    frobenius = float(matrix.norm())
    return frobenius, spectral, (frobenius / spectral) ** 2


def _by_tensor(weights: Weights, blocks: Blocks) -> tuple[list[tuple], list[tuple], list[tuple]]:
    """Return the rows of `Description.gains`, `rows` and `faults`, in one pass over the tensors."""
    gains, rows, faults = list[tuple](), list[tuple](), list[tuple]()
    for name, reader in weights.readers.items():
        tensor = reader()
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        bad = tensor.numel() - int(tensor.isfinite().sum())
        if bad:
            faults.append((name, f"{bad:,} of {tensor.numel():,} elements are not finite"))
        elif tensor.ndim > 1 and not tensor.any():
            faults.append((name, "all zero"))
        if _NORM.fullmatch(name) and (tensor.ndim == 1 or re.search(r"[qk]_\w*norm", name)):
            gain = tensor.float() + is_centered(weights.config, name)
            ones = float((gain == 1).float().mean())
            sizes = (float(f(gain)) for f in (torch.min, torch.median, torch.max))
            gains.append((name, str(tensor.dtype).removeprefix("torch."), *sizes, ones))
            if tensor.dtype == torch.bfloat16 and ones == 1:
                faults.append((name, "all gains are exactly 1 in bf16: updates below 2^-9 are lost in rounding"))
        matrix = next((matrix for matrix, names in _ROWS.items() if names.fullmatch(name)), None)
        if matrix and tensor.ndim == 2:
            norm_V = torch.linalg.vector_norm(tensor, dim=1, dtype=torch.float32)
            block_V = np.full(len(norm_V), "text", dtype=object)
            for block, ids in blocks.items():
                block_V[ids.start : ids.stop] = block
            by_block = pd.Series(norm_V.numpy()).groupby(block_V, sort=False)
            rows += [(matrix, block, len(x), float(x.mean()), float(x.max())) for block, x in by_block]
    return gains, rows, faults


Array = np.ndarray
LAWS = ("exponential", "linear", "saturating")
LEAST_GROWTH = 1.02  # a series whose largest value is below this multiple of its smallest does not grow
LEAST_UNCLEAR = 1.25  # the same, for a series that no law fits clearly
CAVEAT = (
    "A law needs three checkpoints. It need not hold later: a new learning rate, a cap, QK-Norm or the instability"
    " itself ends it. Read the step as an order of magnitude."
)


def grew(series: pd.DataFrame, limit: float) -> pd.DataFrame:
    """Return which numbers grew between checkpoints, by which law, and when each law reaches a limit.

    The laws are exponential, linear, and from 5 checkpoints on saturating (y approaches a plateau exponentially).
    They are fitted by least squares of the relative error. The law is the one with the least squared error at
    checkpoints that were left out of its fit, one at a time; saturating has a third number and must be clearly
    better, by a factor of 4. Other comparisons are clear by a factor of 4, or 16
    with fewer than 5 checkpoints. A series grows by a law if that is clearly better than a constant and the series
    changed by `LEAST_GROWTH`. With two checkpoints no law is chosen.

    Args:
        series: a row per checkpoint, indexed by step, and a column per tag. Only positive columns are used.
        limit: the limit, in the unit of the columns.

    Returns:
        A row per tag: first, last, ratio, law (a law, "falls", "does not grow", "no law fits clearly"; "" with two
        checkpoints), also (laws that are not clearly worse), error (the law's relative error at checkpoints left out),
        per_1000_linear and per_1000_log (change, and change of the logarithm, per 1,000 steps), and a column for each
        law with the step at which it reaches the limit: infinite if never, the last step if the last value is beyond.
    """
    steps = series.index.to_numpy(dtype=float)
    with np.errstate(over="ignore"):
        rows = {name: _growth(steps, series[name].to_numpy(dtype=float), limit) for name in series}
    return pd.DataFrame.from_dict({name: row for name, row in rows.items() if row}, orient="index")


def _growth(steps: Array, y: Array, limit: float) -> dict[str, object]:
    if len(y) < 2 or not (np.isfinite(y) & (y > 0)).all():
        return {}
    names = LAWS if len(y) >= 5 else LAWS[:2]
    clearly, ratio, span = 4 if len(y) >= 5 else 16, y[-1] / y[0], (steps[-1] - steps[0]) / 1000
    row: dict[str, object] = {"first": y[0], "last": y[-1], "ratio": ratio, "law": "", "also": "", "error": np.nan}
    row |= {"per_1000_linear": (y[-1] - y[0]) / span, "per_1000_log": np.log(ratio) / span}
    row |= {name: steps[-1] if y[-1] >= limit else _fit(name, steps, y)[1](limit) for name in names}
    if len(y) == 2:
        return row
    kept = [np.arange(len(y)) != i for i in range(len(y))]
    errors = {name: np.square([_left_out(name, steps, y, k) for k in kept]).mean() for name in names}
    constant = np.square([np.log(y[~k][0]) - np.log(y[k]).mean() for k in kept]).mean()
    handicap = {name: errors[name] * (clearly if name == "saturating" else 1) + 1e-12 for name in names}  # + rounding
    best = min(names, key=lambda name: handicap[name])
    row["error"] = errors[best] ** 0.5
    is_clear = errors[best] * clearly <= constant
    if y.max() < (LEAST_GROWTH if is_clear else LEAST_UNCLEAR) * y.min():
        return row | {"law": "does not grow"}
    if not is_clear:
        return row | {"law": "no law fits clearly"}
    also = [name for name in names if name != best and errors[name] < clearly * (errors[best] + 1e-12)]
    return row | ({"law": best, "also": ", ".join(also)} if ratio > 1 else {"law": "falls"})


def _fit(name: str, steps: Array, y: Array) -> tuple[Callable[[Array], Array], Callable[[float], float]]:
    """Return a law as a function of the step, and the step at which it reaches a limit."""
    if name == "exponential":
        b, a = np.polyfit(steps, np.log(y), 1)
        return lambda t: np.exp(a + b * t), lambda limit: (np.log(limit) - a) / b if b > 0 else np.inf
    if name == "linear":
        b, a = np.polyfit(steps, y, 1, w=1 / y)
        return lambda t: a + b * t, lambda limit: (limit - a) / b if b > 0 else np.inf
    fits = []
    for tau in (steps[-1] - steps[0]) * np.geomspace(0.1, 2, 14):
        x = -np.exp(-steps / tau)
        b, a = np.polyfit(x, y, 1, w=1 / y)
        fits.append((np.square((a + b * x) / y - 1).sum(), tau, a, b))
    _, tau, a, b = min(fits)
    plateau = a if b > 0 else -np.inf
    return (
        lambda t: a - b * np.exp(-t / tau),
        lambda limit: -tau * np.log((a - limit) / b) if plateau > limit else np.inf,
    )


def _left_out(name: str, steps: Array, y: Array, kept: Array) -> float:
    """Return the error of log y at the checkpoint that is not kept."""
    predicted = float(_fit(name, steps[kept], y[kept])[0](steps[~kept])[0])
    return np.log(max(predicted, 1e-30)) - np.log(y[~kept][0])


def tables_of(
    sources: Sequence[str | Path], batch: Batch | None = None, blocks: Blocks | None = None, limit: float = 1000.0
) -> tuple[dict[str, pd.DataFrame], list[str], bool]:
    """Return what checkpoints of one run, the oldest first, say.

    Args:
        sources: as in `mmqk.diagnose.tensors.read`.
        batch: inputs for a probe of each checkpoint.
        blocks: as in `probe_with`.
        limit: a limit of the attention logits.

    Returns:
        The tables by their titles; sentences on what could not be read and on what the tables cannot say; and whether
        there is a finding: a fault, a measured logit beyond the limit, or logits or their bound that grow by a law or
        to `GROWTH_FACTOR` times their first value.
    """
    checkpoints = [read(source) for source in sources]
    found = [Description(weights, blocks) for weights in checkpoints]
    last, numbers = found[-1], [description.numbers() for description in found]
    notes = list(dict.fromkeys(note for description in found for note in description.notes))
    tables = {"tensors with a fault": last.faults, "layers": last.layers}
    tables["largest logits that the weights allow, by head"] = last.heads.sort_values("attn_logit_bound")[::-1]
    tables |= {"gains of norms": last.gains, "norms of rows by vocabulary block": last.rows}
    if checkpoints[-1].format != "mmqk checkpoint" and "none" in set(last.layers.qk_norm):
        notes.append("A QK-Norm without gains has no weights: with one, the bounds are too large.")
    if batch is not None:
        probes = [probe_with(source, batch, blocks) for source in sources]
        numbers = [{**a, **b} for a, b in zip(numbers, probes, strict=True)]
        tables["probe"] = pd.DataFrame(probes[-1].items(), columns=["tag", "value"])
    is_finding = bool(len(last.faults)) or any(
        abs(value) > limit for name, value in numbers[-1].items() if name.startswith("attn_logit_absmax")
    )
    steps = [weights.step for weights in checkpoints if weights.step is not None]
    if len(steps) < len(sources) > 1:
        steps = list(range(len(sources)))
        notes.append("The steps of the checkpoints are not known: they are counted 0, 1, 2, ...")
    if not all(a < b for a, b in itertools.pairwise(steps)):
        notes.append("The steps of the checkpoints do not rise, so that no growth is computed: give the earlier first.")
    elif len(sources) > 1 and len(growth := grew(pd.DataFrame(numbers, index=steps), limit)):
        growth = growth.rename_axis("tag").reset_index()
        tables["growth"] = growth.sort_values("ratio", ascending=False)
        grows = growth.law.isin(list(LAWS)) | (growth.ratio >= GROWTH_FACTOR)
        is_finding |= bool((growth.tag.str.match("attn_logit_(bound|absmax)") & grows).any())
        notes.append(CAVEAT)
    return tables, notes, is_finding

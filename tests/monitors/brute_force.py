"""Computes every statistic of a probe in numpy and float64, with loops over rows and heads and without mmqk."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

FEWEST_KEYS = 8
NORMS = {
    "attn_in": "attn_in_norm", "q_raw": "q_raw_norm", "k_raw": "k_raw_norm", "q": "q_norm", "k": "k_norm",
    "v": "v_norm", "attn_out": "attn_out_norm", "mlp_out": "mlp_out_norm", "resid": "resid_norm",
}  # fmt: skip
Sites = Mapping[tuple[str, int], np.ndarray]


class Means(dict):
    """Collects lists of numbers by tag; `means` returns the mean of each list."""

    def see(self, name: str, value: float) -> None:
        self.setdefault(name, []).append(value)

    def means(self) -> dict[str, float]:
        return {name: float(np.mean(values)) for name, values in self.items()}


def streams(sites: Sites, modality: np.ndarray, valid: np.ndarray, names: tuple[str, ...]) -> dict[str, float]:
    """Return the norms of every site, and the gains of W_q and W_k, by tag."""
    B, T = modality.shape
    tokens = [(b, t) for b in range(B) for t in range(T) if valid[b, t]]
    expected: dict[str, float] = {}
    for (site, layer), array in sites.items():
        for m, name in enumerate(names):
            mine = [(b, t) for b, t in tokens if modality[b, t] == m]
            if not mine:
                continue
            place = f"{name}/layer{layer:02d}"
            if site in NORMS:
                vectors = [array[b, :, t] if array.ndim == 4 else array[b, t][None] for b, t in mine]
                lengths = np.linalg.norm(np.concatenate(vectors), axis=-1)
                expected[f"{NORMS[site]}/{place}"] = lengths.mean()
                expected[f"{NORMS[site]}_max/{place}"] = lengths.max()
            if site == "gate":  # (B, T, H, K); K is 1 if each head has one gate
                gates = np.stack([array[b, t] for b, t in mine])
                expected[f"gate_open/{place}"] = gates.mean()
                expected[f"gate_closed/{place}"] = np.mean([g < 0.1 for g in gates.ravel()])
            if site in ("q_raw", "k_raw"):
                x = sites["attn_in", layer]
                ratios = [math.sqrt((array[b, :, t] ** 2).sum() / (x[b, t] ** 2).sum()) for b, t in mine]
                expected[f"{site[0]}_weight_gain/{place}"] = np.mean(ratios)
            if site == "final":
                lengths = np.array([np.linalg.norm(array[b, t]) for b, t in mine])
                expected[f"final_norm/{name}"] = lengths.mean()
                expected[f"final_rms/{name}"] = lengths.mean() / math.sqrt(array.shape[-1])
    return expected


def attention(
    q: np.ndarray,
    k: np.ndarray,
    scale: float,
    modality: np.ndarray,
    sees: Callable[[int, int, int], bool],
    names: tuple[str, ...],
    layer: int,
    cap: float | None = None,
    softmax: bool = True,
    valid: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
) -> dict[str, float]:
    """Return all statistics of one layer's attention call by tag; `sees(b, t, s)` is True for visible pairs.

    `sinks` has one logit for each head. It enters the softmax like the logit of a key, and its weight is dropped.
    """
    B, H, T, _ = q.shape
    valid = np.ones((B, T), dtype=bool) if valid is None else valid
    at, rows = f"layer{layer:02d}", Means()
    logits: dict[tuple[int, int], list[float]] = {}
    seen_sq: dict[tuple[int, int, int], list[float]] = {}
    for b in range(B):
        for t in range(T):
            keys = [s for s in range(T) if valid[b, t] and sees(b, t, s)]
            if not keys:
                continue
            of_key, a = modality[b, keys], names[modality[b, t]]
            for h in range(H):
                z = scale * k[b, h, keys] @ q[b, h, t]
                for s, value in zip(keys, z, strict=True):
                    pair = (int(modality[b, t]), int(modality[b, s]))
                    logits.setdefault(pair, []).append(value)
                    seen_sq.setdefault((*pair, h), []).append((value / scale) ** 2)
                if len(keys) >= FEWEST_KEYS:
                    row(rows, z, of_key, a, names, at, cap, softmax, None if sinks is None else sinks[h])
    met = {f"attn_mass/{names[a]}-{names[c]}/{at}" for a, c in logits}
    expected = {name: x for name, x in rows.means().items() if not name.startswith("attn_mass") or name in met}
    for (a, c), values in logits.items():
        magnitude = np.sort(np.abs(values))[::-1]
        place = f"{names[a]}-{names[c]}/{at}"
        expected[f"attn_logit_max/{place}"] = max(values)
        expected[f"attn_logit_absmax/{place}"] = magnitude[0]
        expected[f"attn_logit_p999/{place}"] = magnitude[max(1, round(len(values) / 1000)) - 1]
    for a, c in logits:
        parts = [growth(q[:, h], k[:, h], modality, valid, a, c, seen_sq[a, c, h]) for h in range(H)]
        for name in parts[0]:
            expected[f"logit_{name}/{names[a]}-{names[c]}/{at}"] = np.mean([part[name] for part in parts])
    for m, name in enumerate(names):
        shares = []
        for b in range(B):
            mine = [s for s in range(T) if valid[b, s] and modality[b, s] == m]
            for h in range(H) if mine else ():
                keys_NK = k[b, h, mine]
                shares.append((keys_NK.mean(0) ** 2).sum() / (keys_NK**2).sum(-1).mean())
        if shares:
            expected[f"k_common/{name}/{at}"] = np.mean(shares)
    if softmax:
        of_heads = [None] * H if sinks is None else sinks
        expected[f"attn_rank/{at}"] = np.mean([rank(q[b, h], k[b, h], scale, b, sees, valid, cap, of_heads[h])
                                            for b in range(B) for h in range(H)])  # fmt: skip
    return expected


def weights(z, cap: float | None, sink: float | None):
    """Return the softmax of the capped logits and the sink: the weights of the keys, and the list of sink weights."""
    y = z if cap is None else cap * np.tanh(z / cap)
    y = np.append(y, [] if sink is None else [sink])
    p = np.exp(y - y.max()) / np.exp(y - y.max()).sum()
    return p[: len(z)], p[len(z) :]


def row(rows: Means, z, of_key, a: str, names, at: str, cap: float | None, softmax: bool, sink: float | None) -> None:
    """Split the logits and weights of one query by key modality, and add the statistics to `rows`."""
    blocks = sorted(set(of_key))
    block_mean = {m: z[of_key == m].mean() for m in blocks}
    own = np.array([block_mean[m] for m in of_key])
    rows.see(f"attn_logit_mean/{a}/{at}", z.mean())
    rows.see(f"attn_logit_var/{a}/{at}", z.var())
    rows.see(f"attn_logit_offset_var/{a}/{at}", own.var())
    rows.see(f"attn_logit_spread_var/{a}/{at}", ((z - own) ** 2).mean())
    for m in blocks:
        rows.see(f"attn_logit_offset/{a}-{names[m]}/{at}", block_mean[m] - z.mean())
    if not softmax:
        return
    p, of_sink = weights(z, cap, sink)
    mass = {m: p[of_key == m].sum() for m in range(len(names))}
    block_entropy = -sum(x * math.log(x) for x in [*mass.values(), *of_sink] if x > 0)
    entropy = -sum(x * math.log(x) for x in [*p, *of_sink] if x > 0)
    for x in of_sink:
        rows.see(f"sink_mass/{a}/{at}", x)
    rows.see(f"attn_entropy/{a}/{at}", entropy)
    rows.see(f"attn_entropy_block/{a}/{at}", block_entropy)
    rows.see(f"attn_entropy_within/{a}/{at}", entropy - block_entropy)
    for m, x in mass.items():
        rows.see(f"attn_mass/{a}-{names[m]}/{at}", x)


def growth(q_BTK, k_BTK, modality, valid, a: int, c: int, seen_sq: list[float]) -> dict[str, float]:
    """Return the parts of logit growth of one head, over all pairs of a sequence, visible or not.

    The squared dot products of visible pairs, `seen_sq`, affect the part `masked` only.
    """
    q_sq, k_sq, dot_sq = [], [], []
    for b in range(len(q_BTK)):
        queries = [q_BTK[b, t] for t in range(len(q_BTK[b])) if valid[b, t] and modality[b, t] == a]
        keys = [k_BTK[b, t] for t in range(len(k_BTK[b])) if valid[b, t] and modality[b, t] == c]
        for x in queries:
            for y in keys:
                q_sq.append(x @ x)
                k_sq.append(y @ y)
                dot_sq.append((x @ y) ** 2)
    return {
        "q_power": math.log(np.mean(q_sq)),
        "k_power": math.log(np.mean(k_sq)),
        "alignment": math.log(np.mean(dot_sq) / np.mean(q_sq) / np.mean(k_sq)),
        "masked": math.log(np.mean(seen_sq) / np.mean(dot_sq)),
    }


def rank(q_TK, k_TK, scale, b, sees, valid, cap, sink) -> float:
    """Return the participation ratio of the squared singular values of one attention matrix."""
    T = len(q_TK)
    matrix = np.zeros((T, T))
    for t in range(T):
        keys = [s for s in range(T) if valid[b, t] and sees(b, t, s)]
        if keys:
            matrix[t, keys], _ = weights(scale * k_TK[keys] @ q_TK[t], cap, sink)
    s_sq = np.linalg.svd(matrix, compute_uv=False) ** 2
    return s_sq.sum() ** 2 / (s_sq**2).sum()


def output(logits: np.ndarray, target_modality, trained, sizes: Mapping[str, int]) -> dict[str, float]:
    """Return the statistics of the output softmax by modality of the target."""
    names, edges = tuple(sizes), np.cumsum([0, *sizes.values()])
    rows = Means()
    for y, m, kept in zip(logits.reshape(-1, edges[-1]), target_modality.ravel(), trained.ravel(), strict=True):
        if not kept:
            continue
        z, name = np.exp(y).sum(), names[m]
        rows.see(f"out_log_z/{name}", math.log(z))
        rows.see(f"out_logit_mean/{name}", y.mean())
        rows.see(f"out_logit_spread/{name}", math.log(z) - math.log(len(y)) - y.mean())
        rows.see(f"out_wrong_mass/{name}", 1 - np.exp(y[edges[m] : edges[m + 1]]).sum() / z)
        for c, block in enumerate(names):
            rows.see(f"out_block_log_z/{name}-{block}", math.log(np.exp(y[edges[c] : edges[c + 1]]).sum()))
    return rows.means()

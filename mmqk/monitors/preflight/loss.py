"""The loss: which targets it trains with which weights, read from its derivative by the logits.

The derivative of a cross-entropy w * -log p(y) is w * (p - 1[y]): its negative entry is the target, and its sum is 0.
A z-loss adds a multiple of p. So the targets are known without knowing the code of the loss.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmqk.monitors.foreign.inputs import named_tensors
from mmqk.monitors.preflight.context import IGNORED, Context, Finding, NotChecked, Targets, judged, mapped
from mmqk.store.formatting import some

_EQUAL = 0.01  # relative difference from which two weights differ
_VISION = ("pixel", "image_", "video_")
_NO_IDS = {"mask", "position", "type", "document", "doc", "segment", "sequence", "seq"}


def _by_modality(context: Context, targets: Targets) -> dict[str, Tensor]:
    """Return where the targets of each modality are, (B, T), without modalities that have none."""
    modality = context.modalities
    of = context.modality_BT.roll(-1, 1) if modality.function else modality.of_ids(targets.id)
    found = {name: (of == m) & targets.has for m, name in enumerate(modality.names)}
    return {name: where for name, where in found.items() if where.any()}


def shift(context: Context) -> Finding:
    """Targets must be the next tokens."""
    targets, ids, T = context.first.targets, context.ids_BT, context.ids_BT.shape[1]
    shares = {}
    for by in (1, 0, 2, -1):
        here, there = slice(max(0, -by), T - max(0, by)), slice(max(0, by), T + min(0, by))
        has = targets.has[:, here]
        shares[by] = float((targets.id[:, here] == ids[:, there])[has].float().mean()) if has.any() else 0.0
    best = max(shares, key=lambda by: shares[by])
    if shares[best] < 0.5:
        raise NotChecked("the targets are not tokens of the input")
    text = f"{100 * shares[1]:.1f} % of the targets are the next token"
    text += f", {100 * shares[best]:.1f} % the token {best} ahead" if best != 1 else ""
    return judged(best != 1, shares[1], text, "shift labels once: here or in the model, not in both or in neither")


def padding(context: Context) -> Finding:
    """No target is padding."""
    if context.valid_BT.all():
        raise NotChecked("the batch has no padding")
    n = int((context.first.targets.has[:, :-1] & ~context.valid_BT[:, 1:]).sum())
    return judged(n > 0, n, f"{n} targets are padding", f"set labels to {IGNORED} at padding")


def reached(context: Context) -> Finding:
    """Every label is a target of the loss."""
    targets, ids = context.first.targets, context.ids_BT
    named = [x for name, x in named_tensors(context.batch) if name in {"label", "labels", "target", "targets"}]
    all_labels = [x for x in named if x.ndim == 2 and len(x) == len(ids)]
    by = ", ".join(f"{int(where.sum())} {name}" for name, where in _by_modality(context, targets).items())
    if not all_labels:
        raise NotChecked(f"the batch has no labels; the loss trains {by} targets")
    labels = all_labels[0].to(ids.device)
    is_unshifted = labels.shape == ids.shape and (labels == ids).sum() > (labels[:, :-1] == ids[:, 1:]).sum()
    n, wanted = int(targets.has.sum()), int((labels[:, 1:] if is_unshifted else labels).ge(0).sum())
    text = f"{n} of {wanted} labels reach the loss ({by})"
    return judged(n < wanted, n, text, "look for a slice, a mask or a hidden logit that leaves targets out")


def z_loss(context: Context) -> Finding:
    """A z-loss leaves out padding."""
    targets = context.first.targets
    limit = 100 * torch.finfo(context.first.by_logits_BTV.dtype).eps * float(targets.weight.max())  # type: ignore[union-attr]
    acts = targets.z.abs() > limit
    n = int((acts & ~context.valid_BT).sum())
    text = f"a z-loss acts on {n} tokens of padding" if acts.any() else "no z-loss"
    return judged(n > 0, n, text, "average the z-loss over the same positions as the cross-entropy")


def weights(context: Context) -> Finding:
    """Targets of a modality have the same weight, and the weights add up to 1 (mean) or are 1 (sum).

    Modalities may have different weights on purpose: these are printed and not judged. Label smoothing moves a share
    of each weight to the mean cross-entropy of all ids: that is at least ln V, and its derivative by a logit is
    negative for ids with a small probability.
    """
    targets, problem, words = context.first.targets, "", []
    logits, by_logits = context.first.logits_BTV, context.first.by_logits_BTV
    assert logits is not None and by_logits is not None
    groups = _by_modality(context, targets)
    for name, where in groups.items():
        weight = targets.weight[where]
        low, high = float(weight.min()), float(weight.max())
        words.append(f"{name} {low:.3g}" + (f" to {high:.3g}" if high > low * (1 + _EQUAL) else ""))
        if high > low * (1 + _EQUAL):
            problem = f"targets of {name} have different weights: divide the sum over all sequences once"
    weight, total = targets.weight[targets.has], float(targets.weight[targets.has].sum())
    is_one = float(weight.max()) < float(weight.min()) * (1 + _EQUAL)
    if is_one and not any(math.isclose(x, 1, rel_tol=_EQUAL) for x in (total, float(weight.mean()))):
        n = round(1 / float(weight.mean()))
        size = " = B * T, padding included" if n == context.ids_BT.numel() else ""
        problem = f"the loss divides by {n}{size}, but it has {len(weight)} targets: divide by the number of targets"
    whole = 1 if total < 1 else len(weight)
    rest = context.first.loss - float((targets.weight * targets.nll)[targets.has].sum())
    is_part = total < whole * (1 - _EQUAL) and rest > (whole - total) * math.log(logits.shape[-1]) / 2
    if problem and (is_part or int((by_logits < 0).sum(-1).max()) > 1):
        raise NotChecked(f"the weights of the targets add up to {total:.3g}, as with label smoothing")
    return judged(bool(problem), total, f"weight of a target: {', '.join(words)}; number: their sum", problem)


def one_modality(context: Context) -> Finding:
    """A batch of one modality has a finite loss, and gradients that are 0 and not None."""
    modalities, trained = context.modalities, _by_modality(context, context.first.targets)
    if modalities.function or len(modalities.names) < 2:
        raise NotChecked("modality has no id ranges of two modalities")
    has_vision = any(name.startswith(_VISION) for name, _ in named_tensors(context.batch))
    tried, problems = [], []
    for m, name in enumerate(modalities.names):
        if name not in trained or not len(context.pool(m)) or (m and has_vision):
            continue
        after = context.training_pass(_with_one_modality(context, m))
        tried.append(f"{name} {after.loss:.3g}")
        gradients = [g for g in after.gradients.values() if g is not None]
        if not math.isfinite(after.loss) or not all(g.isfinite().all() for g in gradients):
            problems.append(f"with {name} alone the loss or a gradient is not finite: divide by max(count, 1)")
        if lost := [n for n, g in context.gradients.items() if g is not None and after.gradients.get(n) is None]:
            hang = "is None, and DDP or FSDP may hang: add 0 times their output to the loss"
            problems.append(f"with {name} alone the gradient of {some(lost)} {hang}")
    if not tried:
        raise NotChecked("no batch of one modality can be made from this batch")
    return judged(bool(problems), None, f"loss of a batch of one modality: {', '.join(tried)}", "; ".join(problems))


def _with_one_modality(context: Context, m: int) -> Any:
    """Return the batch with all ids and labels of modality ``m``; for text, without images."""
    pool, special = context.pool(m), sorted(context.special_ids)

    def change(name: str, x: Tensor) -> Tensor | None:
        words = {word.removesuffix("s") for word in name.split("_")}
        if name.startswith(_VISION):
            return None
        if "type" in words:
            return torch.zeros_like(x)
        if x.ndim != 2 or x.is_floating_point() or x.dtype == torch.bool or words & _NO_IDS:
            return x
        of = context.modalities.of_ids(x)
        is_kept = (of == m) | (x < 0) | ((of == 0) & torch.isin(x, x.new_tensor(special)))
        return torch.where(is_kept, x, pool.to(x.device)[x.clamp_min(0) % len(pool)])

    return mapped(context.batch, change)


def halves(context: Context) -> Finding:
    """The gradient of the batch is the sum of those of its halves, weighted by targets (mean) or not at all (sum)."""
    B, middle = len(context.ids_BT), len(context.ids_BT) // 2
    if B < 2:
        raise NotChecked("the batch has one sequence")
    parts = [_rows(context.batch, B, rows) for rows in (slice(0, middle), slice(middle, B))]
    passes = [context.first, *map(context.training_pass, parts)]
    n, n_one, n_two = (int(of.targets.has.sum()) for of in passes)
    given = [[x.flatten().double() for x in of.gradients.values() if x is not None] for of in passes]
    whole, one, two = map(torch.cat, given)
    if not len(whole) == len(one) == len(two):
        raise NotChecked("a half gives no gradient to some parameters")

    def error(a: float, b: float) -> float:
        return float((whole - a * one - b * two).norm()) / float(whole.norm())

    rounding = max(1e-3, 10 * max(torch.finfo(p.dtype).eps for p in context.root.parameters()))
    shares, averaging = (n_one / n, n_two / n), error(0.5, 0.5)
    candidates = (
        (f"a mean over targets; averaging micro-batches would be off by {100 * averaging:.1f} %", shares, False),
        ("a sum over targets", (1.0, 1.0), False),
        ("divided by a fixed number or by sequences", (middle / B, 1 - middle / B), True),
    )
    advice = "divide the sum over targets by the targets of all micro-batches"
    for words, pair, is_wrong in candidates:
        if error(*pair) < rounding:
            text = f"the loss is {words} (targets of the halves: {n_one} and {n_two})"
            return judged(is_wrong, averaging, text, advice)
    text = "the gradient of the batch is no weighted sum of those of its halves"
    advice = "accumulation changes it: look for means of means, statistics over the batch and losses of a router"
    return Finding("FAILED", error(*shares), text, advice)


def _rows(batch: Any, B: int, rows: slice) -> Any:
    """Return the batch with some of its sequences; images are cut in proportion."""

    def cut(name: str, x: Tensor) -> Tensor:
        if x.ndim == 3 and x.shape[1] == B and not x.is_floating_point() and len(x) <= 4:
            return x[:, rows]
        if x.ndim and (len(x) == B or (name.startswith(_VISION) and len(x) % B == 0)):
            return x[rows.start * len(x) // B : rows.stop * len(x) // B]
        return x

    return mapped(batch, cut)


def ids(context: Context) -> Finding:
    """Ids and ranges fit the vocabulary, and every modality occurs."""
    rows = max((m.num_embeddings for m in context.root.modules() if isinstance(m, nn.Embedding)), default=0)
    V = context.first.logits_BTV.shape[-1] if context.first.logits_BTV is not None else rows
    problems = []
    for name, x in named_tensors(context.batch if isinstance(context.batch, Mapping) else context.inputs.named):
        if "label" in name and (bad := x[(x >= V) | ((x < 0) & (x != IGNORED))]).numel():
            problems.append(f"{name} has {int(bad[0])}, outside the {V} logits and not {IGNORED}")
    ranges = context.modalities.ranges or {}
    is_known_BT = ~context.valid_BT
    for name, parts in ranges.items():
        for part in parts:
            is_known_BT = is_known_BT | ((context.ids_BT >= part.start) & (context.ids_BT < part.stop))
            problems += [f"{name} goes to id {part.stop - 1} of {V}"] if part.stop > max(V, rows) else []
    if ranges.get("text") and not is_known_BT.all():
        problems.append(f"id {int(context.ids_BT[~is_known_BT][0])} is in no declared range")
    of_BT = context.modality_BT.where(context.valid_BT, -1)
    count = {name: int((of_BT == m).sum()) for m, name in enumerate(context.modalities.names)}
    absent = [name for name, n in count.items() if not n and not context.modalities.origin]
    problems += [f"no token of the batch is {name}" for name in absent]
    text = f"{V} ids; tokens: " + ", ".join(f"{n} {name}" for name, n in count.items())
    return judged(bool(problems), len(problems), text, "; ".join(problems[:3]))


def initial(context: Context) -> Finding:
    """The loss by modality against ln V and against the unigram entropy of the batch."""
    targets, words, worst, logits = context.first.targets, [], -math.inf, context.first.logits_BTV
    assert logits is not None
    V = int((logits[0, 0] > torch.finfo(logits.dtype).min).sum())  # Chameleon hides the logits of image ids
    for name, where in _by_modality(context, targets).items():
        nll, counts = float(targets.nll[where].mean()), targets.id[where].unique(return_counts=True)[1].double()
        n, entropy = int(counts.sum()), float(torch.special.entr(counts / counts.sum()).sum())  # too low with few ids
        worst = max(worst, nll - math.log(V))
        meaning = "above it: no use of context yet" if nll < 0.95 * math.log(V) else "as without training"
        meaning = "below it: uses context" if nll < entropy else meaning
        words.append(f"{name} {nll:.3g} (unigram entropy {entropy:.3g} of {n} targets, {meaning})")
    text = f"{', '.join(words)}; ln V {math.log(V):.3g}; number: largest excess over ln V"
    advice = "worse than equal probabilities: check labels, the size of the head, and loaded weights"
    return judged(worst > 1, worst, text, advice)

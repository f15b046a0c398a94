"""Attention: the QK-Norm, scale, softcap, window, sinks and masks of each call, as `reading` finds them.

Shapes: B batch, H heads, T tokens, S key tokens, K head_dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from mmqk.monitors.foreign.calls import Call
from mmqk.monitors.preflight.context import Check, Context, Finding, NotChecked, judged
from mmqk.monitors.preflight.reading import Normalization, SeenCall, fingerprint, read_calls

SMALL = 1e-3  # root mean square of the projections in the pass that reads eps
ALIKE = 0.2  # relative difference from which two values of eps differ, because the variance is estimated
NOTABLE = 0.01  # share of the queries that eps may take
# Logits of attention above this size are known from trained models (pythia-70m, TransformerLens#318).
LARGEST_LOGIT = 1e5


def calls_of(context: Context) -> list[SeenCall]:
    """Return the attention calls of the batch."""
    if "calls" not in context.cache:
        context.cache["calls"] = read_calls(context.model, *context.call, context.modalities)
    return context.cache["calls"]


def _read(context: Context) -> list[tuple[SeenCall, Call, nn.Module]]:
    """Return the calls that were read, with their modules.

    Raises:
        NotChecked: there is none.
    """
    read = [(s, s.call, context.root.get_submodule(s.path)) for s in calls_of(context) if s.call is not None]
    if not read:
        raise NotChecked("no attention call over the tokens was read")
    return read


def qk_norm(context: Context) -> Finding:
    """Which QK-Norm it is, over which axis, and whether eps and gains do what they should."""
    read = _read(context)
    wrong = []
    numbers = {n for seen, _, _ in read for x in (seen.q, seen.k) if x.is_norm for n in x.products}
    small = (
        read_calls(context.model, *context.call, context.modalities, dict.fromkeys(numbers, SMALL))
        if numbers
        else []
    )
    of_path = {seen.path: seen for seen in small}
    text, eps_words = fingerprint([seen for seen, _, _ in read]), set()
    for seen, call, module in read:
        wrong += [
            f"{seen.path}: norm over {x.over}" for x in (seen.q, seen.k) if x.over in ("tokens", "heads")
        ]
        if {seen.q.kind, seen.k.kind} > {"none"} and "unknown" not in (seen.q.kind, seen.k.kind):
            wrong.append(f"{seen.path}: only one of queries and keys is normalized")
        for x, y in ((seen.q, of_path.get(seen.path, seen).q), (seen.k, of_path.get(seen.path, seen).k)):
            if x.is_norm and x.shrinks > NOTABLE:
                wrong.append(f"{seen.path}: eps takes {100 * x.shrinks:.1f} % of the result")
            if x.is_norm and 0 < y.shrinks < 1:
                eps = y.shrinks / (1 - y.shrinks) * y.mean_square
                words, differs = _eps_words(eps, x, module, call.q_BHTK.shape[-1])
                eps_words.add(words)
                wrong += [f"{seen.path}: {words}"] if differs else []
        wrong += [
            f"{seen.path}: {name} is created, but acts on nothing"
            for name in _unused(context, seen.path, module)
        ]
    text += "".join(f"; {words}" for words in sorted(eps_words))
    size = max(float(call.q_BHTK.float().norm(dim=-1).max()) for _, call, _ in read)
    advice = f"{wrong[0]}{f' (and {len(wrong) - 1} more)' if len(wrong) > 1 else ''}" if wrong else ""
    return judged(bool(wrong), size, f"{text}; number: largest |q|", advice)


def _eps_words(eps: float, of: Normalization, module: nn.Module, K: int) -> tuple[str, bool]:
    """Return the eps that acts, in words, and whether another one is declared by the module that has the gain."""
    owners = [module.get_submodule(name.rpartition(".")[0]) for name, _ in of.gains]
    values = [getattr(m, key) for m in owners for key in ("eps", "variance_epsilon") if hasattr(m, key)]
    declared = next((float(x) for x in values if x is not None), None)
    n = K if of.over == "head" else next((size for _, size in of.gains), K)
    for place, factor in (("mean", 1), ("sum", n)):
        if declared and abs(eps * factor / declared - 1) < ALIKE:
            return f"eps {declared:.2g} on the {place} of squares", False
    words = f"eps acts like {eps:.1g} on the mean of squares"
    return (words, False) if not declared else (f"{words}, but {declared:.2g} is declared", True)


def _unused(context: Context, path: str, module: nn.Module) -> list[str]:
    """Return the gains of an attention module that get no gradient."""
    gradients = context.first.gradients
    full = {name: f"{path}.{name}".lstrip(".") for name, p in module.named_parameters() if p.ndim < 2}
    return [
        name
        for name, key in full.items()
        if not name.endswith("bias") and key in gradients and ((g := gradients[key]) is None or not g.any())
    ]


def _config(context: Context, module: nn.Module) -> Any:
    return getattr(module, "config", None) or getattr(context.root, "config", None)


def scale(context: Context) -> Finding:
    """The scale of each call, against the config or the module."""
    wrong, words = [], dict[str, int]()
    for seen, call, module in _read(context):
        K, config = call.q_BHTK.shape[-1], _config(context, module)
        usual = {"1/sqrt(head_dim)": K**-0.5, "1/head_dim": 1 / K, "1": 1.0}
        name = next(
            (name for name, x in usual.items() if math.isclose(call.scale, x, rel_tol=1e-3)),
            f"{call.scale:.3g}",
        )
        words[name] = words.get(name, 0) + 1
        scalar = getattr(config, "query_pre_attn_scalar", None)
        stated = [
            getattr(config, "attention_multiplier", None),
            scalar**-0.5 if scalar else None,
            *(getattr(module, key, None) for key in ("scaling", "scale", "softmax_scale")),
        ]
        declared = next((float(x) for x in stated if isinstance(x, int | float)), None)
        if declared is not None and not math.isclose(declared, call.scale, rel_tol=1e-3):
            wrong.append(f"{seen.path} gets {call.scale:.3g}, but its config or module has {declared:.3g}")
        once = len(seen.q.products) == len(seen.k.products) == 1
        factor = seen.q.factor * seen.k.factor
        if once and K > 1 and name == "1/sqrt(head_dim)" and math.isclose(factor, K**-0.5, rel_tol=0.01):
            wrong.append(f"{seen.path} gets queries and keys that are scaled already: divide only once")
    text = "scale is " + ", ".join(f"{name} in {n} calls" for name, n in words.items())
    return judged(bool(wrong), float(_read(context)[0][1].scale), text, wrong[0] if wrong else "")


def softcap(context: Context) -> Finding:
    """The softcap of each call, against the config."""
    wrong, caps = [], set()
    for seen, call, module in _read(context):
        declared = getattr(_config(context, module), "attn_logit_softcapping", None)
        caps.add(call.softcap)
        if declared is not None and declared != call.softcap:
            wrong.append(
                f"{seen.path}: the config has {declared:g}, the call {call.softcap or 'none'}; use eager or flex"
            )
    cap = next((cap for cap in caps if cap), None)
    return judged(bool(wrong), cap, f"softcap of the calls: {cap or 'none'}", wrong[0] if wrong else "")


def window(context: Context) -> Finding:
    """How far each call looks back, against the window of its layer."""
    wrong, texts, short = [], dict[str, int](), 0
    for seen, call, module in _read(context):
        T, declared = call.q_BHTK.shape[2], _declared_window(context, module)
        mask = (
            torch.ones(1, 1, T, T, dtype=torch.bool)
            if call.mask is None
            else call.mask.cpu().expand(-1, -1, T, -1)
        )
        position = torch.arange(T)
        back = (
            (position[:, None] - position).expand(mask.shape)[mask]
            if mask.shape[-1] == T
            else torch.tensor([0])
        )
        furthest = int(back.max()) + 1 if back.numel() else 0
        text = f"{furthest} tokens" if declared is None else f"{furthest} tokens (window {declared})"
        texts[text] = texts.get(text, 0) + 1
        short += declared is not None and declared >= T
        if declared is not None and furthest > declared:
            wrong.append(
                f"{seen.path} sees {furthest} tokens, but its window is {declared}: pass the mask of its layer"
            )
    if short and not wrong:
        raise NotChecked(f"the batch is shorter than the window of {short} calls")
    text = "calls look back " + ", ".join(f"{text} in {n} calls" for text, n in texts.items())
    return judged(bool(wrong), None, text, wrong[0] if wrong else "")


def _declared_window(context: Context, module: nn.Module) -> int | None:
    config, number = _config(context, module), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and isinstance(number, int) and number < len(kinds):
        return getattr(config, "sliding_window", None) if kinds[number] == "sliding_attention" else None
    return getattr(module, "sliding_window", getattr(config, "sliding_window", None))


def sinks(context: Context) -> Finding:
    """Learned sinks must reach the call."""
    wrong, n = [], 0
    for seen, call, module in _read(context):
        own = [name for name, _ in module.named_parameters(recurse=False) if "sink" in name]
        n += call.sink_H is not None
        if own and call.sink_H is None:
            wrong.append(
                f"{seen.path} has {own[0]}, but its attention call gets none: use eager or flash attention"
            )
    return judged(bool(wrong), n, f"{n} calls have sinks", wrong[0] if wrong else "")


def tokens(context: Context) -> Finding:
    """Which calls are not attention over the tokens, and which could not be read."""
    calls = calls_of(context)
    others = [seen for seen in calls if seen.other_tokens]
    unread = [seen for seen in calls if seen.reason and not seen.other_tokens]
    text = f"{len(_read(context))} calls attend over the tokens"
    if others:
        text += f", {len(others)} over others ({others[0].path}: {others[0].reason})"
    advice = f"{unread[0].path} was not read ({unread[0].reason}): its checks are missing" if unread else ""
    return judged(bool(unread), len(unread), f"{text}; number: calls that were not read", advice)


def finite_masks(context: Context) -> Finding:
    """Finite values of an attention mask that logits can outgrow."""
    read = [seen for seen in calls_of(context) if seen.call is not None]
    if not read:
        raise NotChecked("no attention call was read")
    largest, weakest, mass, where = 0.0, -torch.inf, 0.0, ""
    for seen in read:
        call = seen.call
        assert call is not None
        if call.masked is None or call.score_mod is None:
            continue
        for head in range(call.q_BHTK.shape[1]):
            added_BTS = call.score_mod(
                torch.zeros_like(call.q_BHTK[:, 0, :, :1]) @ call.k_BGSK[:, 0, :, :1].mT, head
            )
            hidden = call.masked[:, head if call.masked.shape[1] > 1 else 0].expand(added_BTS.shape)
            value = float(added_BTS[hidden].max())
            if value > weakest:
                weakest, where = value, seen.path
            largest = max(largest, float((call.softmax_input(head) - added_BTS).abs().max()))
            mass = max(mass, float((call.weights(head)[0] * hidden).sum(-1).mean()))
    if weakest == -torch.inf:
        text = f"no mask in {len(read)} attention calls is a finite number that logits can outgrow"
        return Finding("ok", None, text)
    text = f"hidden keys get {weakest:.3g} in {where}; largest logit {largest:.3g}, mass on hidden keys {mass:.2g}"
    return judged(
        mass > 0 or weakest > -LARGEST_LOGIT, weakest, text, "hide keys with -inf or with a bool mask"
    )


CHECKS: dict[str, Check] = {
    "QK-Norm": qk_norm,
    "scale": scale,
    "softcap": softcap,
    "window": window,
    "sinks": sinks,
    "tokens": tokens,
}

"""Leaks: tokens whose output depends on tokens that they must not see. Each check replaces some tokens and compares the
output of others. Attention: the QK-Norm, scale, softcap, window, sinks and masks of each call, as `reading` finds them.

Shapes: B batch, H heads, T tokens, S key tokens, K head_dim, n added padding.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmqk.monitors.foreign.calls import Call, of_head
from mmqk.monitors.preflight.context import IGNORED, Context, Finding, NotChecked, judged
from mmqk.monitors.preflight.parameters import is_silent
from mmqk.monitors.preflight.reading import Normalization, SeenCall, fingerprint, read_calls

SMALL = 1e-3  # root mean square of the projections in the pass that reads eps
ALIKE = 0.2  # relative difference from which two values of eps differ, because the variance is estimated
NOTABLE = 0.01  # share of the queries that eps may take
# Logits of attention above this size are known from trained models (pythia-70m, TransformerLens#318).
LARGEST_LOGIT = 1e5


def _leak(context: Context, worst: float, outputs: str, cause: str, advice: str) -> Finding:
    """Return a finding that fails if these outputs change by more than the rounding noise."""
    text = f"{outputs} change by {worst:.2g} {cause} (rounding {context.noise:.1g})"
    return judged(worst > context.noise, worst, text, advice)


def causality(context: Context) -> Finding:
    """Later tokens must not change earlier outputs: tried at four places of the sequence.

    Only tokens that are targets change, because those of a prefix without targets may see each other.
    """
    position_BT = torch.arange(context.ids_BT.shape[1], device=context.ids_BT.device).expand(context.ids_BT.shape)
    is_target_BT = context.valid_BT.cumsum(1) > 1  # not the first token
    with suppress(NotChecked):
        is_target_BT[:, 1:] &= context.first.targets.has[:, :-1]
    # A place is a token that can change, so that a look ahead by one token is found too.
    places = (is_target_BT & (context.other_ids_BT != context.ids_BT)).any(0).nonzero().flatten().tolist()
    if not places:
        raise NotChecked("the batch has no tokens that can be replaced by others of their modality")
    worst, place = -1.0, 0
    for cut in {places[len(places) * quarter // 4] for quarter in range(4)}:
        change = context.change(is_target_BT & (position_BT >= cut), (position_BT < cut) & context.valid_BT)
        worst, place = max((worst, place), (change, cut))
    advice = "unless it is an encoder, hide later tokens in the mask; look for shifts and convolutions that read ahead"
    return _leak(context, worst, f"outputs before token {place}", "if later tokens change", advice)


def sequences(context: Context) -> Finding:
    """The other sequences of a batch must not change an output."""
    shape = context.ids_BT.shape
    if shape[0] < 2:
        raise NotChecked("the batch has one sequence")
    row_BT = torch.arange(shape[0], device=context.ids_BT.device)[:, None].expand(shape)
    worst = context.change(row_BT == 0, (row_BT > 0) & context.valid_BT)
    advice = "look for statistics over the batch, a wrong reshape, or a mask that mixes rows"
    return _leak(context, worst, "outputs of other sequences", "if sequence 0 changes", advice)


def documents(context: Context) -> Finding:
    """One packed document must not change another.

    The documents of a row are numbered. For each binary digit of the number, the documents with a 1 are changed, then
    those with a 0. Two documents differ in a digit, so each is changed once while the other is not.
    """
    if context.document_BT is None:
        raise NotChecked("the batch has no document ids and no position_ids that restart")
    document_BT, valid_BT, worst = context.document_BT.long(), context.valid_BT, 0.0
    number_BT = document_BT - document_BT.amin(1, keepdim=True)
    for digit in range(int(number_BT.max()).bit_length()):
        is_one_BT = (number_BT >> digit) % 2 == 1
        ones_BT, zeros_BT = is_one_BT & valid_BT, ~is_one_BT & valid_BT
        if ones_BT.any() and zeros_BT.any():
            worst = max(worst, context.change(zeros_BT, ones_BT), context.change(ones_BT, zeros_BT))
    advice = "pass a mask of pairs, or position_ids without a 2-D attention_mask and with use_cache=False"
    advice += " (transformers#46634)"
    return _leak(context, worst, "outputs of a document", "if another one changes", advice)


def padding_ids(context: Context) -> Finding:
    """Another id at padding must change nothing."""
    if context.valid_BT.all():
        raise NotChecked("the batch has no padding")
    pools = [pool for m in range(len(context.modalities.names)) if len(pool := context.pool(m))]
    if not pools:
        raise NotChecked("the batch has no ordinary ids")
    ids_BT = torch.where(context.valid_BT, context.ids_BT, pools[0][-1])
    after = context.output(context.with_ids(ids_BT))
    worst = context.largest((after - context.base_BTV)[context.valid_BT])
    advice = "pass attention_mask to every attention layer; keep padding out of pooling and of norms over tokens"
    return _leak(context, worst, "outputs", "if padding has another id", advice)


def more_padding(context: Context, sides: tuple[int, int]) -> Finding:
    """More padding must change nothing; ``sides`` is the number of tokens on the left and on the right."""
    if context.document_BT is not None:
        raise NotChecked("the batch is packed")
    mask, shape = context.inputs.named.get("attention_mask"), context.ids_BT.shape
    if mask is not None and mask.shape != shape:
        raise NotChecked(f"attention_mask has shape {tuple(mask.shape)}, not (B, T)")
    if mask is None and not context.inputs.takes("attention_mask"):
        raise NotChecked("the model takes no attention_mask")
    more = {"attention_mask": torch.ones_like(context.ids_BT)} if mask is None else {}
    pad = getattr(getattr(context.root, "config", None), "pad_token_id", None)
    if not context.valid_BT.all():
        pad = context.ids_BT[~context.valid_BT][0]
    pad = int(context.pool(0)[0] if pad is None else pad)

    def padded(name: str, x: Tensor) -> Any:
        if x.shape[-1:] != shape[-1:] or x.ndim < 2 or x.is_floating_point():
            return x
        if name == "position_ids":
            added = x[..., -1:] + torch.arange(1, sides[1] + 1, device=x.device)
            return torch.cat([F.pad(x, (sides[0], 0)), added], -1)
        is_ids = x is context.ids_BT
        return F.pad(x, sides, value=pad if is_ids else IGNORED if "label" in name or "target" in name else 0)

    after = context.output(context.changed(padded, **more))
    change = (after[:, sides[0] : sides[0] + shape[1]] - context.base_BTV)[context.valid_BT]
    advice = "pass attention_mask to every attention layer"
    if sides[0]:
        advice = "pad on the right, or pass position_ids that leave out padding, and attention_mask to every layer"
    return _leak(context, context.largest(change), "outputs", f"with {sum(sides)} more tokens of padding", advice)


# Attention


def _read(context: Context) -> list[tuple[SeenCall, Call, nn.Module]]:
    """Return the calls that were read, with their modules.

    Raises:
        NotChecked: there is none.
    """
    read = [(s, s.call, context.root.get_submodule(s.path)) for s in context.attention_calls if s.call is not None]
    if not read:
        raise NotChecked("no attention call over the tokens was read")
    return read


def _wrong(problems: list[str], number: float | None, text: str) -> Finding:
    """Return a finding that fails if there are problems, and names the first one."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return judged(bool(problems), number, text, "".join(problems[:1]) + more)


def qk_norm(context: Context) -> Finding:
    """Which QK-Norm it is, over which axis, and whether eps and gains do what they should."""
    read, wrong, eps_words = _read(context), list[str](), set()
    numbers = {n for seen, _, _ in read for x in (seen.q, seen.k) if x.is_norm for n in x.products}
    rms = dict.fromkeys(numbers, SMALL)
    small = read_calls(context.inputs, context.modalities, rms, autocast=context.autocast) if numbers else []
    of_path = {seen.path: seen for seen in small}
    for seen, call, module in read:
        wrong += [f"{seen.path}: norm over {x.over}" for x in (seen.q, seen.k) if x.over in ("tokens", "heads")]
        if {seen.q.kind, seen.k.kind} > {"none"} and "unknown" not in (seen.q.kind, seen.k.kind):
            wrong.append(f"{seen.path}: only one of queries and keys is normalized")
        again = of_path.get(seen.path, seen)
        for x, y in ((seen.q, again.q), (seen.k, again.k)):
            if x.is_norm and x.shrinks > NOTABLE:
                wrong.append(f"{seen.path}: eps takes {100 * x.shrinks:.1f} % of the result")
            if x.is_norm and 0 < y.shrinks < 1:
                eps = y.shrinks / (1 - y.shrinks) * y.mean_square
                words, differs = _eps_words(eps, x, module, call.q_BHTK.shape[-1])
                eps_words.add(words)
                wrong += [f"{seen.path}: {words}"] if differs else []
        gradients = context.first.gradients
        for name, p in module.named_parameters():
            key = f"{seen.path}.{name}".lstrip(".")
            if p.ndim < 2 and not name.endswith("bias") and key in gradients and is_silent(gradients[key]):
                wrong.append(f"{seen.path}: {name} is created, but acts on nothing")
    text = "; ".join([fingerprint([seen for seen, _, _ in read]), *sorted(eps_words), "number: largest |q|"])
    size = max(float(call.q_BHTK.float().norm(dim=-1).max()) for _, call, _ in read)
    return _wrong(wrong, size, text)


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


def _config(context: Context, module: nn.Module) -> Any:
    return getattr(module, "config", None) or getattr(context.root, "config", None)


def scale(context: Context) -> Finding:
    """The scale of each call, against the config or the module."""
    wrong, unknown, words = list[str](), list[str](), dict[str, int]()
    for seen, call, module in _read(context):
        K, config = call.q_BHTK.shape[-1], _config(context, module)
        usual = {"1/sqrt(head_dim)": K**-0.5, "1/head_dim": 1 / K, "1": 1.0, f"{call.scale:.3g}": call.scale}
        name = next(name for name, x in usual.items() if math.isclose(call.scale, x, rel_tol=1e-3))
        words[name] = words.get(name, 0) + 1
        scalar = getattr(config, "query_pre_attn_scalar", None)
        stated = [getattr(config, "attention_multiplier", None), scalar**-0.5 if scalar else None]
        stated += [getattr(module, key, None) for key in ("scaling", "scale", "softmax_scale")]
        declared = next((float(x) for x in stated if isinstance(x, int | float)), None)
        once = len(seen.q.products) == len(seen.k.products) == 1
        factor = seen.q.factor * seen.k.factor  # of the queries and keys before the call; 0 after a norm
        is_known = once and factor > 0 and not seen.q.gains + seen.k.gains
        if declared is not None and not math.isclose(declared, call.scale, rel_tol=1e-3):
            # After norms with untrained gains, queries and keys have an RMS near 1; a scale before the call lowers it.
            size = float((call.q_BHTK.float().square().mean() * call.k_BGSK.float().square().mean()).sqrt())
            normed = seen.q.is_norm and seen.k.is_norm and call.scale == 1
            if normed and math.isclose(size, declared, rel_tol=0.2):
                continue
            if call.scale == 1 and not is_known and not (normed and math.isclose(size, 1, rel_tol=0.2)):
                unknown.append(seen.path)
            elif not is_known or not math.isclose(declared, call.scale * factor, rel_tol=0.01):
                wrong.append(f"{seen.path} gets {call.scale:.3g}, but its config or module has {declared:.3g}")
        elif once and K > 1 and name == "1/sqrt(head_dim)" and math.isclose(factor, K**-0.5, rel_tol=0.01):
            wrong.append(f"{seen.path} gets queries and keys that are scaled already: divide only once")
    text = "scale is " + ", ".join(f"{name} in {n} calls" for name, n in words.items())
    if unknown and not wrong:
        raise NotChecked(f"{text}; {unknown[0]} may scale its queries before the call")
    return _wrong(wrong, float(_read(context)[0][1].scale), text)


def softcap(context: Context) -> Finding:
    """The softcap of each call, against the config."""
    wrong, caps = [], set()
    for seen, call, module in _read(context):
        declared, cap = getattr(_config(context, module), "attn_logit_softcapping", None), call.softcap
        caps.add(cap)
        if declared is not None and declared != cap:
            wrong.append(f"{seen.path}: the config has {declared:g}, the call {cap or 'none'}; use eager or flex")
    used = next((cap for cap in caps if cap), None)
    return _wrong(wrong, used, f"softcap of the calls: {used or 'none'}")


def window(context: Context) -> Finding:
    """How far each call looks back, against the window of its layer."""
    wrong, texts, short = [], dict[str, int](), 0
    for seen, call, module in _read(context):
        T, declared = call.q_BHTK.shape[2], _declared_window(context, module)
        position_T = torch.arange(T)
        back_TT = position_T[:, None] - position_T + 1  # tokens from the key to the query, both included
        mask = torch.ones(T, T, dtype=torch.bool) if call.mask is None else call.mask.cpu()
        furthest = int(torch.where(mask, back_TT, 0).max()) if mask.shape[-1] == T else 1
        text = f"{furthest} tokens" if declared is None else f"{furthest} tokens (window {declared})"
        texts[text] = texts.get(text, 0) + 1
        short += declared is not None and declared >= T
        if declared is not None and furthest > declared:
            wrong.append(f"{seen.path} sees {furthest} tokens, but its window is {declared}: pass its layer's mask")
    if short and not wrong:
        raise NotChecked(f"the batch is shorter than the window of {short} calls")
    text = "calls look back " + ", ".join(f"{text} in {n} calls" for text, n in texts.items())
    return _wrong(wrong, None, text)


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
            wrong.append(f"{seen.path} has {own[0]}, but its attention call gets none: use eager or flash attention")
    return _wrong(wrong, n, f"{n} calls have sinks")


def tokens(context: Context) -> Finding:
    """Which calls are not attention over the tokens, and which could not be read."""
    others = [seen for seen in context.attention_calls if seen.other_tokens]
    unread = [seen for seen in context.attention_calls if seen.reason and not seen.other_tokens]
    text = f"{len(_read(context))} calls attend over the tokens"
    if others:
        text += f", {len(others)} over others ({others[0].path}: {others[0].reason})"
    wrong = [f"{seen.path} was not read ({seen.reason}): its checks are missing" for seen in unread]
    return _wrong(wrong, len(wrong), f"{text}; number: calls that were not read")


def finite_masks(context: Context) -> Finding:
    """Finite values of an attention mask that logits can outgrow."""
    read = _read(context)
    largest, weakest, mass, where = 0.0, -torch.inf, 0.0, ""
    for seen, call, _ in read:
        if call.masked is None or call.score_mod is None:
            continue
        B, H, T, _ = call.q_BHTK.shape
        zeros_BTS = call.q_BHTK.new_zeros(B, T, call.k_BGSK.shape[2])
        for head in range(H):
            added_BTS = call.score_mod(zeros_BTS, head)
            hidden_BTS = of_head(call.masked, head).expand(added_BTS.shape)
            value = float(added_BTS[hidden_BTS].max())
            if value > weakest:
                weakest, where = value, seen.path
            largest = max(largest, float((call.softmax_input(head) - added_BTS).abs().max()))
            mass = max(mass, float((call.weights(head)[0] * hidden_BTS).sum(-1).mean()))
    if weakest == -torch.inf:
        text = f"no mask in {len(read)} attention calls is a finite number that logits can outgrow"
        return Finding("ok", None, text)
    text = f"hidden keys get {weakest:.3g} in {where}; largest logit {largest:.3g}, mass on hidden keys {mass:.2g}"
    is_weak = mass > 0 or weakest > -LARGEST_LOGIT
    return judged(is_weak, weakest, text, "hide keys with -inf or with a bool mask")

"""Parameters: which get no gradient, which an update cannot move, and how the optimizer groups them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mmqk.monitors.preflight.context import Context, Finding, NotChecked, judged
from mmqk.store.formatting import some

# Share of grad_norm^2 from which one tensor decides the size of clipped updates.
DOMINANT = 0.9
STUCK = 0.5  # share of a parameter's elements that an update cannot move


def bracketed(names: Sequence[str]) -> str:
    """Return the first names of a list in brackets after a space, or "" for an empty list."""
    return f" ({some(names)})" if names else ""


def is_silent(gradient: Tensor | None) -> bool:
    """Return whether a gradient is None or exactly 0."""
    return gradient is None or not bool(gradient.any())


@contextmanager
def perturbed(context: Context, names: Sequence[str]) -> Iterator[None]:
    """Add noise to parameters inside the context; afterwards they have the same bits as before."""
    parameters = dict(context.root.named_parameters())
    saved = {name: parameters[name].detach().clone() for name in names}
    random = torch.Generator().manual_seed(0)
    try:
        for name, x in saved.items():
            noise = torch.randn(x.shape, generator=random).to(x)
            parameters[name].data.add_(noise * (x.abs().mean() + 0.1))
        yield
    finally:
        for name, x in saved.items():
            parameters[name].data.copy_(x)


def no_gradient(context: Context) -> Finding:
    """Parameters whose gradient is None or exactly 0: inert ones, and ones that act but are cut off."""
    gradients = context.gradients
    silent = [name for name, g in gradients.items() if is_silent(g)]
    if not silent:
        return Finding("ok", 0, f"all {len(gradients)} parameters get a gradient")
    # A parameter behind a factor that is 0 at first, as in LoRA, gets its gradient when the factor has moved.
    zeros = [name for name, p in context.root.named_parameters() if name in gradients and not bool(p.any())]
    if zeros:
        with perturbed(context, zeros):
            later = context.training_pass(context.batch).gradients
        n, silent = len(silent), [name for name in silent if is_silent(later[name])]
        if not silent:
            text = f"all parameters get a gradient, {n} of them when the zeros of the start have moved"
            return Finding("ok", 0, text)

    def acts(names: Sequence[str]) -> bool:
        with perturbed(context, names):
            return context.largest(context.output(context.inputs) - context.base_BTV) > context.noise

    acting = [name for name in silent if acts([name])] if acts(silent) else []
    inert = [name for name in silent if name not in acting]
    parts = {"are inert, the output does not depend on them": inert, "change the output but are cut off": acting}
    words = "; ".join(f"{len(names)} {what}{bracketed(names)}" for what, names in parts.items() if names)
    text = f"{len(silent)} of {len(gradients)} parameters get no gradient from this batch: {words}"
    advice = "use or remove inert parameters; look for detach(), no_grad or .data before those that are cut off"
    return Finding("FAILED", len(silent), text, advice)


def gradient_norm(context: Context) -> Finding:
    """The share of the largest tensor in grad_norm^2."""
    gradients = {name: g for name, g in context.gradients.items() if g is not None}
    squares = {name: float(g.double().square().sum()) for name, g in gradients.items()}
    total, largest = sum(squares.values()), max(squares, key=lambda name: squares[name])
    bad = [name for name, x in squares.items() if not x < float("inf")]
    if bad:
        advice = "find the first operation with torch.autograd.detect_anomaly()"
        return Finding("FAILED", total**0.5, f"the gradient of {some(bad)} is not finite", advice)
    share = squares[largest] / total if total else 0.0
    text = f"{largest} has {100 * share:.1f} % of grad_norm^2 (grad_norm {total**0.5:.3g})"
    advice = "clipping by the global norm scales all updates by this tensor: check its initial size and its loss"
    return judged(share > DOMINANT, share, text, advice)


def _groups(context: Context) -> list[tuple[str, nn.Parameter, dict]]:
    """Return name, parameter and group of each parameter of the model in the optimizers. A group also has its
    ``optimizer``."""
    if not context.optimizers:
        raise NotChecked("no optimizer was passed")
    names = {id(p): name for name, p in context.root.named_parameters()}
    groups = [group | {"optimizer": o} for o in context.optimizers for group in o.param_groups]
    entries = [(p, group) for group in groups for p in group["params"]]
    own = [(names[id(p)], p, group) for p, group in entries if id(p) in names]
    if not own:
        raise NotChecked("the optimizer has none of the model's parameters; it may have copies of them in fp32")
    return own


def too_small_updates(context: Context) -> Finding:
    """Parameters that an update of the size of the learning rate cannot move, because it is rounded away."""
    stuck, worst = [], 0.0
    for name, p, group in _groups(context):
        gradient = context.gradients.get(name)
        lr = float(group.get("initial_lr", group.get("lr", 0.0)))
        if gradient is None or not lr:
            continue
        direction = gradient if isinstance(group["optimizer"], torch.optim.SGD) else gradient.sign()
        moves = (p.detach().double() - lr * direction.double()).to(p.dtype) != p.detach()
        has_gradient = gradient != 0
        share = float((~moves & has_gradient).sum() / has_gradient.sum().clamp_min(1))
        worst = max(worst, share)
        stuck += [f"{name} ({str(p.dtype).removeprefix('torch.')}, lr {lr:.2g})"] if share >= STUCK else []
    text = f"an update rounds to nothing in {len(stuck)} parameters" + (f": {some(stuck)}" if stuck else "")
    advice = "keep these parameters in fp32 (master weights), give them a higher learning rate, or store less than 1"
    return judged(bool(stuck), worst, text, advice)


def tied(context: Context) -> Finding:
    """Weights that the optimizer updates and decays twice, and weights that should be tied and are not."""
    places: dict[tuple[int, torch.Size], list[str]] = {}
    for name, p, _ in _groups(context):
        places.setdefault((p.data_ptr(), p.shape), []).append(name)
    twice = [" = ".join(names) for names in places.values() if len(names) > 1]
    if twice:
        text = f"the optimizer updates and decays the same memory twice: {some(twice)}"
        return Finding("FAILED", len(twice), text, "assign the Parameter itself: head.weight = embedding.weight")
    shared: dict[int, list[str]] = {}
    for name, p in context.root.named_parameters(remove_duplicate=False):
        shared.setdefault(id(p), []).append(name)
    ties = [" = ".join(names) for names in shared.values() if len(names) > 1]
    config = getattr(context.root, "config", None)
    ends = [getattr(context.root, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    weights = [getattr(end, "weight", None) for end in ends]
    if getattr(config, "tie_word_embeddings", False) and weights[0] is not weights[1]:
        text = "the config ties the head to the embedding, but they are two tensors"
        return Finding("FAILED", 0, text, "call tie_weights()")
    return Finding("ok", len(ties), f"tied: {some(ties)}" if ties else "no tied weights")


def decay(context: Context) -> Finding:
    """Norms, gains and biases that are decayed. To decay embeddings is a choice, so these are named only."""
    decayed = [(name, p) for name, p, group in _groups(context) if group.get("weight_decay", 0.0)]
    embeddings = {id(m.weight) for m in context.root.modules() if isinstance(m, nn.Embedding)}
    wrong = [name for name, p in decayed if p.ndim < 2 or "norm" in name.rpartition(".")[0]]
    chosen = [name for name, p in decayed if id(p) in embeddings and name not in wrong]
    text = f"{len(decayed)} parameters are decayed, {len(wrong)} of them norms, gains or biases{bracketed(wrong)}"
    text += f", {len(chosen)} embeddings{bracketed(chosen)}" if chosen else ""
    return judged(bool(wrong), len(wrong), text, "put these into a group with weight_decay=0")


def in_no_group(context: Context) -> Finding:
    """Trainable parameters that the optimizer does not have, and tensors of the optimizer that the model lacks."""
    held = {name for name, _, _ in _groups(context)}
    missing = [name for name, p in context.root.named_parameters() if p.requires_grad and name not in held]
    own = {id(p) for p in context.root.parameters()}
    all_of = (p for o in context.optimizers for group in o.param_groups for p in group["params"])
    foreign = sum(id(p) not in own for p in all_of)
    text = f"{len(missing)} trainable parameters are in no group{bracketed(missing)}"
    text += f"; {foreign} tensors of the optimizer are not in the model" if foreign else ""
    advice = "create the optimizer after the model is complete, or set requires_grad=False"
    return judged(bool(missing or foreign), len(missing), text, advice)

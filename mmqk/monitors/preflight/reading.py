"""Reads attention as it really runs: which QK-Norm, scale, softcap, mask and sinks each call gets.

The reading does not depend on the names of modules. During one forward pass the graph is cut at the output of each
product with a parameter. So the queries of a call depend on the raw projections alone, and their derivative shows
what happens in between. A norm makes the queries independent of the size of the projections (Euler: J u = 0), a
linear function does not (J u = q). The entries of J that are not 0 show over which entries the norm is taken.

Shapes: B batch, H heads, G key heads, T tokens, S key tokens, K head_dim.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mmqk.monitors.adapters import device_of, tensors_in
from mmqk.monitors.foreign.calls import Call, NotMeasured, OtherTokens
from mmqk.monitors.foreign.capture import Capture, watching
from mmqk.monitors.foreign.inputs import Inputs, UncuttableError
from mmqk.monitors.foreign.isolate import isolated
from mmqk.monitors.foreign.measurement import CallOrigins, Measurement
from mmqk.monitors.foreign.trace import Origins
from mmqk.monitors.modalities import Modalities, Side

_PRODUCTS = {"linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "einsum"}
ROWS = 2  # sequences of the pass that reads attention
# A derivative along the projection of at least this share of the queries means that nothing is normalized.
_LINEAR = 0.999
_ZERO = 1e-3  # relative size of a sum of derivatives that counts as 0


class Projections(TorchFunctionMode):
    """Cuts the graph at each product of an activation with a parameter, and stores the products of the next call.

    Args:
        origins: origins of the tensors of the pass.
        rms: the root mean square to which each product is scaled, by the number of the product; others stay.
    """

    def __init__(self, origins: Origins, rms: Mapping[int, float]):
        super().__init__()
        self.origins, self.rms, self.count = origins, rms, 0
        self.products: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        operands = tensors_in((args, kwargs or {}))
        if name not in _PRODUCTS or not isinstance(out, Tensor) or not any(map(self._is_weight, operands)):
            return out
        self.count += 1
        size = self.rms.get(self.count)
        leaf = out.detach()
        if size is not None:
            leaf = leaf * (size / leaf.float().square().mean().sqrt().clamp_min(1e-30)).to(leaf.dtype)
        self.products[self.count] = leaf.requires_grad_()
        cut = leaf.clone()  # the model may edit it in place
        self.origins.set(cut, self.origins.of(out))
        return cut

    def _is_weight(self, x: Tensor) -> bool:
        origin = self.origins.of(x)
        is_derived = x.requires_grad and origin is not None and not origin.inputs
        return x.ndim >= 2 and x.is_floating_point() and (isinstance(x, nn.Parameter) or is_derived)


@dataclass(frozen=True)
class Normalization:
    """What happens to the queries or the keys of one call between their projection and the call.

    Attributes:
        kind: "none", "RMS norm" or "layer norm"; "unknown" if no projection was found.
        over: entries over which the norm is taken: "head", "full" width, "heads" or "tokens" (both wrong), or "".
        rope: whether the norm comes "before" or "after" RoPE; "" if the two are the same function, or without RoPE.
        gains: names and numbers of elements of the parameters that act after the projection.
        shrinks: share by which eps shrinks the result at its present size.
        mean_square: mean square of the normalized part of the projection.
        factor: norm of the result over the norm of the projection, if nothing is normalized.
        products: numbers of the products that it depends on.
    """

    kind: str = "unknown"
    over: str = ""
    rope: str = ""
    gains: tuple[tuple[str, int], ...] = ()
    shrinks: float = 0.0
    mean_square: float = 0.0
    factor: float = 0.0
    products: tuple[int, ...] = ()

    @property
    def is_norm(self) -> bool:
        """Whether something is normalized."""
        return self.kind not in ("none", "unknown")

    def __str__(self) -> str:
        if not self.is_norm:
            return self.kind
        right = {"head": "per head", "full": "over the full width"}
        over = right.get(self.over, f"over {self.over} (wrong axis)")
        return f"{self.kind} {over}{f', {self.rope} RoPE' if self.rope else ''}"


@dataclass
class SeenCall:
    """One attention call: its inputs, or why it is not read; and the normalization of its queries and keys."""

    path: str
    call: Call | None = None
    reason: str = ""
    other_tokens: bool = False
    q: Normalization = field(default_factory=Normalization)
    k: Normalization = field(default_factory=Normalization)


class CallReader(Measurement):
    """Stores each attention call of a pass instead of measuring its statistics."""

    def __init__(self, main: Side, root: nn.Module, projections: Projections):
        super().__init__(main)
        self.root, self.projections, self.seen = root, projections, list[SeenCall]()

    def attention(self, path: str, call: Call | NotMeasured, origins: CallOrigins) -> int:
        """Store one attention call; return its number."""
        products, self.projections.products = self.projections.products, {}
        seen = SeenCall(path)
        self.seen.append(seen)
        try:
            q_side, k_side = self._sides_of(call, origins)
            if isinstance(call, NotMeasured):
                raise call
            self._check_shape(call, q_side, k_side)
        except NotMeasured as reason:
            seen.reason, seen.other_tokens = str(reason), isinstance(reason, OtherTokens)
            return len(self.seen)
        module = self.root.get_submodule(path)
        seen.call = replace(call, q_BHTK=call.q_BHTK.detach(), k_BGSK=call.k_BGSK.detach(), v_BGSK=call.v_BGSK.detach())
        if isinstance(module, nn.MultiheadAttention):
            seen.q = seen.k = Normalization("none", factor=1.0)
        else:
            token = int(self.valid_BT[0].nonzero()[-1]) if self.valid_BT[0].any() else 0
            seen.q = normalization(call.q_BHTK, products, module, token)
            seen.k = normalization(call.k_BGSK, products, module, token)
        return len(self.seen)


def _derivative(x: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the derivative of a number by each input; 0 where it does not depend on the input."""
    if not x.requires_grad or not inputs:
        return [torch.zeros_like(y) for y in inputs]
    return torch.autograd.grad(x, inputs, retain_graph=True, materialize_grads=True)


def _product(x: Tensor, y: Tensor) -> float:
    return float((x.detach().double() * y.detach().double()).sum())


def _sums_to_0(x: Tensor) -> bool:
    """Return whether the sums over the last axis are 0, up to rounding."""
    x, tolerance = x.detach().double(), max(_ZERO, 2 * torch.finfo(x.dtype).eps)
    return bool(x.sum(-1).abs().sum() < tolerance * x.abs().sum())


def normalization(x_BHTK: Tensor, products: Mapping[int, Tensor], module: nn.Module, token: int) -> Normalization:
    """Return what happens between the projections and the queries or keys, from the derivative at one token.

    Args:
        x_BHTK: queries or keys of a call.
        products: the products with a parameter since the last call, by number.
        module: the module that makes the call.
        token: the token whose derivative is taken; RoPE must rotate it, so it is not token 0.
    """
    K, x_K = x_BHTK.shape[-1], x_BHTK[0, 0, token]
    noise_K = torch.randn(K, generator=torch.Generator().manual_seed(0)).to(x_K)
    w_K = (x_K + x_K.norm() * noise_K / (2 * math.sqrt(K))).detach()
    numbers, tensors = list(products), list(products.values())
    of_head, of_channel = (_derivative(y, tensors) for y in ((w_K * x_K).sum(), x_K[0]))
    found = [i for i, g in enumerate(of_head) if g.any()]
    if not found:
        return Normalization()
    width = tensors[found[-1]].shape[-1]
    u, g_head, g_channel = (y[found[-1]].detach().reshape(-1, width) for y in (tensors, of_head, of_channel))
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    by_gain = _derivative(x_K[0], list(parameters.values()))
    gains = {name: g for name, g in zip(parameters, by_gain, strict=True) if g.any()}
    # A bias is no part of what scales with the projection.
    biases = [parameters[name] for name in gains if name.endswith("bias")]
    total = _product(w_K, x_K) - sum(map(_product, biases, _derivative((w_K * x_K).sum(), biases)))
    along = sum(_product(of_head[i], tensors[i]) for i in found) / total if total else 1.0
    part = g_head != 0
    n_channel, n_tokens, n_head = int(g_channel.count_nonzero()), int(part.any(-1).sum()), int(part.sum())
    # A layer norm ignores the mean of its input; without a gain its output has none, also after RoPE.
    is_centered = all(_sums_to_0(g.flatten()) for g in (g_head, g_channel)) or _sums_to_0(x_BHTK)
    shared: dict[str, Any] = {
        "gains": tuple((name, g.numel()) for name, g in gains.items()),
        "mean_square": float(u[part].double().var() if is_centered else u[part].double().square().mean()),
        "products": tuple(numbers[i] for i in found),
    }
    if n_tokens == 1 and (along > _LINEAR or n_channel <= 2):
        factor = float(x_K.detach().double().norm()) / max(float(u[part].double().norm()), 1e-30)
        return Normalization("none", factor=factor, **shared)
    if n_tokens > 1:
        over = "tokens"
    elif n_head <= K:
        over = "head"
    else:  # one channel depends on all channels, or on its own channel of each head
        over = "full" if n_channel > 2 * n_head / K else "heads"
    rope = _rope(g_channel, u, part, gains, K) if over in ("head", "full") else ""
    return Normalization("layer norm" if is_centered else "RMS norm", over, rope, shrinks=along, **shared)


def _rope(g: Tensor, u: Tensor, part: Tensor, gains: Mapping[str, Tensor], K: int) -> str:
    """Return whether the norm comes before or after RoPE, from the derivative ``g`` of one channel; "" if the order
    changes nothing or there is no RoPE.

    RoPE mixes two channels. A gain before RoPE therefore acts on a channel with two of its elements, a gain after
    RoPE with one. Without the directions that the norm removes, the derivative of a channel has one entry without
    RoPE, and two with RoPE before the norm.
    """
    gain = next((g for g in gains.values() if g.numel() >= K), None)
    if gain is None:
        return ""
    if int(gain.count_nonzero()) > 1:
        return "before"
    row, own = g[part].double(), int(g[part].abs().argmax())
    removed = torch.stack([u[part].double(), torch.ones_like(row)], 1)
    others = torch.arange(len(row), device=row.device) != own
    fit = torch.linalg.lstsq(removed[others].cpu(), row[others, None].cpu()).solution
    rest = (row[others, None].cpu() - removed[others].cpu() @ fit).abs().max()
    return "after" if float(rest) > _ZERO * float(row.abs().max()) else ""


def read_calls(
    inputs: Inputs, modalities: Modalities | None = None, rms: Mapping[int, float] | None = None, autocast: bool = False
) -> list[SeenCall]:
    """Return every attention call of one forward pass over the first sequences of a batch.

    The pass keeps the graph between two projections only, so it needs little more memory than one without gradients.

    Args:
        inputs: the arguments of the model, whose state is restored.
        modalities: needed only if the inputs have no token ids.
        rms: see `Projections`.
        autocast: whether training calls the model under autocast.
    """
    root, modalities = inputs.root, modalities or Modalities({})
    with contextlib.suppress(UncuttableError):
        inputs = inputs.first(ROWS)
    inputs = inputs.copied()
    modality_BT = modalities.of(inputs)
    source = None if inputs.ids is None or modalities.function else frozenset({inputs.ids[0]})
    main = Side("", ("text",), source, None, modality_BT.to(device_of(root)), inputs.padding(source))
    origins = Origins(inputs)
    projections = Projections(origins, rms or {})
    reader = CallReader(main, root, projections)
    capture = Capture(root, len(modality_BT), reader, origins)
    with isolated(root, autocast=autocast), torch.enable_grad(), watching(capture), projections:
        root(*inputs.args, **inputs.kwargs)
    return reader.seen


def fingerprint(calls: Sequence[SeenCall]) -> str:
    """Return which QK-Norm the calls have, in words, by groups of calls with the same normalization."""
    groups: dict[str, list[str]] = {}
    for seen in calls:
        if seen.call is not None:
            gains = ", ".join(f"{name} ({n})" for name, n in dict(seen.q.gains + seen.k.gains).items())
            words = str(seen.q) if str(seen.q) == str(seen.k) else f"queries {seen.q}, keys {seen.k}"
            if seen.q.is_norm or seen.k.is_norm:
                words += f", {f'gains {gains}' if gains else 'no gain'}"
            groups.setdefault(words, []).append(seen.path)
    if not groups:
        return "no attention call was read"
    total = sum(map(len, groups.values()))
    parts = [
        words if len(groups) == 1 else f"{words} in {len(paths)} of {total} calls ({paths[0]})"
        for words, paths in groups.items()
    ]
    return f"QK-Norm: {'; '.join(parts)}"

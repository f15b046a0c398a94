"""Statistics of weights, their gradients and updates.

The agreement of the modalities is the cosine between their gradients, estimated from two disjoint halves of a batch.
The gradient of one batch is mostly noise, which shrinks the plain cosine. Two disjoint halves A and B have
independent noise, so the expected product of their gradients contains only the signal.

The effects of low precision are rounding in a bf16 residual stream, sizes of updates, and Adam's epsilon and second
moment. The radial budget of a weight matrix is how much each modality's gradients increase its norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmqk.monitors.formulas.reduce import Sums, sums

Gradients = Sequence[Tensor]  # one for each parameter


@dataclass(frozen=True)
class HalfProducts:
    """Dot products of the gradients of M modalities over a group of parameters; add two `HalfProducts` to combine
    their groups.

    Attributes:
        cross_MM: ``<g_a^A, g_b^B>``.
        noise: ``|g^A - g^B|^2 / 2``, an estimate of the variance of a half's gradient, (M,).
    """

    cross_MM: Tensor
    noise: Tensor

    def __add__(self, other: HalfProducts) -> HalfProducts:
        return HalfProducts(self.cross_MM + other.cross_MM, self.noise + other.noise)

    @property
    def signal(self) -> Tensor:
        """``<g^A, g^B>``, an unbiased estimate of the squared length of the true gradient, (M,)."""
        return self.cross_MM.diagonal()

    @property
    def cosine(self) -> Tensor:
        """``(<g_a^A, g_b^B> + <g_b^A, g_a^B>) / 2 / sqrt(<g_a^A, g_a^B> <g_b^A, g_b^B>)``, (M, M): an estimate of the
        true gradients' cosine that noise does not shrink.

        Both products of the numerator have the same mean; their average has less noise and does not depend on which
        half is A. The cosine can be outside [-1, 1]. It is NaN if the signal of a modality is not above 0: the batch
        is then too small for an estimate.
        """
        length = self.signal.clamp_min(0).sqrt()
        cosine = (self.cross_MM + self.cross_MM.T) / 2 / (length[:, None] * length)
        positive = (self.signal > 0)[:, None] & (self.signal > 0)
        return torch.where(positive, cosine, torch.nan)


def half_products(halves: Sequence[tuple[Gradients, Gradients]]) -> HalfProducts:
    """Return the dot products of the two halves' gradients over one group of parameters, in fp64.

    Args:
        halves: for each modality its gradients on half A and on half B, each divided by the number of targets in its
            half.
    """
    M = len(halves)
    flat = [tuple(torch.cat([g.double().flatten() for g in half]) for half in pair) for pair in halves]
    cross_MM = torch.stack([torch.stack([flat[a][0] @ flat[b][1] for b in range(M)]) for a in range(M)])
    return HalfProducts(cross_MM, torch.stack([(a - b).square().sum() / 2 for a, b in flat]))


def absorption(x_BTD: Tensor, y_BTD: Tensor, selected_MBT: Tensor) -> dict[str, Sums]:
    """Return the rounding error of adding a sublayer's output y to a bf16 residual stream x, by modality of the token.

    With ``e = bf16(x + y) - x - y`` over one token's channels, the statistics are

    - absorb_error, ``|e| / |y|``; at 1 the rounding error is as large as y
    - absorb_bias, ``-<e, y> / |y|^2``: the share of y that rounding removes; negative if rounding adds to y
    - absorbed, the share of ``|y|^2`` in channels where ``bf16(x + y) == x``, which the addition does not change

    The inputs may have any precision; x is rounded to bf16 first.

    Args:
        x_BTD: residual stream before the addition.
        y_BTD: the added tensor.
        selected_MBT: which tokens belong to each modality. Tokens with y = 0 are left out.
    """
    x = x_BTD.bfloat16().double()
    y = y_BTD.double()
    rounded = (x + y).bfloat16().double()
    error_BTD = rounded - x - y
    energy_BT = y.square().sum(-1)
    nonzero_MBT = selected_MBT & (energy_BT > 0)
    values = {
        "absorb_error": (error_BTD.square().sum(-1) / energy_BT).sqrt(),
        "absorb_bias": -(error_BTD * y).sum(-1) / energy_BT,
        "absorbed": torch.where(rounded == x, y.square(), 0.0).sum(-1) / energy_BT,
    }
    return {name: sums(values_BT, nonzero_MBT) for name, values_BT in values.items()}


def below_epsilon(second_moment: Tensor, step: int | Tensor, beta2: float, eps: float) -> Tensor:
    """Return the share of a tensor's elements whose ``sqrt(v_hat)`` is below Adam's epsilon, where epsilon determines
    the size of the updates.

    Args:
        second_moment: Adam's v, before bias correction.
        step: number of updates so far.
        beta2: decay of v.
        eps: Adam's epsilon.
    """
    return ((second_moment.float() / (1 - beta2**step)).sqrt() < eps).float().mean()


def gradient_over_second_moment(
    gradient: Tensor, second_moment: Tensor, step: int | Tensor, beta2: float, eps: float
) -> Tensor:
    """Return ``sqrt(mean(g^2 / max(v_hat, eps^2)))``, the mean over a tensor's elements.

    It is 1 in the first step, and far above 1 if v is much smaller than the current squared gradient (Wortsman et al.
    2023, arXiv 2304.13013, Algorithm 2).

    Args:
        gradient: the gradient of the latest update, after clipping.
        second_moment: Adam's v after that update, before bias correction.
        step: number of updates so far.
        beta2: decay of v.
        eps: Adam's epsilon.
    """
    corrected = second_moment.float() / (1 - beta2**step)
    return (gradient.float().square() / corrected.clamp_min(eps**2)).mean().sqrt()


def update_size(before: Tensor, after: Tensor, lr: float) -> tuple[Tensor, Tensor]:
    """Return the RMS of one update divided by the learning rate (1 for a pure sign step of Adam), and the RMS of the
    update divided by that of the parameter."""
    step_rms = (after.float() - before.float()).square().mean().sqrt()
    return step_rms / lr, step_rms / before.float().square().mean().sqrt()


@torch.no_grad()
def matrix_sizes(weight_OI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the Frobenius norm, spectral norm and stable rank of a matrix, in fp32.

    The stable rank is ``|W|_F^2 / |W|_2^2``: at most the rank, and near 1 if one direction dominates (Rudelson and
    Vershynin 2007; it falls before failures in arXiv 2602.01734). It is NaN for a matrix of zeros. The spectral norm
    is the largest singular value by torch.linalg. For a matrix that is not finite, both norms are infinite or NaN.
    """
    wide_OI = weight_OI.detach().float()
    frobenius = torch.linalg.vector_norm(wide_OI)
    if not bool(torch.isfinite(frobenius)):
        return frobenius, frobenius, frobenius.new_tensor(torch.nan)
    spectral = torch.linalg.matrix_norm(wide_OI, 2)
    return frobenius, spectral, (frobenius / spectral).square()


@torch.no_grad()
def product_update_rank(
    before_q_OI: Tensor, after_q_OI: Tensor, before_k_OI: Tensor, after_k_OI: Tensor, head_dim: int
) -> Tensor:
    """Return for every head the effective rank of the first-order change of its product W_q^T W_k: (H,).

    The change is ``dW_q^T W_k + W_q^T dW_k``, with singular values s. The effective rank is the exponential of the
    entropy of ``s^2 / sum(s^2)``: 1 if one direction has the whole change, and at most twice head_dim. It fell before
    failures in arXiv 2606.28116 (Section 3.4). It is NaN where nothing changes, or for weights that are not finite.

    Args:
        before_q_OI, after_q_OI: W_q before and after an update; the rows of a head follow each other.
        before_k_OI, after_k_OI: W_k; with fewer heads, several query heads share one.
        head_dim: K, the rows of a head.
    """
    q_HKI, new_q_HKI, k_GKI, new_k_GKI = (
        w.detach().float().unflatten(0, (-1, head_dim)) for w in (before_q_OI, after_q_OI, before_k_OI, after_k_OI)
    )
    k_HKI, new_k_HKI = (w.repeat_interleave(len(q_HKI) // len(k_GKI), 0) for w in (k_GKI, new_k_GKI))
    left_HID = torch.cat([new_q_HKI - q_HKI, q_HKI], 1).mT
    right_HID = torch.cat([k_HKI, new_k_HKI - k_HKI], 1).mT
    if not bool(torch.isfinite(left_HID.sum() + right_HID.sum())):
        return left_HID.new_full((len(q_HKI),), torch.nan)
    if 2 * head_dim < left_HID.shape[1]:  # the product of the thin QR factors has the same singular values
        left_HID, right_HID = (torch.linalg.qr(x, mode="r").R for x in (left_HID, right_HID))
    power = torch.linalg.svdvals(left_HID @ right_HID.mT).square()
    return torch.special.entr(power / power.sum(-1, keepdim=True)).sum(-1).exp()


@dataclass(frozen=True)
class AdamUpdate:
    """One step of AdamW or AdamH for one tensor.

    Attributes:
        before: the tensor before the step.
        after: the tensor after the step.
        second_moment: Adam's v after the step, before bias correction.
        step: number of updates including this one; may be a tensor, which stays on its device.
        lr: learning rate of this step, after update clipping.
        betas: decays of the moments.
        eps: epsilon.
        weight_decay: as in torch's AdamW, which first multiplies the tensor by ``1 - lr * weight_decay``.
        fixed_norm: whether the step is AdamH's, which keeps ``|W|`` and has no weight decay.
    """

    before: Tensor
    after: Tensor
    second_moment: Tensor
    step: int | Tensor
    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    fixed_norm: bool = False


class RadialBudget:
    """Splits the change of ``|W|^2`` of one tensor over a window of optimizer steps.

    The split is exact for every step of AdamW: ``d|W|^2 = sum_a 2<W, U_a> + 2<W, U_decay> + |dW|^2`` with
    ``U_a = -lr m_a / (sqrt(v) + eps)`` after bias corrections, where m_a is the running mean of modality a's
    gradients and v is Adam's second moment. The step is linear in m but not in v, so the modalities share v. The sum
    of ``-<W, gradient_a>`` does not measure growth: under QK-Norm it is always 0.

    AdamH's step is ``c (W + s U) - W`` with U from AdamW, ``s = |W| lr / |U|`` and ``c = |W| / |W + s U|``. For
    given s and c this step is linear in m, so the modalities share s, c and v. A modality's part is
    ``2<W, c s U_a>``, the part of decay is ``2<W, (c - 1) W>``, and the total is 0.

    The update of Muon is not linear in m, so `add_whole` splits it into decay and a part without a modality.

    Args:
        first_moment: Adam's m before the window, whose share in later steps decays with beta1 and is not attributed
            to a modality; None before the tensor's first step.
        modalities: number of modalities.

    Attributes:
        by_modality: sum of ``2<W, U_a>`` for each modality.
        decay: the part from weight decay, or from AdamH's return to the fixed norm.
        step: sum of ``|dW|^2``; even a step at a right angle to W increases ``|W|``.
        unattributed: the part from gradients before the window, which Adam's first moment still contains; with Muon,
            the part from all updates.
        rest: the part from changes that the optimizer did not make: rounding, QK-Clip.
        total: the measured change of ``|W|^2``, which is the sum of the other parts.
    """

    def __init__(self, first_moment: Tensor | None, modalities: int) -> None:
        zero = torch.zeros((), dtype=torch.float64)
        self.by_modality: list[Tensor] = [zero] * modalities
        self.decay = self.step = self.unattributed = self.rest = self.total = zero
        self._earlier_moment: Tensor | float = 0.0 if first_moment is None else first_moment.double()
        self._moments: list[Tensor | float] = [0.0] * modalities

    def add(self, gradients: Sequence[Tensor | None], update: AdamUpdate) -> None:
        """Add one step.

        Args:
            gradients: gradient of each modality's part of the loss, times the clipping factor of the step. The sum of
                these gradients is the step's gradient. None if the part does not depend on the tensor.
            update: the step.
        """
        beta1, beta2 = update.betas
        w, dw = update.before.double(), update.after.double() - update.before.double()
        root_v = (update.second_moment.double() / (1 - beta2**update.step)).sqrt()
        factor = -update.lr / (1 - beta1**update.step) / (root_v + update.eps)

        shrink: Tensor | float = update.lr * update.weight_decay
        self._earlier_moment = beta1 * self._earlier_moment
        for a, gradient in enumerate(gradients):
            new = 0.0 if gradient is None else gradient.double()
            self._moments[a] = beta1 * self._moments[a] + (1 - beta1) * new
        moment = self._earlier_moment + sum(self._moments)
        if update.fixed_norm:
            factor, shrink = _at_fixed_norm(w, factor, moment, update.lr)

        def radial(moment: Tensor | float) -> Tensor:
            return 2 * (w * factor * moment).sum()

        for a, of_modality in enumerate(self._moments):
            self.by_modality[a] = self.by_modality[a] + radial(of_modality)
        self.unattributed = self.unattributed + radial(self._earlier_moment)
        self.rest = self.rest + 2 * (w * (dw - (factor * moment - shrink * w))).sum()
        self._add_change(w, update.after.double(), shrink)

    def add_whole(self, before: Tensor, after: Tensor, shrink: float) -> None:
        """Add one step whose update cannot be split by modality.

        Args:
            before: the tensor before the step.
            after: the tensor after the step.
            shrink: the share of ``before`` that weight decay removes.
        """
        w, dw = before.double(), after.double() - before.double()
        self.unattributed = self.unattributed + 2 * (w * (dw + shrink * w)).sum()
        self._add_change(w, after.double(), shrink)

    def _add_change(self, before: Tensor, after: Tensor, shrink: Tensor | float) -> None:
        self.decay = self.decay - 2 * shrink * before.square().sum()
        self.step = self.step + (after - before).square().sum()
        self.total = self.total + after.square().sum() - before.square().sum()


def _at_fixed_norm(w: Tensor, factor: Tensor, moment: Tensor | float, lr: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return AdamH's factor on the first moment, and the share of ``w`` that the return to the fixed norm removes."""
    update = factor * moment  # -lr u
    length, norm = w.norm(), update.norm()
    scale = torch.where(norm > 0, lr * length / norm, 0.0)
    moved = (w + scale * update).norm()
    back = torch.where(moved > 0, length / moved, 0.0)
    return back * scale * factor, 1 - back

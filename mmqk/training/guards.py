"""Guards against a bad step: AdaGC clips gradients by tensor, SkipStep skips updates. Checkpoints store their state.

Neither synchronizes with the host. Shapes are in the names: P parameter tensors, N steps of the window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ADAGC_DECAY = 0.98
SKIP_WINDOW = 128


class AdaGC:
    """Clips the gradient of each tensor to a multiple of the running mean of its norm (arXiv 2502.11034).

    ```
    g <- g min(1, factor gamma / |g|)        gamma <- 0.98 gamma + 0.02 |g|, with the clipped g
    ```

    During warm-up, no gradient is clipped, and gamma is the smallest norm so far. Norms of 0 are ignored: the tensor
    had no gradient, such as a tensor of a modality that the step did not have.

    Args:
        tensors: Number of parameter tensors.
        factor: Largest norm as a multiple of gamma (1.05 in the paper).
        warmup: Steps of warm-up.
    """

    def __init__(self, tensors: int, factor: float, warmup: int) -> None:
        self.factor, self.warmup = factor, warmup
        self.state = {"gamma_P": torch.full((tensors,), torch.inf, dtype=torch.float32)}  # checkpoints store it

    @torch.no_grad()
    def clip(self, gradients: Sequence[Tensor], norms: Sequence[Tensor], step: int) -> None:
        """Clip the gradients in place. ``norms`` are the gradients' norms; ``step`` counts from 0."""
        norm_P = torch.stack(list(norms)).float()
        before_P = self.state["gamma_P"].to(norm_P.device)
        after_P = torch.minimum(before_P, norm_P)
        if step >= self.warmup:
            gamma_P = torch.where(before_P.isfinite(), before_P, norm_P)
            scale_P = (self.factor * gamma_P / norm_P).clamp(max=1.0).nan_to_num(1.0)
            torch._foreach_mul_(list(gradients), list(scale_P.unbind()))
            after_P = ADAGC_DECAY * gamma_P + (1 - ADAGC_DECAY) * scale_P * norm_P
        self.state["gamma_P"] = torch.where(norm_P > 0, after_P, before_P)


class SkipStep:
    """Skips an update whose loss or gradient norm is far above the mean of the last 128 steps (OLMo-core).

    A step is skipped if its loss or its gradient norm is more than ``sigmas`` standard deviations above the mean of
    the window. The first 64 steps are never skipped. Skipped steps count in the window.

    Args:
        sigmas: Number of standard deviations (6 in OLMo-core).
    """

    def __init__(self, sigmas: float) -> None:
        self.sigmas = sigmas
        self.state = {  # checkpoints store it
            "window_2N": torch.zeros(2, SKIP_WINDOW, dtype=torch.float32),
            "count": torch.zeros((), dtype=torch.int64),
            "skipped": torch.zeros((), dtype=torch.int64),
        }

    @torch.no_grad()
    def skips(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Return whether to skip this update, as a boolean tensor, and add the step to the window."""
        value_2 = torch.stack([loss.float(), grad_norm.float()])
        window_2N, count, skipped = (value.to(value_2.device) for value in self.state.values())
        filled_N = torch.arange(SKIP_WINDOW, device=window_2N.device) < count
        n = filled_N.sum().clamp_min(2)
        mean_2 = torch.where(filled_N, window_2N, 0.0).sum(1) / n
        square_2N = torch.where(filled_N, (window_2N - mean_2[:, None]).square(), 0.0)
        limit_2 = mean_2 + self.sigmas * (square_2N.sum(1) / (n - 1)).sqrt()
        skip = (value_2 > limit_2).any() & (count >= SKIP_WINDOW // 2)
        window_2N[:, count % SKIP_WINDOW] = value_2
        self.state = {"window_2N": window_2N, "count": count + 1, "skipped": skipped + skip}
        return skip

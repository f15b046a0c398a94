"""Guards against spikes of the gradient: AdaGC clips the gradient of each tensor, SkipStep skips updates.

Both keep their history in buffers, which `TrainingModule` writes into checkpoints beside the model, so that a resumed
run makes the same decisions as an uninterrupted run. Neither synchronizes with the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor, nn

ADAGC_DECAY = 0.98
SKIP_WINDOW = 128


class Guard(nn.Module):
    """A module whose buffers keep their dtype: precision bf16-true would round them."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        for name, buffer in self.named_buffers():
            setattr(self, name, buffer.to(fn(buffer).device))
        return self


class AdaGC(Guard):
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
        super().__init__()
        self.factor, self.warmup = factor, warmup
        self.gamma_P: Tensor
        self.register_buffer("gamma_P", torch.full((tensors,), torch.inf, dtype=torch.float32), persistent=False)

    @torch.no_grad()
    def clip(self, gradients: Sequence[Tensor], norms: Sequence[Tensor], step: int) -> None:
        """Clip the gradients in place. ``norms`` are the gradients' norms; ``step`` counts from 0."""
        norm_P = torch.stack(list(norms)).to(self.gamma_P.dtype)
        if step < self.warmup:
            self.gamma_P.copy_(torch.where(norm_P > 0, torch.minimum(self.gamma_P, norm_P), self.gamma_P))
            return
        gamma_P = torch.where(self.gamma_P.isfinite(), self.gamma_P, norm_P)
        scale_P = (self.factor * gamma_P / norm_P).clamp(max=1.0).nan_to_num(1.0)
        torch._foreach_mul_(list(gradients), list(scale_P.unbind()))
        averaged_P = ADAGC_DECAY * gamma_P + (1 - ADAGC_DECAY) * scale_P * norm_P
        self.gamma_P.copy_(torch.where(norm_P > 0, averaged_P, self.gamma_P))


class SkipStep(Guard):
    """Skips an update whose loss or gradient norm is far above the mean of the last 128 steps (OLMo-core).

    A step is skipped if its loss or its gradient norm is more than ``sigmas`` standard deviations above the mean of
    the window. The first 64 steps are never skipped. Skipped steps count in the window.

    Args:
        sigmas: Number of standard deviations (6 in OLMo-core).
    """

    def __init__(self, sigmas: float) -> None:
        super().__init__()
        self.sigmas = sigmas
        self.window_2N: Tensor
        self.count: Tensor
        self.skipped: Tensor
        self.register_buffer("window_2N", torch.zeros(2, SKIP_WINDOW, dtype=torch.float32), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("skipped", torch.zeros((), dtype=torch.int64), persistent=False)

    @torch.no_grad()
    def skips(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Return whether to skip this update, as a boolean tensor, and add the step to the window."""
        value_2 = torch.stack([loss.float(), grad_norm.float()])
        filled_N = torch.arange(SKIP_WINDOW, device=self.window_2N.device) < self.count
        n = filled_N.sum().clamp_min(2)
        mean_2 = torch.where(filled_N, self.window_2N, 0.0).sum(1) / n
        square_2N = torch.where(filled_N, (self.window_2N - mean_2[:, None]).square(), 0.0)
        limit_2 = mean_2 + self.sigmas * (square_2N.sum(1) / (n - 1)).sqrt()
        skip = (value_2 > limit_2).any() & (self.count >= SKIP_WINDOW // 2)
        self.window_2N[:, self.count % SKIP_WINDOW] = value_2
        self.count += 1
        self.skipped += skip
        return skip

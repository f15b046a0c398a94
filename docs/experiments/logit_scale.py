"""The patches of configs/claims/logit_scale.yaml: each multiplies every attention logit of a model by a factor.

W_q and W_k are both multiplied by the root of the factor. The model must have no QK-Norm. Run `mmqk ablate` from the
root of the repository, so that Python can import this file as `docs.experiments.logit_scale`.
"""

import torch


@torch.no_grad()
def scale_logits(model, factor):
    for block in model.blocks:
        block.attention.w_q.weight *= factor**0.5
        block.attention.w_k.weight *= factor**0.5


def x1(model):
    scale_logits(model, 1)


def x4(model):
    scale_logits(model, 4)


def x12(model):
    scale_logits(model, 12)


def x36(model):
    scale_logits(model, 36)


def x120(model):
    scale_logits(model, 120)


def x360(model):
    scale_logits(model, 360)


def x3600(model):
    scale_logits(model, 3600)

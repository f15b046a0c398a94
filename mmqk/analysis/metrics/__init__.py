"""The metrics that a claim can name: functions of the files of a run.

A name is a key of `METRICS` (of one run) or `FAMILY_METRICS` (of the runs of a family at one seed), with
``/modality`` for one modality: ``largest_attention_logit``, ``largest_attention_logit/text`` (text
queries), ``final_loss/image``, ``lr_sensitivity/text``, ``dose_response(q_norm/image,
data.dial.entropy.image)``. `docs/metrics.md` lists all of them.

metric        the classes of metrics
probes        attention logits, entropy, norms and their slopes
losses        initial, best and final loss; learnt modalities
stability     spikes, divergence, warnings
outcome       diverged, stalled, regime not reached
rates         learning-rate sensitivity, first unstable learning rate, dose response
scaling       model size, extrapolation of the largest logit
prediction    AUROC of early norms for late failure
table         all metrics by name
"""

from mmqk.analysis.metrics.losses import (
    LEARNT_NATS,
    LOSS_WINDOW,
    MODALITIES_OF,
    FinalLoss,
    best_loss,
    final_loss,
    initial_loss,
    is_trained,
    learnt,
    trained_modalities,
    unigram_entropy,
)
from mmqk.analysis.metrics.metric import BySeries, FamilyMetric, Measured, Metric
from mmqk.analysis.metrics.outcome import Outcome, outcomes
from mmqk.analysis.metrics.prediction import Auroc, Prediction, auroc, predict_failure
from mmqk.analysis.metrics.probes import (
    LAST_PROBES,
    attention_entropy,
    entropy_series,
    growth_series,
    largest_attention_logit,
    logit_series,
    norm_series,
    norm_slope,
)
from mmqk.analysis.metrics.rates import DoseResponse, dose_response
from mmqk.analysis.metrics.scaling import Extrapolation, extrapolate, model_size
from mmqk.analysis.metrics.stability import Warnings, divergence_step, warnings_of
from mmqk.analysis.metrics.table import FAMILY_METRICS, METRICS, find_metric

__all__ = [
    "FAMILY_METRICS",
    "LAST_PROBES",
    "LEARNT_NATS",
    "LOSS_WINDOW",
    "METRICS",
    "MODALITIES_OF",
    "Auroc",
    "BySeries",
    "DoseResponse",
    "Extrapolation",
    "FamilyMetric",
    "FinalLoss",
    "Measured",
    "Metric",
    "Outcome",
    "Prediction",
    "Warnings",
    "attention_entropy",
    "auroc",
    "best_loss",
    "divergence_step",
    "dose_response",
    "entropy_series",
    "extrapolate",
    "final_loss",
    "find_metric",
    "growth_series",
    "initial_loss",
    "is_trained",
    "largest_attention_logit",
    "learnt",
    "logit_series",
    "model_size",
    "norm_series",
    "norm_slope",
    "outcomes",
    "predict_failure",
    "trained_modalities",
    "unigram_entropy",
    "warnings_of",
]

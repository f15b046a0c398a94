"""The metrics that a claim can name, computed from the files of a run.

A name is a key of `METRICS` (metrics of one run) or `FAMILY_METRICS` (metrics of the runs of a family at one seed).
The suffix ``/modality`` selects one modality. Examples: ``largest_attention_logit``,
``largest_attention_logit/text`` (text queries), ``final_loss/image``, ``lr_sensitivity/text``.
`docs/metrics.md` lists all metrics.

table         all metrics by name
probes        attention logits, entropy, norms and their slopes; the order in which the statistics of one run grew
outcomes      initial, best and final loss; spikes, divergence, late failure; diverged, stalled, regime not reached
families      learning-rate sensitivity, first unstable learning rate; extrapolation over model size
"""

# ruff: noqa: F401
from mmqk.lab.metrics.families import model_size
from mmqk.lab.metrics.outcomes import (
    LEARNED_NATS,
    LOSS_WINDOW,
    FinalLoss,
    best_loss,
    divergence_step,
    final_loss,
    initial_loss,
    is_trained,
    learned,
    trained_modalities,
    unigram_entropy,
)
from mmqk.lab.metrics.table import (
    FAMILY_METRICS,
    METRICS,
    FamilyMetric,
    Measured,
    Metric,
    find_metric,
    metric_value,
)

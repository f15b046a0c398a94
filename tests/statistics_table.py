"""Table of every statistic that mmqk logs: tags, formula, unit, modality, healthy range, bad values, cost.

docs/statistics.md is generated from this table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import product

# Placeholder in a pattern of tags -> regular expression of the text that it stands for. In a pattern, the part in
# [...] is optional.
PLACES = {
    "MODALITY": "[^/-]+",
    "PARAMETER": r"[^/]+\.[^/]+",
    "QUERY": "[^/-]+",
    "KEY": "[^/-]+",
    "TARGET": "[^/-]+",
    "BLOCK": "[^/-]+",
    "OTHER": "[^/-]+",
    "KIND": "[a-z_]+",
    "layerNN": r"layer\d{2,}",
    "headNN": r"head\d{2,}",
}
UNKNOWN = "–"


@dataclass(frozen=True)
class Statistic:
    """One row of the table: one statistic, a mean and its maximum, or one statistic of several matrices.

    Attributes:
        patterns: patterns of its tags, with the placeholders of `PLACES`.
        formula: in plain text. Means are over tokens (and heads) unless stated.
        unit: unit of the number.
        healthy: a range, its source and the mark of the source (docs/statistics.md lists the marks), or `UNKNOWN`.
        bad: what a bad value means.
        when: a key of `WHEN`.
        group: the section of docs/statistics.md.
    """

    patterns: tuple[str, ...]
    formula: str
    unit: str
    healthy: str
    bad: str
    when: str
    group: str = ""

    @property
    def forms(self) -> tuple[str, ...]:
        """The patterns with and without each optional part."""
        return tuple(form for pattern in self.patterns for form in _forms(pattern))

    def matches(self, tag: str) -> str | None:
        """Return the form that the tag matches, or None."""
        return next((form for form in self.forms if _regex(form).fullmatch(tag)), None)


def _forms(pattern: str) -> list[str]:
    parts = re.split(r"(\[[^]]*\])", pattern)
    choices = [("", part[1:-1]) if part.startswith("[") else (part,) for part in parts]
    return ["".join(choice) for choice in product(*choices)]


def _regex(form: str) -> re.Pattern[str]:
    pieces = re.split(f"({'|'.join(PLACES)})", form)
    return re.compile("".join(PLACES.get(piece, re.escape(piece)) for piece in pieces))


# When statistics are measured, in words.
WHEN = {
    "step": "at every step",
    "validation": "every `data.val_every_n_steps` steps",
    "start": "before the first step",
    "flex": "at every step with `--backend flex`",
    "QK-Clip": "at every step with `optim.qk_clip`",
    "probe": "with each probe",
    "matrices": "with `monitor.matrices`",
    "precision": "with `monitor.precision`",
    "parameters": "with `monitor.parameters`",
    "second moment": "with `monitor.second_moment`",
    "agreement": "with `monitor.gradient_agreement`",
    "sharpness": "with `monitor.sharpness`",
    "budget": "with `monitor.budget_every_n_steps`",
}

_QK_CLIP = "QK-Clip limits it to 100 (Kimi K2, 2507.20534 [S])"
_LOGIT_RANGE = (
    f"about 10 in stable small runs, above 100 in stalled ones (CPU logs of a public course [V]); {_QK_CLIP}; the"
    " loss worsens from about 1e3, and all runs above 1e4 diverged (2309.14322, Fig. 10 and 9 [V])"
)
_TWICE = "at step 1,000, less than twice that of a converging run (2410.16682, Table 1 [S])"
_OUTPUT_DRIFT = (
    "near 0 under z-loss; without weight decay the output logits drift to very negative values late in training"
    " (2309.14322, Fig. 3 and 4 [V])"
)
# Matrices of a block, which can have a copy per modality.
MATRICES = tuple(
    f"{matrix}_SIZE[/MODALITY]" for matrix in ("w_q", "w_k", "w_gate", "w_up", "w_down", "w_v", "w_o", "w_g")
)


def sizes(size: str) -> tuple[str, ...]:
    """Return the patterns of one statistic, such as ``norm``, for all matrices of a block."""
    return tuple(f"{matrix.replace('SIZE', size)}/layerNN" for matrix in MATRICES)


_ENTROPY = "at most the log of the number of visible keys"

# fmt: off
_GROUPS: dict[str, tuple[Statistic, ...]] = {
    "Every step": (
        Statistic(("loss",),
            "what training minimizes, with z-loss and loss weights", "nats",
            "no step more than 0.1 nat above the median of 201 steps around it (2608.30320 [S])",
            "a spike", "step"),
        Statistic(("loss/TARGET",),
            "mean cross-entropy", "nats", "within 0.5 nat of its own best 50-step median after warm-up [I]",
            "the modality diverges or is not learned", "step"),
        Statistic(("log_z/TARGET",),
            "mean log Z, Z = Σ exp(logit) over the vocabulary", "nats", _OUTPUT_DRIFT, "the output softmax drifts",
            "step"),
        Statistic(("excess/TARGET",),
            "loss − entropy of the source, if known", "nats", "within 0.1 nat of the best arm on the same data [I]",
            "the modality stalled or was never learned", "step"),
        Statistic(("grad_norm",),
            "‖g‖ of all parameters before clipping", "–",
            "no step 7 standard deviations from the mean of the last 1,000 (2501.00656 [S])",
            "a spike", "step"),
        Statistic(("clip_factor",),
            "min(1, `trainer.gradient_clip_val` / grad_norm)", "–",
            "1 in most steps [I]", "clipping sets the learning rate", "step"),
        Statistic(("lr",),
            "learning rate of the update", "–", UNKNOWN, "another schedule than intended", "step"),
        Statistic(("tokens_per_s",),
            "tokens per second since the last flush", "1/s", UNKNOWN, "low: another process uses the machine",
            "step"),
        Statistic(("alarm/KIND",),
            "series on which an alarm begins at this step", "–", "absent [I]",
            "see docs/alarms.md and alarms.jsonl", "step"),
        Statistic(("attn_row_max/QUERY/layerNN",),
            "largest z (see attn_logit_max) of the step's queries; above 8 times the softcap only a lower bound",
            "–", "as attn_logit_max", "attention becomes one-hot", "flex"),
        Statistic(("attn_row_lse/QUERY/layerNN",),
            "mean of log Σ exp z over the step's queries, z after the cap", "nats", UNKNOWN,
            "below -88.7: cuDNN's backward pass has given NaN (docs/speed.md)", "flex"),
        Statistic(("qk_clip_logit/layerNN",),
            "largest signed logit of the step's tokens, before clipping", "–", _QK_CLIP,
            "far above tau: logits grow too fast for clipping", "QK-Clip"),
        Statistic(("qk_clip_gamma/layerNN",),
            "smallest factor on a head's logits, min(1, tau / logit)", "–",
            "1 for most heads; 12.7 % were clipped in the first 70,000 steps of Kimi K2 (2507.20534 [S])",
            "permanently below 1: each update undoes the clip", "QK-Clip"),
    ),
    "Held-out data": (
        Statistic(("val_loss/TARGET",),
            "mean cross-entropy", "nats", UNKNOWN, "above loss: overfitting", "validation"),
        Statistic(("val_log_z/TARGET", "val_excess/TARGET"),
            "log_z, excess", "nats", "as these", "as these", "validation"),
        Statistic(("val_unigram/TARGET",),
            "unigram loss on the same targets", "nats", UNKNOWN, "val_loss near it: the model uses no context",
            "start"),
        Statistic(("captions_cut",),
            "share of captions that are cut", "–", "0 [I]", "raise data.seq_len", "start"),
    ),
    "Norms of activations": (
        Statistic(("attn_in_norm[_max]/MODALITY/layerNN",),
            "‖x‖ of the input of W_q, W_k and W_v", "–", UNKNOWN,
            "the gain of the pre-norm grew, or without pre-norm the residual stream", "probe"),
        Statistic(("q_raw_norm[_max]/MODALITY/layerNN", "k_raw_norm[_max]/MODALITY/layerNN"),
            "‖W_q x‖, ‖W_k x‖ of a head, before QK-Norm", "–", _TWICE,
            "one modality far above the other: competition", "probe"),
        Statistic(("q_norm[_max]/MODALITY/layerNN", "k_norm[_max]/MODALITY/layerNN"),
            "‖q‖, ‖k‖ in the dot product, after QK-Norm and RoPE", "–",
            "√head_dim times the gains with RMS QK-Norm [I]", "growth: logits grow with q_norm times k_norm",
            "probe"),
        Statistic(("v_norm[_max]/MODALITY/layerNN",),
            "‖v‖ of a head", "–", UNKNOWN, "if only q and k grow, the growth is specific to the logits", "probe"),
        Statistic(("attn_out_norm[_max]/MODALITY/layerNN",),
            "‖y‖ of the attention output, added to the residual stream", "–", "as q_raw_norm",
            "attention dominates the stream", "probe"),
        Statistic(("mlp_out_norm[_max]/MODALITY/layerNN",),
            "‖y‖ of the MLP output, added to the residual stream", "–", "as q_raw_norm",
            "the product in SwiGLU grows", "probe"),
        Statistic(("resid_norm[_max]/MODALITY/layerNN",),
            "‖x‖ of the residual stream after the layer (with deep_norm: after its norm)", "–",
            "variance grows about linearly with depth with pre-norm and post-norm, exponentially with pre-norm only"
            " (2502.02732 [S]); a ratio of 1e4 between layers preceded a crash (2111.09883, Fig. 2 [V])",
            "late layers are too small to change the stream", "probe"),
        Statistic(("final_norm/MODALITY", "final_rms/MODALITY"),
            "‖x‖ of the last layer's output before the final norm (with deep_norm: after the layer's norm);"
            " ‖x‖ / √d_model", "–", "its growth preceded divergence (2405.09818, Fig. 5a [V])",
            "the modality that grows first is more informative than the size", "probe"),
    ),
    "Attention logits": (
        Statistic(("attn_logit_max/QUERY-KEY/layerNN[/headNN]",),
            "max z, z = scale · q·k, over all visible pairs", "–",
            _LOGIT_RANGE, "attention becomes one-hot", "probe"),
        Statistic(("attn_logit_absmax/QUERY-KEY/layerNN[/headNN]",),
            "max |z|", "–", "as attn_logit_max", "far above attn_logit_max: some keys get no attention",
            "probe"),
        Statistic(("attn_logit_p999/QUERY-KEY/layerNN[/headNN]",),
            "the |z| that one pair in a thousand exceeds", "–", UNKNOWN, "near the maximum: no single outlier",
            "probe"),
        Statistic(("attn_logit_mean/QUERY/layerNN[/headNN]",),
            "mean of z over a row's visible keys", "–", UNKNOWN, "far from 0: lost precision in bf16",
            "probe"),
        Statistic(("attn_logit_var/QUERY/layerNN[/headNN]",),
            "variance of z over a row's visible keys", "–", UNKNOWN, "the row sharpens", "probe"),
        Statistic(("attn_logit_offset/QUERY-KEY/layerNN[/headNN]",),
            "mean of z over a row's keys of one modality − attn_logit_mean", "–", UNKNOWN,
            "one modality attracts attention as a block", "probe"),
        Statistic(("attn_logit_offset_var/QUERY/layerNN[/headNN]",),
            "variance of a row's offsets, weighted by the number of keys", "–", UNKNOWN,
            "competition dominates", "probe"),
        Statistic(("attn_logit_spread_var/QUERY/layerNN[/headNN]",),
            "variance of z about the mean of the row's keys of the same modality", "–", UNKNOWN,
            "attention sharpens within a modality", "probe"),
        Statistic(("attn_logit_bound/layerNN",),
            "upper bound on |z| under QK-Norm: scale · longest q · longest k", "–",
            "8 at head_dim 64 and gains 1 [S]", "the gains are large", "probe"),
    ),
    "Attention weights": (
        Statistic(("attn_entropy/QUERY/layerNN[/headNN]",),
            "−Σ p log p over a row", "nats", _ENTROPY,
            "near 0 with a falling attn_rank: collapse; with a high rank it can be benign (2505.21910 [S])",
            "probe"),
        Statistic(("attn_entropy_block/QUERY/layerNN[/headNN]",),
            "entropy of a row's masses on the modalities", "nats", "at most the log of the number of modalities",
            "near 0: queries attend to one modality only", "probe"),
        Statistic(("attn_entropy_within/QUERY/layerNN[/headNN]",),
            "Σ mass · entropy within the modality", "nats", _ENTROPY,
            "near 0: one key per modality gets all attention", "probe"),
        Statistic(("attn_mass/QUERY-KEY/layerNN[/headNN]",),
            "sum of p over a row's keys of one modality", "–",
            "compare with this modality's share of the visible keys",
            "0 or 1: the modalities do not mix, or one dominates", "probe"),
        Statistic(("sink_mass/QUERY/layerNN[/headNN]",),
            "p of the learned sink, exp(s) / (exp(s) + Σ exp z), s its logit and z after the cap; with"
            " `model.attn_sink`", "–", UNKNOWN, "near 1: the heads are silent; near 0: the sink is not used",
            "probe"),
        Statistic(("attn_mass_hidden/QUERY/layerNN",),
            "p of the keys that a finite additive mask, such as −1e4, hides; only with `attach`", "–",
            "0 [I]", "logits outgrow the mask: hide keys with −inf or a bool mask", "probe"),
        Statistic(("attn_mass_padding/QUERY/layerNN", "attn_mass_documents/QUERY/layerNN"),
            "p of padding, and of other packed documents; only with `attach`, and only if they can get attention",
            "–", "0 [I]", "the attention mask leaks", "probe"),
        Statistic(("attn_rank/layerNN",),
            "(Σ s²)² / Σ s⁴, s the singular values of an attention matrix; mean over heads", "–", "between 1 and T",
            "near 1: all queries have the same weights", "probe"),
        Statistic(("gate_open/MODALITY/layerNN",),
            "mean of the sigmoid gate on the attention's output; with `model.attn_gate`", "–",
            "about 0.5 at the start [I]", "near 0: attention does not reach the stream", "probe"),
        Statistic(("gate_closed/MODALITY/layerNN",),
            "share of its values below 0.1", "–", "about 0 at the start [I]",
            "near 1: most heads or channels are silent", "probe"),
    ),
    "Sources of logit growth": (
        Statistic(("logit_q_power/QUERY-KEY/layerNN", "logit_k_power/QUERY-KEY/layerNN"),
            "log mean ‖q‖², ‖k‖², over all pairs of a sequence", "log", UNKNOWN, "queries, keys grew", "probe"),
        Statistic(("logit_alignment/QUERY-KEY/layerNN",),
            "log tr(C_q C_k) / (tr C_q · tr C_k), C the uncentered second moments", "log",
            "−log head_dim for random directions [I]; the norms grow, not the alignment (2309.14322, E.1 [V])",
            "queries and keys align along one direction", "probe"),
        Statistic(("logit_masked/QUERY-KEY/layerNN",),
            "log mean (q·k)² over visible pairs − log mean (q·k)² over all pairs", "log", "near 0 [I]",
            "visible pairs differ from others: the three parts above are less reliable", "probe"),
        Statistic(("k_common/KEY/layerNN",),
            "‖mean k‖² / mean ‖k‖² over a sequence's keys of one modality", "–",
            "1 / number of keys for random directions [I]", "near 1: keys are equal", "probe"),
        Statistic(("q_weight_gain/MODALITY/layerNN", "k_weight_gain/MODALITY/layerNN"),
            "‖W_q x‖ / ‖x‖ over all heads together; W_k likewise", "–", UNKNOWN,
            "the matrix grew along this modality's inputs", "probe"),
        Statistic(("q_gain_mean/layerNN", "q_gain_max/layerNN", "k_gain_mean/layerNN", "k_gain_max/layerNN"),
            "mean and maximum of |gain| of QK-Norm", "–", "about 1; they grew abnormally in Qwen3-Next [S]",
            "the bound on the logits grows", "probe"),
        Statistic(("sigma_ratio/layerNN",),
            "uᵀWv / σ(W) of σReparam, σ(W) the largest singular value; minimum over the layer's matrices", "–",
            "1 [I]; measured above 0.94 at a learning rate of 0.03", "the weights in use are too large", "probe"),
    ),
    "Output": (
        Statistic(("out_log_z/TARGET",),
            "log Z = out_logit_mean + log V + out_logit_spread, after the final softcap", "nats", "as log_z",
            "as log_z", "probe"),
        Statistic(("out_logit_mean/TARGET",),
            "mean logit over the vocabulary", "–", "not very negative (2309.14322, Fig. 3 and 4 [V])",
            "the logits drift together", "probe"),
        Statistic(("out_logit_spread/TARGET",),
            "log Z − log V − mean logit", "nats", UNKNOWN, "0: all tokens have the same probability",
            "probe"),
        Statistic(("out_block_log_z/TARGET-BLOCK",),
            "log Σ exp(logit) over the ids of one modality", "nats", UNKNOWN,
            "another block near that of the target: competition", "probe"),
        Statistic(("out_wrong_mass/TARGET",),
            "probability of ids outside the target's modality", "–", "near 0 inside a span of one modality [I]",
            "the model does not predict the next modality", "probe"),
        Statistic(("embed_row_norm/BLOCK", "head_row_norm/BLOCK"),
            "mean L2 norm of the rows of embedding and head", "–", "equal at the start [I]",
            "one modality was updated or decayed more", "probe"),
    ),
    "Matrices": (
        Statistic(sizes("norm"),
            "‖W‖, Frobenius; by modality if each has its own matrix", "–", UNKNOWN,
            "growth and weight decay are not in balance", "matrices"),
        Statistic(sizes("spectral"),
            "largest singular value of W", "–", "bounded by σReparam (2303.06296 [S])",
            "the product of those of W_q and W_k bounds the logits", "matrices"),
        Statistic(sizes("stable_rank"),
            "‖W‖² / (largest singular value)²", "–", "not falling; it fell before failures (2602.01734 [V])",
            "near 1: one direction dominates the matrix", "matrices"),
    ),
    "Radial budget": (
        Statistic(("w_q_growth/TARGET/layerNN", "w_k_growth/TARGET/layerNN"),
            "Σ 2⟨W, U_a⟩ over a window, U_a the part of AdamW's or AdamH's updates from modality a's losses; not"
            " with Muon", "–", UNKNOWN, "this modality increases the norm of the matrix", "budget"),
        Statistic(("w_q_growth_decay/layerNN", "w_k_growth_decay/layerNN"),
            "Σ 2⟨W, U_decay⟩, U_decay the weight decay, or AdamH's return to the fixed norm", "–",
            UNKNOWN, "0: nothing reduces the norm", "budget"),
        Statistic(("w_q_growth_step/layerNN", "w_k_growth_step/layerNN"),
            "Σ ‖ΔW‖²", "–", UNKNOWN,
            "if most of the growth: noise in the updates increases the norm", "budget"),
        Statistic(("w_q_growth_unattributed/layerNN", "w_k_growth_unattributed/layerNN"),
            "Σ 2⟨W, U⟩, U the part of updates from the first moment before the window (decays as β1^steps); with"
            " Muon the whole update", "–", "near 0, except with Muon [I]", "the window is too short", "budget"),
        Statistic(("w_q_growth_rest/layerNN", "w_k_growth_rest/layerNN"),
            "growth not due to the optimizer: rounding, QK-Clip", "–", "near 0 without QK-Clip [I]",
            "other code changes the weights", "budget"),
        Statistic(("w_q_growth_total/layerNN", "w_k_growth_total/layerNN"),
            "Δ‖W‖² over the window: the sum of all parts", "–", "0 with AdamH [I]", "unlimited growth",
            "budget"),
        Statistic(("w_q_sq/layerNN", "w_k_sq/layerNN"),
            "‖W‖² at the end of the window", "–", UNKNOWN, "unlimited growth", "budget"),
        Statistic(("budget_window",),
            "steps of the window", "–", "about 50 [I]", "too short: w_q_growth_unattributed is large",
            "budget"),
        Statistic(("budget_clip_factor",),
            "mean clip_factor in the window", "–", "as clip_factor", "as clip_factor",
            "budget"),
    ),
    "Gradients": (
        Statistic(("grad_agreement/TARGET-OTHER[/layerNN]",),
            "½ (⟨g_a^A, g_b^B⟩ + ⟨g_b^A, g_a^B⟩) / √(⟨g_a^A, g_a^B⟩ ⟨g_b^A, g_b^B⟩), A and B disjoint halves; not"
            " biased towards 0 by noise; can be outside [−1, 1]", "–",
            "unequal gradients harm AdamW (2605.16165 [A])", "below 0: one modality's update harms the other",
            "agreement"),
        Statistic(("grad_signal/TARGET[/layerNN]",),
            "⟨g^A, g^B⟩, an unbiased estimate of the squared gradient", "–", UNKNOWN,
            "not above 0: the batch is too small", "agreement"),
        Statistic(("grad_noise/TARGET[/layerNN]",),
            "½ ‖g^A − g^B‖²", "–", UNKNOWN, "far above grad_signal: steps are mostly noise", "agreement"),
        Statistic(("grad_norm/PARAMETER",),
            "‖g‖ before clipping", "–", UNKNOWN, "shows where a spike begins", "parameters"),
        Statistic(("update_rms/PARAMETER",),
            "RMS of the update / learning rate", "–", "1 for a pure sign step of Adam [I]",
            "far above 1: v lags behind", "parameters"),
        Statistic(("update_ratio/PARAMETER",),
            "RMS of the update / RMS of the parameter", "–", UNKNOWN,
            "the parameter changes within few steps, or not at all", "parameters"),
        Statistic(("qk_update_rank/layerNN",),
            "effective rank of the update of W_qᵀ W_k to first order, exp of the entropy of s² / Σs² with singular"
            " values s; the lowest head", "–", "at most 2 head_dim; falls before failures (2606.28116, 3.4 [A])",
            "few directions have the whole update", "parameters"),
        Statistic(("sharpness",),
            "gᵀ P H g / ‖g‖², P = learning rate / ((1 − β₁ᵗ) (√v̂ + ε)), H the Hessian of the step's loss", "–",
            "below 2 (1 + β₁) / (1 − β₁) (2506.04805 [A])", "the loss rises along Adam's step", "sharpness"),
        Statistic(("update_unchanged",),
            "share of elements that the update left unchanged; always with `trainer.precision` bf16-true",
            "–", "near 0 [I]", "near 1: updates are below half the spacing of bf16 numbers", "parameters"),
        Statistic(("adam_below_eps/PARAMETER",),
            "share of elements with √v̂ below Adam's epsilon", "–",
            "0; gradients approach 1e-8 as model size and learning rate grow (2309.14322, Fig. 11 to 13 [V])",
            "epsilon sets the size of their updates", "parameters"),
        Statistic((*sizes("grad_over_v"), "embed_grad_over_v", "head_grad_over_v"),
            "√ mean(g² / max(v̂, ε²)) of the latest update, g after clipping, v̂ Adam's second moment after it",
            "–", "about 1; spikes follow 1 to 8 steps after values far above 1 (2304.13013 [A])",
            "v lags behind: updates are too long; see `optim.update_clip`", "second moment"),
    ),
    "Precision": (
        Statistic(("absorb_error/MODALITY/layerNN", "absorb_error_if_bf16/MODALITY/layerNN"),
            "‖e‖ / ‖y‖, e = bf16(x + y) − x − y, for each y added to the residual stream x; _if_bf16: of a stream"
            " that were bf16", "–", "far below 1 [I]", "near 1: the addition is mostly noise",
            "precision"),
        Statistic(("absorb_bias/MODALITY/layerNN", "absorb_bias_if_bf16/MODALITY/layerNN"),
            "−⟨e, y⟩ / ‖y‖²", "–", "near 0 [I]", "above 0: rounding shrinks the added vector", "precision"),
        Statistic(("absorbed/MODALITY/layerNN", "absorbed_if_bf16/MODALITY/layerNN"),
            "share of ‖y‖² in channels that do not change", "–", "near 0 [I]",
            "the layer does not change the stream", "precision"),
    ),
    "The probe": (
        Statistic(("probe_sequences",),
            "sequences in the probe, over all ranks", "–", UNKNOWN,
            "maxima of runs with other numbers cannot be compared", "probe"),
        Statistic(("attn_layers_seen",),
            "layers with measured attention", "–", "all layers [I]", "maxima do not cover the model", "probe"),
        Statistic(("attn_layers_hidden",),
            "layers with detected, not measured attention", "–", "0 [I]", "as attn_layers_seen", "probe"),
    ),
}
# fmt: on
STATISTICS = tuple(replace(s, group=group) for group, rows in _GROUPS.items() for s in rows)

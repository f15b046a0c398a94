"""Every statistic that mmqk logs, as data: its tags, formula, unit, whose modality, healthy range, what a bad value
means, and what it costs. docs/statistics.md is written from it. Needs the standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product

# Words in capitals in a pattern of tags, and what stands there. [...] may be missing.
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
# Whose modality a statistic goes by.
INPUT, QUERY, PAIR, KEY = "input token", "query", "query, key", "key"
TARGET, TARGET_BLOCK, VOCABULARY, NOBODY = "target", "target, block of ids", "block of ids", "–"
UNKNOWN = "none known"


@dataclass(frozen=True)
class Statistic:
    """One row: one number, or a mean and its maximum, or the same of several matrices.

    Attributes:
        patterns: of its tags; `PLACES` has the words in capitals.
        formula: in plain text. Means are over tokens (and heads), where nothing else is said.
        unit: of the number.
        modality: whose it is.
        healthy: a range with its source and mark, or `UNKNOWN`.
        bad: what a bad value means.
        cost: the part of `COSTS` that gives it.
        group: heading that it stands under.
    """

    patterns: tuple[str, ...]
    formula: str
    unit: str
    modality: str
    healthy: str
    bad: str
    cost: str
    group: str = ""

    @property
    def forms(self) -> tuple[str, ...]:
        """The patterns with and without each part that may be missing."""
        return tuple(form for pattern in self.patterns for form in _forms(pattern))

    def matches(self, tag: str) -> str | None:
        """The form that a tag has, None if it is not of this statistic."""
        return next((form for form in self.forms if _regex(form).fullmatch(tag)), None)


def _forms(pattern: str) -> list[str]:
    parts = re.split(r"(\[[^]]*\])", pattern)
    choices = [("", part[1:-1]) if part.startswith("[") else (part,) for part in parts]
    return ["".join(choice) for choice in product(*choices)]


def _regex(form: str) -> re.Pattern[str]:
    pieces = re.split(f"({'|'.join(PLACES)})", form)
    return re.compile("".join(PLACES.get(piece, re.escape(piece)) for piece in pieces))


# Part -> (switch, what it does in words). What is measured of it stands in docs/statistics.md.
COSTS: dict[str, tuple[str, str]] = {
    "step": ("always", "numbers that the step has anyway; one transfer to the host for many steps"),
    "validation": ("`data.val_every_n_steps`", "forwards over the held-out sequences"),
    "start": ("always", "counted once, before the first step"),
    "alarms": ("always", "rules over numbers that are logged anyway, on the host (docs/alarms.md)"),
    "flex": ("every step with `--backend flex`", "numbers that the kernel has anyway, one for each row"),
    "QK-Clip": ("`optim.qk_clip`", "all attention logits of every step; under flex what the kernel has anyway"),
    "forward": ("`monitor.every_n_steps`", "the forward of a probe, which all of its statistics share"),
    "norms": ("with each probe", "a pass over each activation of that forward; no matrix product"),
    "attention": (
        "with each probe",
        "all visible logits, once for everything said of them; passes over T × T numbers",
    ),
    "growth": ("with each probe", "second moments of queries and keys"),
    "output": ("with each probe", "a pass over the output logits; no matrix product"),
    "weights": (
        "with each probe",
        "a pass over embedding, head and gains; no matrix product; with σReparam also singular values",
    ),
    "heads": ("`monitor.heads`", "attention once more, a head at a time"),
    "precision": ("`monitor.precision`", "one more forward of the probe, in the run's precision"),
    "parameters": (
        "`monitor.parameters`",
        "a copy of all parameters in a step that is probed; no matrix product",
    ),
    "agreement": (
        "`monitor.gradient_agreement`",
        "forward and backward passes of the whole micro-batch, by half and modality",
    ),
    "budget": (
        "`monitor.budget_every_n_steps`",
        "in every step of a window, a backward pass more for each modality",
    ),
    "counted": ("with each probe", "nothing"),
}

_QK_CLIP = "QK-Clip holds it at 100 (Kimi K2, arXiv 2507.20534 [S])"
_LOGIT_RANGE = (
    f"about 10 in calm small runs, where stalled ones passed 100 (CPU logs of a public course [V]); {_QK_CLIP}; the"
    " loss worsens from about 1e3, and all runs above 1e4 diverged (Wortsman et al. 2023, arXiv 2309.14322, Fig. 10"
    " and 9 [V])"
)
_TWICE = "below twice that of a run that converges by step 1,000 (Rybakov et al. 2024, arXiv 2410.16682, Table 1 [S])"
_OUTPUT_DRIFT = (
    "near 0 under z-loss; without weight decay the output logits drift to very negative values, late"
    " (Wortsman et al. 2023, arXiv 2309.14322, Fig. 3 and 4 [V])"
)
_ENTROPY = f"{UNKNOWN}; at most the log of the visible keys"

# fmt: off
_GROUPS: dict[str, tuple[Statistic, ...]] = {
    "Every step": (
        Statistic(("loss",), "what is minimised, z-loss and weights included, over the step's targets", "nats",
            NOBODY,
            "no step 0.1 above the median of 201 (arXiv 2608.30320 [S])", "a spike, or learning that has stopped",
            "step"),
        Statistic(("loss/TARGET",), "mean cross-entropy", "nats", TARGET,
            "within 0.5 nat of its own best 50-step median after warm-up [I]",
            "that modality diverges or was never learnt", "step"),
        Statistic(("log_z/TARGET",), "mean log Z, Z = Σ exp(logit) over the vocabulary", "nats", TARGET,
            _OUTPUT_DRIFT,
            "the output softmax drifts; read out_logit_mean and out_logit_spread", "step"),
        Statistic(("excess/TARGET",),
            "loss − entropy of the source on the same tokens; only of sources that know it", "nats",
            TARGET, "within 0.1 nat of the best arm on the same data [I]",
            "stalled; at its first value, never learnt", "step"),
        Statistic(("grad_norm",), "‖g‖ of all parameters before clipping", "–", NOBODY,
            "no step 7 standard deviations from the mean of the last 1,000 (OLMo 2, arXiv 2501.00656 [S])",
            "a spike; above the clipping norm all the time, the learning rate is what clipping makes of it",
            "step"),
        Statistic(("lr",), "learning rate of the update", "–", NOBODY, UNKNOWN, "not the schedule that was meant",
            "step"),
        Statistic(("tokens_per_s",), "tokens since the last flush over its seconds", "1/s", NOBODY, UNKNOWN,
            "something else uses the machine", "step"),
        Statistic(("alarm/KIND",), "on how many series an alarm of this kind begins at this step", "series", NOBODY,
            "absent [I]", "docs/alarms.md; alarms.jsonl has the series and the sentence", "alarms"),
        Statistic(("attn_row_max/QUERY/layerNN",),
            "largest z (as attn_logit_max) of the step's queries, exact; from 8 caps on a lower bound", "–", QUERY,
            _LOGIT_RANGE,
            "attention goes one-hot; attn_logit_max says to whose keys", "flex"),
        Statistic(("attn_row_lse/QUERY/layerNN",),
            "mean over the step's queries and heads of log Σ exp z, z after the cap", "nats", QUERY, UNKNOWN,
            "softmax cannot see it, but kernels can: cuDNN's backward pass has given NaN below -88.7 (PyTorch issue"
            " 196678)", "flex"),
        Statistic(("qk_clip_logit/layerNN",),
            "largest signed attention logit of the step's tokens, before clipping", "–",
            NOBODY, _QK_CLIP, "far above tau: one step moves the logits more than clipping expects", "QK-Clip"),
        Statistic(("qk_clip_gamma/layerNN",), "smallest factor on a head's logits, min(1, tau / logit)", "–",
            NOBODY,
            "1 for most heads; 12.7 % of them were clipped in the first 70,000 steps of Kimi K2 (arXiv"
            " 2507.20534 [S])",
            "below 1 for good: the update works against the clip", "QK-Clip"),
    ),
    "Held-out data": (
        Statistic(("val_loss/TARGET",), "mean cross-entropy", "nats", TARGET, UNKNOWN,
            "above loss: learnt by heart", "validation"),
        Statistic(("val_log_z/TARGET",), "mean log Z", "nats", TARGET, _OUTPUT_DRIFT, "as log_z", "validation"),
        Statistic(("val_excess/TARGET",), "val_loss − entropy of the source", "nats", TARGET,
            "within 0.1 nat of the best arm on the same data [I]", "stalled", "validation"),
        Statistic(("val_unigram/TARGET",), "cross-entropy of token frequencies alone, on the same targets", "nats",
            TARGET,
            UNKNOWN, "val_loss near it: no context is used", "start"),
        Statistic(("captions_cut",), "share of captions longer than their room", "–", NOBODY, "0 [I]",
            "raise data.seq_len", "start"),
    ),
    "Lengths of activations": (
        Statistic(("attn_in_norm/MODALITY/layerNN", "attn_in_norm_max/MODALITY/layerNN"),
            "‖x‖ of what W_q, W_k and W_v read; mean and maximum", "–", INPUT, UNKNOWN,
            "with pre-norm it is its gain; with post-norm alone it is the residual stream", "norms"),
        Statistic(("q_raw_norm/MODALITY/layerNN", "q_raw_norm_max/MODALITY/layerNN"),
            "‖W_q x‖ of a head, before QK-Norm; mean and maximum", "–", INPUT, _TWICE,
            "one modality far above the other: they compete through shared weights", "norms"),
        Statistic(("k_raw_norm/MODALITY/layerNN", "k_raw_norm_max/MODALITY/layerNN"),
            "‖W_k x‖ of a head, before QK-Norm; mean and maximum", "–", INPUT, _TWICE, "as q_raw_norm", "norms"),
        Statistic(("q_norm/MODALITY/layerNN", "q_norm_max/MODALITY/layerNN"),
            "‖q‖ as it enters the dot product, after QK-Norm and RoPE; mean and maximum", "–", INPUT,
            "√head_dim times its gains with RMS QK-Norm [I]; else " + UNKNOWN,
            "growth that does not end: logits grow with its product with k_norm", "norms"),
        Statistic(("k_norm/MODALITY/layerNN", "k_norm_max/MODALITY/layerNN"),
            "‖k‖ likewise; mean and maximum", "–", INPUT, "as q_norm", "as q_norm", "norms"),
        Statistic(("v_norm/MODALITY/layerNN", "v_norm_max/MODALITY/layerNN"),
            "‖v‖ of a head; mean and maximum", "–", INPUT, UNKNOWN,
            "the comparison: outside the logits, so growth of q and k alone is about logits", "norms"),
        Statistic(("attn_out_norm/MODALITY/layerNN", "attn_out_norm_max/MODALITY/layerNN"),
            "‖y‖ of what attention adds to the residual stream; mean and maximum", "–", INPUT, _TWICE,
            "attention drowns what it adds to", "norms"),
        Statistic(("mlp_out_norm/MODALITY/layerNN", "mlp_out_norm_max/MODALITY/layerNN"),
            "‖y‖ of what the MLP adds; mean and maximum", "–", INPUT, _TWICE, "the product in SwiGLU runs away",
            "norms"),
        Statistic(("resid_norm/MODALITY/layerNN", "resid_norm_max/MODALITY/layerNN"),
            "‖x‖ of the residual stream after the layer; mean and maximum", "–", INPUT,
            "variance about linear in depth with norms on both sides, exponential with pre-norm alone (Peri-LN,"
            " arXiv"
            " 2502.02732 [S]); a gap of 1e4 between layers came before a crash (Swin V2, arXiv 2111.09883, Fig."
            " 2 [V])",
            "late layers add to something too large to be moved", "norms"),
        Statistic(("final_norm/MODALITY", "final_rms/MODALITY"),
            "‖x‖ of the last layer's output before the final norm, and the same over √d_model", "–", INPUT,
            "no growth without end: it came before divergence (Chameleon, arXiv 2405.09818, Fig. 5a [V]); its"
            " size is not known",
            "the run is likely to diverge; which modality leads says more than the size", "norms"),
    ),
    "Attention logits": (
        Statistic(("attn_logit_max/QUERY-KEY/layerNN[/headNN]",),
            "max z, z = scale · q·k, after QK-Norm, before cap and mask; exact over all visible pairs", "–", PAIR,
            _LOGIT_RANGE,
            "attention goes one-hot", "attention"),
        Statistic(("attn_logit_absmax/QUERY-KEY/layerNN[/headNN]",), "max |z|", "–", PAIR, _LOGIT_RANGE,
            "as attn_logit_max; far above it, some keys are shut out", "attention"),
        Statistic(("attn_logit_p999/QUERY-KEY/layerNN[/headNN]",), "the |z| that one pair in a thousand exceeds",
            "–", PAIR,
            UNKNOWN, "near the maximum: not a single outlier", "attention"),
        Statistic(("attn_logit_mean/QUERY/layerNN[/headNN]",), "drift: mean of z over a row's visible keys", "–",
            QUERY, UNKNOWN,
            "far from 0 costs precision in bf16; softmax cannot see it", "attention"),
        Statistic(("attn_logit_var/QUERY/layerNN[/headNN]",),
            "variance of z over a row's visible keys = attn_logit_offset_var + attn_logit_spread_var", "–", QUERY,
            UNKNOWN,
            "the row sharpens; its two parts say how", "attention"),
        Statistic(("attn_logit_offset/QUERY-KEY/layerNN[/headNN]",),
            "competition: mean of z over the row's keys of one modality − attn_logit_mean", "–", PAIR, UNKNOWN,
            "one modality's keys draw attention as a block", "attention"),
        Statistic(("attn_logit_offset_var/QUERY/layerNN[/headNN]",),
            "variance of a row's offsets, weighted by keys", "–", QUERY, UNKNOWN, "competition outgrows the rest",
            "attention"),
        Statistic(("attn_logit_spread_var/QUERY/layerNN[/headNN]",),
            "sharpening: variance of z about the mean of its own block", "–", QUERY, UNKNOWN,
            "attention sharpens within a modality", "attention"),
        Statistic(("attn_logit_bound/layerNN",),
            "under QK-Norm, what no |z| can exceed: scale · longest q · longest k", "–", NOBODY,
            "8 at head_dim 64 and gains 1 [S]", "the gains undo what the norm bounds", "weights"),
    ),
    "Attention weights": (
        Statistic(("attn_entropy/QUERY/layerNN[/headNN]",),
            "−Σ p log p over a row = attn_entropy_block + attn_entropy_within",
            "nats", QUERY, _ENTROPY,
            "near 0 with a falling attn_rank: collapse; with a high rank it can be benign (Qi et al. 2025,"
            " arXiv 2505.21910 [S])",
            "attention"),
        Statistic(("attn_entropy_block/QUERY/layerNN[/headNN]",), "entropy of a row's masses on the modalities",
            "nats", QUERY,
            f"{UNKNOWN}; at most the log of the modalities", "near 0: queries look at one modality alone",
            "attention"),
        Statistic(("attn_entropy_within/QUERY/layerNN[/headNN]",), "Σ mass · entropy within the modality", "nats",
            QUERY, _ENTROPY,
            "near 0: one key in each modality", "attention"),
        Statistic(("attn_mass/QUERY-KEY/layerNN[/headNN]",), "sum of p over a row's keys of one modality", "–",
            PAIR,
            f"{UNKNOWN}; compare with the share of the visible keys",
            "0 or 1: the modalities do not mix, or one is drowned", "attention"),
        Statistic(("attn_rank/layerNN",),
            "(Σ s²)² / Σ s⁴, s the singular values of an attention matrix; mean over heads", "–",
            NOBODY, f"{UNKNOWN}; between 1 and T", "near 1: all queries attend alike", "attention"),
    ),
    "What grew in the logits": (
        Statistic(("logit_q_power/QUERY-KEY/layerNN",), "log mean ‖q‖², over all pairs of a sequence", "log", PAIR,
            UNKNOWN,
            "the queries grew", "growth"),
        Statistic(("logit_k_power/QUERY-KEY/layerNN",), "log mean ‖k‖², over the same", "log", PAIR, UNKNOWN,
            "the keys grew", "growth"),
        Statistic(("logit_alignment/QUERY-KEY/layerNN",),
            "log tr(C_q C_k) / (tr C_q · tr C_k), C the uncentred second moments",
            "log", PAIR,
            "−log head_dim for directions at random [I]; growth is of norms, not of this (Wortsman et al. 2023,"
            " arXiv 2309.14322, E.1 [V])", "queries and keys turn to one line", "growth"),
        Statistic(("logit_masked/QUERY-KEY/layerNN",), "log mean (q·k)² over visible pairs − over all pairs", "log",
            PAIR,
            "near 0 [I]", "what is visible is unlike the rest, so the three parts above say less", "growth"),
        Statistic(("k_common/MODALITY/layerNN",), "‖mean k‖² / mean ‖k‖² over a sequence's keys of one modality",
            "–", KEY,
            "1 / keys for directions at random [I]", "near 1: keys are alike, and their logits shift as a block",
            "growth"),
        Statistic(("q_weight_gain/MODALITY/layerNN", "k_weight_gain/MODALITY/layerNN"),
            "‖W_q x‖ / ‖x‖ over all heads together; W_k likewise", "–", INPUT, UNKNOWN,
            "the matrix grew along this modality's inputs", "norms"),
        Statistic(("q_gain_mean/layerNN", "q_gain_max/layerNN", "k_gain_mean/layerNN", "k_gain_max/layerNN"),
            "mean and maximum of |gain| of QK-Norm", "–", NOBODY,
            "about 1; abnormal growth is why Qwen3-Next decays them [S]", "the bound on the logits grows",
            "weights"),
        Statistic(("sigma_ratio/layerNN",),
            "uᵀWv / σ(W) of σReparam, σ(W) the largest singular value: the smallest over the layer's matrices", "–",
            NOBODY, "1 [I]; above 0.94 at a learning rate of 0.03",
            "sigma is too small, so the weights in use are too large", "weights"),
    ),
    "Output": (
        Statistic(("out_log_z/TARGET",),
            "log Z = out_logit_mean + log V + out_logit_spread, after the final softcap", "nats", TARGET,
            _OUTPUT_DRIFT, "drift or sharpening of the output softmax; its parts tell", "output"),
        Statistic(("out_logit_mean/TARGET",), "drift: mean logit over the vocabulary", "–", TARGET,
            "does not go very negative (Wortsman et al. 2023, arXiv 2309.14322, Fig. 3 and 4 [V])",
            "the logits drift together, which the softmax cannot see", "output"),
        Statistic(("out_logit_spread/TARGET",), "sharpening: log Z − log V − mean logit", "nats", TARGET, UNKNOWN,
            "0: nothing is told apart", "output"),
        Statistic(("out_block_log_z/TARGET-BLOCK",), "log Σ exp(logit) over the ids of one modality", "nats",
            TARGET_BLOCK, UNKNOWN,
            "competition: the block of another modality comes near the target's own", "output"),
        Statistic(("out_wrong_mass/TARGET",), "probability of ids of other modalities than the target's", "–",
            TARGET,
            "near 0 inside a span of one modality [I]", "the modality of the next token is not known", "output"),
        Statistic(("embed_row_norm/MODALITY", "head_row_norm/MODALITY"),
            "mean length of the rows of embedding and head", "–", VOCABULARY, "equal at the start [I]",
            "one modality's rows were moved or decayed more", "weights"),
    ),
    "Radial budget": (
        Statistic(("w_q_growth/TARGET/layerNN", "w_k_growth/TARGET/layerNN"),
            "Σ 2⟨W, U_a⟩ over a window, U_a the part of AdamW's updates that comes from modality a's losses", "–",
            TARGET, UNKNOWN,
            "that modality makes the matrix longer", "budget"),
        Statistic(("w_q_growth_decay/layerNN", "w_k_growth_decay/layerNN"), "Σ 2⟨W, U_decay⟩ over the window", "–",
            NOBODY, UNKNOWN,
            "0: nothing draws the length back", "budget"),
        Statistic(("w_q_growth_step/layerNN", "w_k_growth_step/layerNN"), "Σ ‖ΔW‖² over the window", "–", NOBODY,
            UNKNOWN,
            "most of the growth: noise makes the matrix longer, not the loss", "budget"),
        Statistic(("w_q_growth_unattributed/layerNN", "w_k_growth_unattributed/layerNN"),
            "Σ 2⟨W, U⟩ of the first moment from before the window; fades with β1^steps", "–", NOBODY, "near 0 [I]",
            "the window is too short", "budget"),
        Statistic(("w_q_growth_rest/layerNN", "w_k_growth_rest/layerNN"),
            "what AdamW did not do: rounding, QK-Clip", "–", NOBODY,
            "near 0 without QK-Clip [I]", "something else writes to the weights", "budget"),
        Statistic(("w_q_growth_total/layerNN", "w_k_growth_total/layerNN"),
            "Δ‖W‖² over the window, measured: the sum of all parts", "–", NOBODY, UNKNOWN,
            "growth that does not end", "budget"),
        Statistic(("w_q_sq/layerNN", "w_k_sq/layerNN"), "‖W‖² at the window's end", "–", NOBODY, UNKNOWN,
            "as its growth", "budget"),
        Statistic(("budget_window",), "steps of the window", "steps", NOBODY, "about 50 [I]",
            "too short: unattributed is large", "budget"),
        Statistic(("budget_clip_factor",), "mean factor that clipping put on the gradients of the window", "–",
            NOBODY, UNKNOWN,
            "far below 1: clipping sets the size of the updates", "budget"),
    ),
    "Gradients": (
        Statistic(("grad_agreement/TARGET-OTHER[/layerNN]",),
            "½ (⟨g_a^A, g_b^B⟩ + ⟨g_b^A, g_a^B⟩) / √(⟨g_a^A, g_a^B⟩ ⟨g_b^A, g_b^B⟩), A and B disjoint halves; an"
            " estimate that noise does not shrink and that can leave [−1, 1]", "–", TARGET,
            f"{UNKNOWN}; unlike gradients of modalities trouble AdamW (arXiv 2605.16165 [A])",
            "below 0: what helps one modality hurts the other", "agreement"),
        Statistic(("grad_signal/TARGET[/layerNN]",),
            "⟨g^A, g^B⟩, an unbiased estimate of the true gradient's squared length", "–",
            TARGET, UNKNOWN, "not above 0: the batch is too small to tell", "agreement"),
        Statistic(("grad_noise/TARGET[/layerNN]",), "½ ‖g^A − g^B‖²", "–", TARGET, UNKNOWN,
            "far above grad_signal: steps are mostly noise", "agreement"),
        Statistic(("grad_norm/PARAMETER",), "‖g‖ of one parameter before clipping", "–", NOBODY, UNKNOWN,
            "which parameter a spike begins in", "parameters"),
        Statistic(("update_rms/PARAMETER",), "RMS of the update over the learning rate", "–", NOBODY,
            "1 for a pure sign step of Adam [I]", "far above 1: v lags behind the gradient", "parameters"),
        Statistic(("update_ratio/PARAMETER",), "RMS of the update over that of the parameter; absent if that is 0",
            "–", NOBODY, UNKNOWN,
            "the parameter is rewritten within few steps, or does not move", "parameters"),
        Statistic(("adam_below_eps/PARAMETER",), "share of elements with √v̂ below Adam's epsilon", "–", NOBODY,
            "0; gradients fall towards an epsilon of 1e-8 with size and learning rate (Wortsman et al. 2023, arXiv"
            " 2309.14322, Fig. 11 to 13 [V])", "epsilon sets the size of their steps", "parameters"),
    ),
    "Precision": (
        Statistic(("absorb_error/MODALITY/layerNN", "absorb_error_if_bf16/MODALITY/layerNN"),
            "‖e‖ / ‖y‖, e = bf16(x + y) − x − y, at the additions to the residual stream x; _if_bf16: what a"
            " bf16 stream would lose",
            "–", INPUT, "far below 1 [I]", "near 1: the addition is noise", "precision"),
        Statistic(("absorb_bias/MODALITY/layerNN", "absorb_bias_if_bf16/MODALITY/layerNN"),
            "−⟨e, y⟩ / ‖y‖²", "–", INPUT, "near 0 [I]", "above 0: what is added is lost along itself", "precision"),
        Statistic(("absorbed/MODALITY/layerNN", "absorbed_if_bf16/MODALITY/layerNN"),
            "share of y's energy in channels that the addition leaves as they were", "–", INPUT, "near 0 [I]",
            "the layer does not reach the stream", "precision"),
    ),
    "Of a probe itself": (
        Statistic(("probe_sequences",), "sequences looked at, over all ranks", "sequences", NOBODY, UNKNOWN,
            "fewer than another run's: maxima cannot be compared", "counted"),
        Statistic(("attn_layers_seen",), "layers of a watched model whose attention was seen", "–", NOBODY,
            "all of the model's [I]", "maxima are not the model's", "counted"),
        Statistic(("attn_layers_hidden",),
            "layers of it that are known to be there and whose attention was not seen", "–", NOBODY, "0 [I]",
            "as attn_layers_seen", "counted"),
    ),
}
# fmt: on
STATISTICS = tuple(Statistic(**{**vars(s), "group": group}) for group, rows in _GROUPS.items() for s in rows)


def statistic_of(tag: str) -> Statistic | None:
    """The row that a tag belongs to."""
    return next((s for s in STATISTICS if s.matches(tag)), None)

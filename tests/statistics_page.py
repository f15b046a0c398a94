"""Write docs/statistics.md from `tests.statistics_table` and from measured probes and steps.

``python -m tests.statistics_page`` writes the page; a test checks that the committed page is up to date.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils.flop_counter import FlopCounterMode

from mmqk.data.batch import TokenBatch
from mmqk.monitors import probe
from mmqk.monitors.formulas.attention import attention_statistics
from mmqk.monitors.formulas.growth import common_mode, logit_growth
from mmqk.monitors.formulas.pairs import FEWEST_KEYS, Pairs, visible_pairs
from mmqk.monitors.own.callback import residual_absorption
from mmqk.monitors.own.halves import gradient_agreement
from mmqk.monitors.own.window import BudgetWindow
from mmqk.remedies import MARKS
from mmqk.training.module import TrainingModule
from tests.one_step import build, token_batch
from tests.remedies_page import REFERENCE, SEQUENCES, TOKENS, measure, row
from tests.statistics_table import COSTS, STATISTICS

PAGE = Path(__file__).parents[1] / "docs/statistics.md"
PROBED = 4  # sequences, the default of monitor.probe_sequences
ALL_MARKS = {**MARKS, "I": "our inference or arithmetic"}
COLUMNS = ("tag", "formula", "unit", "modality", "healthy", "a bad value means", "cost")


# Cost ----------------------------------------------------------------------------------------------------


def flops(work: Callable[[], object]) -> int:
    """Return the number of operations of the matrix products in `work`."""
    counter = FlopCounterMode(display=False)
    with counter:
        work()
    return counter.get_total_flops()


def batch_of(sequences: int) -> TokenBatch:
    """Return a batch of random ids at the size of configs/demo.yaml."""
    ids_BT = torch.randint(
        REFERENCE.vocab_size, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(0)
    )
    return token_batch(ids_BT, REFERENCE.vocab_sizes).first(sequences)


def module_of() -> TrainingModule:
    """Return the control at the size of configs/demo.yaml, with the part of a Trainer that the monitors use."""
    module = build({}, REFERENCE)
    precision = SimpleNamespace(train_step_context=contextlib.nullcontext)
    module.trainer.precision_plugin = precision  # type: ignore[misc, assignment]
    return module


def parts() -> dict[str, int]:
    """Return the operations of each part of `COSTS` that multiplies matrices, for one probe or for one step of a
    budget window."""
    module, few, whole = module_of(), batch_of(PROBED), batch_of(SEQUENCES)
    model, c = module.model, REFERENCE
    sites: dict[tuple[str, int], torch.Tensor] = {}
    with torch.no_grad():
        forward = flops(
            lambda: model(few.ids_BT, sink=lambda site, layer, x: sites.__setitem__((site, layer), x))
        )
        pairs = Pairs(few.modality_BT, visible_pairs(few.valid_BT), len(c.modalities), c.n_heads)
        token_MBT = pairs.token_MBT & few.valid_BT
        q, k = sites["q", 0], sites["k", 0]
        seen = attention_statistics(q, k, model.attn_scale_value, pairs)
        attention = flops(lambda: attention_statistics(q, k, model.attn_scale_value, pairs))
        growth = flops(lambda: (logit_growth(q, k, token_MBT, pairs, seen.square), common_mode(k, token_MBT)))
    usual = flops(lambda: probe(model, few))
    window = BudgetWindow(model, [0, 1])
    losses_M = module.modality_loss_parts(whole)
    return {
        "forward": forward,
        "attention": c.n_layers * attention,
        "growth": c.n_layers * growth,
        "heads": flops(lambda: probe(model, few, heads=True)) - usual,
        "matrices": flops(lambda: probe(model, few, matrices=True)) - usual,
        "precision": flops(lambda: residual_absorption(model, few)),
        "agreement": flops(lambda: gradient_agreement(model, whole, module.modality_loss_parts)),
        "budget": flops(lambda: window.add_gradients(losses_M)),
    }


# The page ------------------------------------------------------------------------------------------------

HEAD = """\
# Statistics

All statistics that mmqk logs. This page is written by `python -m tests.statistics_page` from
`tests.statistics_table` and from measured probes; do not edit it. A test compares it with the log of a run.

## Tags

A tag is `statistic/modality/layerNN/headNN` without the parts that do not apply: `q_norm/text/layer03`,
`attn_logit_max/text-image/layer03` (query text, key image), `final_norm/image`, `grad_norm`,
`grad_norm/embed.weight`. In the tables below, capitals are placeholders and [...] is optional (heads need
`--monitor.heads=true`). If a row has `q_norm` and `q_norm_max`, the first is a mean, the second a maximum. The first
layer is `layer00`. In `metrics.jsonl` each step has one line, and a second line if an alarm is found later for that
step. A modality without tokens has no tag. NaN and infinities are the strings "nan", "inf", "-inf".

**Modality.** The column *modality* states which token's modality is in the tag. *input token*: the token at this
position, for activations. *query*, *query, key*: the tokens of an attention pair, the query first. *target*: the
next token, for losses, the output softmax and gradients. A – means the whole model, layer or parameter.

**Probes.** Statistics of every step cover the tokens of that step. A probe is a separate forward pass in fp32 and
in evaluation mode, over `monitor.probe_sequences` sequences (4) every `monitor.every_n_steps` steps (100). Its
maxima are exact for these sequences only, so compare runs with `--monitor.probe_split=heldout`, which uses the
same sequences in each run. All tokens of a sequence are used. Statistics of attention rows exclude queries that
see fewer than {fewest} keys. Logits are raw: after scale and QK-Norm, before cap and mask. Padding is never counted.
With `attach`, tokens without a modality are not counted, except as keys in attention entropies and `attn_rank`. In
the entropies they are one more modality, so `attn_mass` sums to 1 minus their mass.
If a token has a NaN or an infinity, its statistics are NaN, and so is every mean that includes them. The means of
another modality stay finite unless a query of that modality attends to this token. `grad_agreement`, `grad_signal`
and `grad_noise` are estimates; all other statistics are exact.

## Drift, competition, sharpening

1. An attention logit is `z_ij = drift_i + offset_i,block(j) + rest_ij`, for query i, key j and the modality of j.
2. *Drift* (`attn_logit_mean`) is the mean of the row. The softmax does not depend on it, but it costs precision in
   bf16.
3. *Competition* (`attn_logit_offset`) is the difference between the mean of one modality's keys and the mean of the
   row. It moves attention between modalities (`attn_mass`).
4. *Sharpening* (`attn_logit_spread_var`) is the variance among the keys of one modality. It selects keys within the
   modality.
5. Variances add up, `attn_logit_var = attn_logit_offset_var + attn_logit_spread_var`, and so do entropies,
   `attn_entropy = attn_entropy_block + attn_entropy_within`. Check which part changed before naming a mechanism.
   With `model.attn_sink` the two sums still hold: `attn_entropy` and `attn_entropy_block` then include the sink, as
   one more key and one more block, `attn_mass` sums to 1 − `sink_mass`, and `attn_rank` is that of the keys'
   weights without the sink's column.
6. The mean over the keys of one modality does affect the softmax, because it shifts one block against another.
7. The output softmax has the same three parts: `out_logit_mean` is drift, `out_block_log_z` and `out_wrong_mass` are
   competition, `out_logit_spread` is sharpening.
8. Logit growth splits exactly: `log mean z² = 2 log scale + logit_q_power + logit_k_power + logit_alignment +
   logit_masked`.
9. The growth of W_q and W_k splits too: `w_q_growth` of all modalities, `w_q_growth_decay`, `_step`, `_unattributed`
   and `_rest` sum to `w_q_growth_total`.
10. Norms can grow without harm in the direction that all keys share (`k_common`), and low entropy with a high
    `attn_rank` is benign: no single curve on this page is a diagnosis.

## Healthy ranges

Ranges are those of the named source; the mark shows how the source was read:
{marks}. Ranges from other models, data and
sizes are hints. "{unknown}" means that no source gives a range.

## Cost

The table counts operations of matrix products, for a probe of {probed} sequences and relative to one training
step of `configs/demo.yaml` ({gflops:.2f} GFLOP: {sequences} times {tokens} tokens, forward, backward and update).
Divide a percentage by `monitor.every_n_steps` for the cost per step; that of *budget* is already per step of a
window. Passes over tensors are not included: `python -m benchmarks monitors` measures time.

| part | when | work | of a step's matrix products |
| --- | --- | --- | --: |
{costs}
"""


def render(measured: dict[str, int], step: int) -> str:
    """Return the text of the page."""
    costs = []
    for part, (when, words) in COSTS.items():
        share = f"{100 * measured[part] / step:.1f} %" if part in measured else ""
        costs.append(row((part, when, words, share)))
    lines = [
        HEAD.format(
            fewest=FEWEST_KEYS,
            marks="; ".join(f"[{mark}] {meaning}" for mark, meaning in ALL_MARKS.items()),
            unknown="none known",
            gflops=step / 1e9,
            sequences=SEQUENCES,
            tokens=TOKENS,
            probed=PROBED,
            costs="\n".join(costs),
        )
    ]
    for group in dict.fromkeys(s.group for s in STATISTICS):
        lines += [f"## {group}", "", row(COLUMNS), row(["---"] * len(COLUMNS))]
        for s in (s for s in STATISTICS if s.group == group):
            tags = " ".join(f"`{pattern}`" for pattern in s.patterns)
            lines.append(row((tags, s.formula, s.unit, s.modality, s.healthy, s.bad, s.cost)))
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def page() -> str:
    """Return the page for the current code."""
    return render(parts(), measure({}).flops)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

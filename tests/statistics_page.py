"""docs/statistics.md, written from `mmqk.monitors.statistics` and from probes and steps that are measured.

``python -m tests.statistics_page`` writes it; a test compares what is committed with it.
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
from mmqk.monitors.measures.attention import attention_statistics
from mmqk.monitors.measures.growth import common_mode, logit_growth
from mmqk.monitors.measures.pairs import FEWEST_KEYS, Pairs, visible_pairs
from mmqk.monitors.statistics import COSTS, STATISTICS
from mmqk.monitors.training_run.halves import gradient_agreement
from mmqk.monitors.training_run.residual import residual_absorption
from mmqk.monitors.training_run.window import BudgetWindow
from mmqk.remedies import MARKS
from mmqk.training.step.module import TrainingModule
from tests.one_step import build, token_batch
from tests.remedies_page import REFERENCE, SEQUENCES, TOKENS, measure, row

PAGE = Path(__file__).parents[1] / "docs/statistics.md"
PROBED = 4  # sequences, the default of monitor.sequences
ALL_MARKS = {**MARKS, "I": "our inference or arithmetic"}
COLUMNS = ("tag", "formula", "unit", "modality", "healthy", "a bad value means", "cost")


# What it costs -------------------------------------------------------------------------------------------


def flops(work: Callable[[], object]) -> int:
    """Of the matrix products that `work` does."""
    counter = FlopCounterMode(display=False)
    with counter:
        work()
    return counter.get_total_flops()


def batch_of(sequences: int) -> TokenBatch:
    """Random ids at the size of the demonstration."""
    ids_BT = torch.randint(
        REFERENCE.vocab_size, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(0)
    )
    return token_batch(ids_BT, REFERENCE.blocks).first(sequences)


def module_of() -> TrainingModule:
    """The control at the size of the demonstration, with the little of a Trainer that the monitors ask for."""
    module = build({}, REFERENCE)
    precision = SimpleNamespace(train_step_context=contextlib.nullcontext)
    module.trainer.precision_plugin = precision  # type: ignore[misc, assignment]
    return module


def parts() -> dict[str, int]:
    """Operations of each part of `COSTS` that multiplies matrices: at one probe, or in one step of a window."""
    module, few, whole = module_of(), batch_of(PROBED), batch_of(SEQUENCES)
    model, c = module.model, REFERENCE
    sites: dict[tuple[str, int], torch.Tensor] = {}
    with torch.no_grad():
        forward = flops(
            lambda: model(few.ids_BT, sink=lambda site, layer, x: sites.__setitem__((site, layer), x))
        )
        pairs = Pairs(few.modality_BT, visible_pairs(few.valid_BT), len(c.modalities), c.n_heads)
        of_MBT = pairs.of_MBT & few.valid_BT
        q, k = sites["q", 0], sites["k", 0]
        seen = attention_statistics(q, k, model.attn_scale_value, pairs)
        attention = flops(lambda: attention_statistics(q, k, model.attn_scale_value, pairs))
        growth = flops(lambda: (logit_growth(q, k, of_MBT, pairs, seen.square), common_mode(k, of_MBT)))
    usual = flops(lambda: probe(model, few))
    window = BudgetWindow(model, [0, 1])
    losses_M = module.modality_loss_parts(whole)
    return {
        "forward": forward,
        "attention": c.n_layers * attention,
        "growth": c.n_layers * growth,
        "heads": flops(lambda: probe(model, few, heads=True)) - usual,
        "precision": flops(lambda: residual_absorption(model, few)),
        "agreement": flops(lambda: gradient_agreement(model, whole, module.modality_loss_parts)),
        "budget": flops(lambda: window.add_gradients(losses_M)),
    }


# The page ------------------------------------------------------------------------------------------------

HEAD = """\
# Statistics

Every number that mmqk logs. This page is written by `python -m tests.statistics_page` from
`mmqk.monitors.statistics` and from measured probes; it is not edited. A test compares it with what a run logs.

## Tags

`statistic/modality/layerNN/headNN`, with what does not apply left out: `q_norm/text/layer03`,
`attn_logit_max/text-image/layer03` (query text, key image), `final_norm/image`, `grad_norm`,
`grad_norm/embed.weight`. Below, words in capitals are names, [...] may be missing (heads come with
`--monitor.heads=true`), and a statistic ending in `_max` is the maximum of the one before it. The first layer is
`layer00`. In `metrics.jsonl` a line is a step, and one more where an alarm is found at an earlier one; a modality
that was not there is an absent key, and NaN and infinities are the strings "nan", "inf", "-inf".

**Whose modality.** *input token*: of the token at this position, for activations. *query*, *query, key*: of
attention, the first the one that looks. *target*: of the next token, for losses, the output softmax and
gradients. A number of the column "modality" that is – belongs to the whole model, layer or parameter.

**What is looked at.** Numbers of every step are of the step's own tokens. A probe is a forward of its own, in
fp32 and in evaluation mode, over `monitor.sequences` sequences (4) every `monitor.every_n_steps` steps (100):
its maxima are exact over these sequences and say nothing of others, so compare runs on
`--monitor.batch=heldout`, whose sequences are the same in each. Nothing is sampled within a sequence. What is
said of a row of attention leaves out queries that see fewer than {fewest} keys; what is said of logits is of
raw ones: after scale and QK-Norm, before cap and mask. Padding is never counted. A row that holds a NaN or an
infinity is NaN, and so is the mean that it enters; the other modality's is not, unless its own queries see it.
`grad_agreement`, `grad_signal` and `grad_noise` are estimates, all other numbers exact.

## Drift, competition, sharpening

1. A logit of attention is `z_ij = drift_i + offset_i,block(j) + rest_ij`, for query i, key j and the modality
   of j.
2. *Drift* (`attn_logit_mean`) is the row's mean. Softmax cannot see it: it is a gauge. It costs digits in bf16.
3. *Competition* (`attn_logit_offset`) is how far one modality's keys stand above the row's mean. It moves
   attention from one modality to another (`attn_mass`).
4. *Sharpening* (`attn_logit_spread_var`) is the spread within a modality's keys. It picks keys within it.
5. Variances add up, `attn_logit_var = attn_logit_offset_var + attn_logit_spread_var`, and so do entropies,
   `attn_entropy = attn_entropy_block + attn_entropy_within`: see which part moved before naming a mechanism.
6. The mean over one modality's keys alone is no gauge: softmax sees a shift of one block against another.
7. The output softmax has the same three: `out_logit_mean` drifts, `out_block_log_z` and `out_wrong_mass`
   compete, `out_logit_spread` sharpens.
8. What grew: `log mean z² = 2 log scale + logit_q_power + logit_k_power + logit_alignment + logit_masked`,
   exactly.
9. Why W_q and W_k grew: `w_q_growth` by modality, with decay, step, unattributed and rest, sums to
   `w_q_growth_total`.
10. Norms can grow without harm along what all keys share (`k_common`), and low entropy with a high `attn_rank`
    is benign: no single curve here is a diagnosis.

## Healthy ranges

Where a source gives one, with how far it was read: {marks}. Ranges of other models, data and sizes are hints.
"{unknown}" is meant as it says.

## Cost

Of the matrix products, against those of one training step of `configs/demo.yaml` ({gflops:.2f} GFLOP:
{sequences} times {tokens} tokens, forward, backward and update), for a probe of {probed} sequences; divide by
`monitor.every_n_steps`. Passes over tensors are not in it: `python -m benchmarks monitors` measures time.

| part | when | work | of a step's matrix products |
| --- | --- | --- | --: |
{costs}
"""


def render(measured: dict[str, int], step: int) -> str:
    """The page."""
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
    """The page as the code has it now."""
    return render(parts(), measure({}).flops)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

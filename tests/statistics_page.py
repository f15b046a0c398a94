"""Write docs/statistics.md from `tests.statistics_table` and from measured probes and steps.

``python -m tests.statistics_page`` writes the page; a test checks that the committed page is up to date.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils.flop_counter import FlopCounterMode

from mmqk.data.batch import TokenBatch
from mmqk.monitors import probe
from mmqk.monitors.formulas.attention import attention_statistics, common_mode, logit_growth
from mmqk.monitors.formulas.reduce import FEWEST_KEYS, Pairs, visible_pairs
from mmqk.monitors.own.gradients import BudgetWindow, gradient_agreement
from mmqk.monitors.probe import residual_absorption
from mmqk.remedies import MARKS
from mmqk.training.module import TrainingModule
from tests.one_step import build, token_batch
from tests.remedies_page import REFERENCE, SEQUENCES, TOKENS, measure, row
from tests.statistics_table import COSTS, STATISTICS, UNKNOWN, Statistic

PAGE = Path(__file__).parents[1] / "docs/statistics.md"
PROBED = 4  # sequences, the default of monitor.probe_sequences
ALL_MARKS = {**MARKS, "I": "our inference or arithmetic"}
COLUMNS = ("tag", "what it is", "healthy values; what others mean")


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
            lambda: model(few.ids_BT, observer=lambda site, layer, x: sites.__setitem__((site, layer), x))
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

```
mmqk train demo --monitor.every_n_steps=50 --monitor.heads=true    # logs the statistics of this page, also by head
```

`python -m tests.statistics_page` writes this page from `tests.statistics_table` and from measured probes.

## Tags

A tag is `statistic/modality/layerNN/headNN` without the parts that do not apply: `q_norm/text/layer03`,
`attn_logit_max/text-image/layer03` (query text, key image), `final_norm/image`, `grad_norm/embed.weight`. In the
tables, [...] is optional (heads need `--monitor.heads=true`), and capitals are placeholders:

| placeholder | stands for the modality of |
| --- | --- |
| MODALITY | the token at this position |
| QUERY, KEY | the tokens of an attention pair |
| TARGET, OTHER | the next token: losses, output softmax, gradients |
| BLOCK | the ids of one modality in the vocabulary |

If a row has `q_norm` and `q_norm_max`, the first is a mean, the second a maximum. Means are over tokens (and heads).
The first layer is `layer00`. A modality without tokens has no tag. In `metrics.jsonl` each step has one line, and a
second line if an alarm is found later for that step; NaN and infinities are the strings "nan", "inf", "-inf".

**Probes.** Statistics of every step cover the tokens of that step. A probe is a separate forward pass in fp32 and
evaluation mode, over `monitor.probe_sequences` sequences (4) every `monitor.every_n_steps` steps (100). Its maxima
are exact for these sequences only: compare runs with `--monitor.probe_split=heldout`, which uses the same sequences
in each run. Statistics of attention rows exclude queries that see fewer than {fewest} keys. Logits are raw: after
scale and QK-Norm, before cap and mask. Padding is never counted. With `attach`, tokens without a modality are not
counted, except as keys in `attn_rank` and, as one more modality, in attention entropies; `attn_mass` then sums to 1
minus their mass. If a token has a NaN or an infinity, its statistics are NaN, and so is every mean that includes
them; means of another modality stay finite unless one of its queries attends to this token. `grad_agreement`,
`grad_signal` and `grad_noise` are estimates; all other statistics are exact.

## Drift, competition, sharpening

An attention logit is `z_ij = drift_i + offset_i,block(j) + rest_ij`, for query i, key j and the modality of j.

| part | attention | output softmax | effect |
| --- | --- | --- | --- |
| drift | `attn_logit_mean` | `out_logit_mean` | none on the softmax; costs precision in bf16 |
| competition | `attn_logit_offset` | `out_block_log_z` | moves attention between modalities (`attn_mass`) |
| sharpening | `attn_logit_spread_var` | `out_logit_spread` | selects within a modality |

Check which part changed before naming a mechanism. These sums are exact:

- `attn_logit_var = attn_logit_offset_var + attn_logit_spread_var`
- `attn_entropy = attn_entropy_block + attn_entropy_within`. With `model.attn_sink` the first two include the sink
  as one more key and block, `attn_mass` sums to 1 − `sink_mass`, and `attn_rank` leaves out the sink's column.
- `log mean z² = 2 log scale + logit_q_power + logit_k_power + logit_alignment + logit_masked`
- `w_q_growth_total` = `w_q_growth` of all modalities + `w_q_growth_decay` + `_step` + `_unattributed` + `_rest`

Norms can grow without harm in the direction that all keys share (`k_common`), and low entropy with a high
`attn_rank` is benign: no single curve is a diagnosis.

## Healthy ranges

Ranges from other models, data and sizes are hints. Numbers such as 2309.14322 are arXiv ids. The mark shows how the
source was read: {marks}.

## Cost

Operations of matrix products of a probe of {probed} sequences (of a step of the window for the budget), relative to
one training step of `configs/demo.yaml` ({gflops:.2f} GFLOP: {sequences} times {tokens} tokens). Divide by
`monitor.every_n_steps` for the cost per step. Other statistics need no matrix product. `python -m benchmarks
monitors` measures time.

| when | work | share |
| --- | --- | --: |
{costs}
"""


def measured_when(rows: list[Statistic]) -> str:
    """Return when a section's statistics are measured: the usual case, and the names of the other statistics."""
    when = {s.patterns[0].partition("/")[0].partition("[")[0]: COSTS[s.cost][0] for s in rows}
    usual = Counter(when.values()).most_common(1)[0][0]
    others: dict[str, list[str]] = {}
    for name, case in when.items():
        if case != usual:
            others.setdefault(case, []).append(f"`{name}`")
    return "; ".join([f"Measured {usual}", *(f"{case}: {', '.join(names)}" for case, names in others.items())]) + "."


def render(measured: dict[str, int], step: int) -> str:
    """Return the text of the page."""
    costs = [
        row((when, words, f"{100 * measured[part] / step:.1f} %"))
        for part, (when, words) in COSTS.items()
        if part in measured
    ]
    lines = [
        HEAD.format(
            fewest=FEWEST_KEYS,
            marks="; ".join(f"[{mark}] {meaning}" for mark, meaning in ALL_MARKS.items()),
            gflops=step / 1e9,
            sequences=SEQUENCES,
            tokens=TOKENS,
            probed=PROBED,
            costs="\n".join(costs),
        )
    ]
    for group in dict.fromkeys(s.group for s in STATISTICS):
        rows = [s for s in STATISTICS if s.group == group]
        lines += [f"## {group}", "", measured_when(rows), "", row(COLUMNS), row(["---"] * len(COLUMNS))]
        for s in rows:
            tags = " ".join(f"`{pattern}`" for pattern in s.patterns)
            unit = "" if s.unit == "–" else f" ({s.unit})"
            values = s.bad
            if s.healthy not in (UNKNOWN, s.bad):
                values = f"{s.healthy}; {'' if ': ' in s.bad else 'else '}{s.bad}"
            lines.append(row((tags, s.formula + unit, values)))
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def page() -> str:
    """Return the page for the current code."""
    return render(parts(), measure({}).flops)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

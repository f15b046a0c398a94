"""Write docs/statistics.md from `tests.statistics_table`.

``python -m tests.statistics_page`` writes the page; a test checks that the committed page is up to date.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from mmqk.lab.remedies import MARKS
from mmqk.monitors.formulas.reduce import FEWEST_KEYS
from tests.remedies_page import row
from tests.statistics_table import STATISTICS, UNKNOWN, WHEN, Statistic

PAGE = Path(__file__).parents[1] / "docs/statistics.md"
ALL_MARKS = {**MARKS, "I": "our inference or arithmetic"}
COLUMNS = ("tag", "what it is", "healthy values; what others mean")


# The page ------------------------------------------------------------------------------------------------

HEAD = """\
# Statistics

```
mmqk train demo --monitor.every_n_steps=50 --monitor.heads=true    # logs the statistics of this page, also by head
```

`python -m tests.statistics_page` writes this page from `tests.statistics_table`.

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
"""


def measured_when(rows: list[Statistic]) -> str:
    """Return when a section's statistics are measured: the usual case, and the names of the other statistics."""
    when = {s.patterns[0].partition("/")[0].partition("[")[0]: WHEN[s.when] for s in rows}
    usual = Counter(when.values()).most_common(1)[0][0]
    others: dict[str, list[str]] = {}
    for name, case in when.items():
        if case != usual:
            others.setdefault(case, []).append(f"`{name}`")
    return "; ".join([f"Measured {usual}", *(f"{case}: {', '.join(names)}" for case, names in others.items())]) + "."


def page() -> str:
    """Return the page for the current table."""
    marks = "; ".join(f"[{mark}] {meaning}" for mark, meaning in ALL_MARKS.items())
    lines = [HEAD.format(fewest=FEWEST_KEYS, marks=marks)]
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


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""Write docs/statistics.md from `tests.statistics_table`.

``python -m tests.statistics_page`` writes the page; a test checks that the committed page is up to date.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from mmqk.lab.remedies import MARKS
from mmqk.monitors.formulas.reduce import FEWEST_KEYS
from tests.remedies_page import row
from tests.statistics_table import MATRICES, STATISTICS, UNKNOWN, WHEN, Statistic

PAGE = Path(__file__).parents[1] / "docs/statistics.md"
ALL_MARKS = {**MARKS, "I": "our inference or arithmetic"}
COLUMNS = ("tag", "formula", "healthy; else")


# The page ------------------------------------------------------------------------------------------------

HEAD = """\
# Statistics

```
mmqk train demo --monitor.every_n_steps=50 --monitor.heads=true    # logs the statistics of this page, also by head
```

## Tags

A tag is `statistic/modality/layerNN/headNN` without the parts that do not apply: `q_norm/text/layer03`,
`attn_logit_max/text-image/layer03` (query text, key image), `grad_norm/embed.weight`. The first layer is `layer00`.
In the tables, [...] is optional (`headNN` needs `--monitor.heads=true`), and capitals are placeholders:

| placeholder | stands for |
| --- | --- |
| MODALITY | modality of the token at this position |
| QUERY, KEY | modalities of an attention pair |
| TARGET, OTHER | modality of the next token: losses, output softmax, gradients |
| BLOCK | modality of a range of ids in the vocabulary |
| MATRIX | q, k, v, o, g (output gate), gate, up, down |

`q_norm` is a mean over tokens (and heads), `q_norm_max` the maximum. A modality without tokens has no tag.
`metrics.jsonl` has one line per step, and a second one if an alarm is found later for that step; NaN and infinities
are the strings "nan", "inf", "-inf".

**Probes.** Each probe measures the sections that name no other condition: a forward pass in fp32 and evaluation mode,
over `monitor.probe_sequences` sequences (4) every `monitor.every_n_steps` steps (100). Maxima are exact for these
sequences only: to compare runs, use the same ones with `--monitor.probe_split=heldout`.

**What is counted.** Statistics of attention rows exclude queries that see fewer than {fewest} keys. Logits are raw:
after scale and QK-Norm, before cap and mask. Padding is never counted. With `attach`, tokens without a modality count
only as keys in `attn_rank` and, as one more modality, in attention entropies; `attn_mass` then sums to 1 minus their
mass. If a token has a NaN or an infinity, its statistics and all means that include it are NaN. `grad_agreement`,
`grad_signal` and `grad_noise` are estimates; all other statistics are exact.

## Drift, competition, sharpening

An attention logit is `z_ij = drift_i + offset_i,block(j) + rest_ij`, for query i, key j and the modality of j.

| part | attention | output softmax | effect |
| --- | --- | --- | --- |
| drift | `attn_logit_mean` | `out_logit_mean` | none on the softmax; costs precision in bf16 |
| competition | `attn_logit_offset` | `out_block_log_z` | moves attention between modalities (`attn_mass`) |
| sharpening | `attn_logit_spread_var` | `out_logit_spread` | selects within a modality |

These sums are exact:

- `attn_logit_var = attn_logit_offset_var + attn_logit_spread_var`
- `attn_entropy = attn_entropy_block + attn_entropy_within`. With `model.attn_sink` the first two include the sink
  as one more key and block, `attn_mass` sums to 1 − `sink_mass`, and `attn_rank` leaves out the sink's column.
- `log mean z² = 2 log scale + logit_q_power + logit_k_power + logit_alignment + logit_masked`
- `w_q_growth_total` = `w_q_growth` of all modalities + `w_q_growth_decay` + `_step` + `_unattributed` + `_rest`

No single curve is a diagnosis: norms can grow without harm in the direction that all keys share (`k_common`).

## Healthy ranges

Ranges from other models, data and sizes are hints; after "else" is what other values mean.
Numbers such as 2309.14322 are arXiv ids. Marks, how a source was read: {marks}.
"""


def shown(pattern: str) -> str:
    """Return the pattern with MATRIX in place of the name of a matrix of a block."""
    matrices = "|".join(matrix.partition("_SIZE")[0] for matrix in MATRICES)
    return re.sub(rf"^({matrices})_(?=norm|spectral|stable_rank|grad_over_v)", "w_MATRIX_", pattern)


def measured_when(rows: list[Statistic]) -> str:
    """Return when a section's statistics are measured: the usual case, and the names of the other statistics; nothing
    if every probe measures them."""
    when = {shown(s.patterns[0]).partition("/")[0].partition("[")[0]: WHEN[s.when] for s in rows}
    usual = Counter(when.values()).most_common(1)[0][0]
    others: dict[str, list[str]] = {}
    for name, case in when.items():
        if case != usual:
            others.setdefault(case, []).append(f"`{name}`")
    if usual == WHEN["probe"] and not others:
        return ""
    return "; ".join([f"Measured {usual}", *(f"{case}: {', '.join(names)}" for case, names in others.items())]) + "."


def page() -> str:
    """Return the page for the current table."""
    marks = "; ".join(f"[{mark}] {meaning}" for mark, meaning in ALL_MARKS.items())
    lines = [HEAD.format(fewest=FEWEST_KEYS, marks=marks)]
    for group in dict.fromkeys(s.group for s in STATISTICS):
        rows = [s for s in STATISTICS if s.group == group]
        measured = measured_when(rows)
        lines += [f"## {group}", "", *([measured, ""] if measured else [])]
        lines += [row(COLUMNS), row(["---"] * len(COLUMNS))]
        for s in rows:
            tags = " ".join(f"`{pattern}`" for pattern in dict.fromkeys(map(shown, s.patterns)))
            unit = "" if s.unit == "–" else f" ({s.unit})"
            values = s.bad
            if s.healthy not in (UNKNOWN, s.bad):
                values = f"{s.healthy}; {'' if ': ' in s.bad else 'else '}{s.bad}"
            lines.append(row((tags, s.formula + unit, values)))
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

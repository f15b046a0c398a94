"""Recompute the verdicts of a norm_competition grid from its runs, without mmqk, by the rules in docs/.

The rules are in docs/metrics.md and docs/evidence.md.

    python norm_competition_check.py RUNS_OR_ZIP GRID.yaml [--compare verdicts.json]
    python norm_competition_check.py RUNS_OR_ZIP GRID.yaml --ratios TREATMENT:CONTROL ...

The second form prints, instead of verdicts, the ratio of two arms for each metric of `REDUCED`, by modality, with
Welch's 95 % interval and the p-value for equal means, and the growth of W_q and W_k in both arms by each loss.

The script leaves out claims with `test: count` and five parts of a verdict: the rule of divergence (it reads the
recorded alarms), the check `declared`, the QK-Norm bound, the search for lost alarms, and the false discovery rate of
exploratory claims (it uses their 95 % interval instead).
"""

import argparse
import io
import json
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import yaml
from scipy import stats

NOT_ABOVE, NOT_BELOW = {"none", "below"}, {"none", "above"}
# Metric: its statistic, and how the values of layers and modalities become one number at each probe.
REDUCED = {
    "largest_attention_logit": ("attn_logit_absmax", np.max),
    "q_norm": ("q_norm", np.mean),
    "k_norm": ("k_norm", np.mean),
    "logit_mean": ("attn_logit_mean", lambda values: np.sqrt(np.mean(np.square(values)))),
    "logit_offset": ("attn_logit_offset_var", lambda values: np.sqrt(np.mean(values))),
    "logit_spread": ("attn_logit_spread_var", lambda values: np.sqrt(np.mean(values))),
    "attention_mass_other": ("attn_mass", np.mean),
    "resid_norm": ("resid_norm", np.mean),
    "final_norm": ("final_norm", np.mean),
}


def reader(source):
    if source.suffix != ".zip":
        return lambda name: (source / name).read_text() if (source / name).exists() else ""
    with tarfile.open(fileobj=io.BytesIO(zipfile.ZipFile(source).read("runs.tar"))) as pack:
        texts = {member.name: pack.extractfile(member).read().decode() for member in pack}
    return lambda name: texts.get(name, "")


def metrics_of(read, folder):
    """Return the records of a run's metrics. A pack may store columns: the shape of each line, that is its keys, and
    the values of each key."""
    if columns := json.loads(read(folder + "/metrics.columns.json") or "{}"):
        values = {key: iter(column) for key, column in columns["values"].items()}
        return [{key: next(values[key]) for key in columns["shapes"][shape]} for shape in columns["lines"]]
    return [json.loads(line) for line in read(folder + "/metrics.jsonl").splitlines()]


def chosen(record, statistic, modality):
    """Return (key, value) of a statistic in all layers, of one modality or of all. A statistic of a pair of
    modalities belongs to that of its queries."""
    for key, number in record.items():
        first, _, rest = key.partition("/")
        query, _, of_key = rest.partition("/")[0].partition("-")
        if first == statistic and modality in ("", query) and (statistic != "attn_mass" or query != of_key):
            yield key, float(number)


def value(metric, rows, completed):
    """Return the metric of one run, on its scale (linear for losses and slopes, log for all others)."""
    name, _, modality = metric.partition("/")
    if name == "final_loss":
        key = ("val_loss/" if completed else "loss/") + modality
        losses = [r[key] for r in rows if key in r and r["step"] > rows[-1]["step"] - (1 if completed else 50)]
        return float(np.mean(losses)) if losses else np.nan
    probes, probed = [], [r for r in rows if any(k.startswith("q_norm/") for k in r)]
    if name == "final_norm_slope":  # of the logarithm, per 1,000 steps, over the last four fifths of a completed run
        last = [r for r in probed if r["step"] >= 0.2 * rows[-1]["step"]]
        norms = [np.log(np.mean([v for _, v in chosen(r, "final_norm", modality)])) for r in last]
        return float(np.polyfit([r["step"] / 1000 for r in last], norms, 1)[0])
    for r in ([r for r in probed if r["step"]] or probed)[-3:]:
        if name in REDUCED:
            statistic, reduce = REDUCED[name]
            values = [v for _, v in chosen(r, statistic, modality)]
            probes.append(reduce(values) if values else np.nan)
        else:  # qk_norm_product: geometric mean over layers and modalities
            logs = [np.log(v * float(r["k" + k[1:]])) for k, v in chosen(r, "q_norm", modality)]
            probes.append(np.exp(np.mean(logs)) if logs else np.nan)
    return float(np.log(np.median(probes)))


def weight_growth(rows):
    """Return (step, growth by the text loss, by the image loss, in total, ‖W_q‖² + ‖W_k‖²) for each window of the
    radial budget. Growth is per 1,000 steps (docs/metrics.md, `weight_growth`)."""
    windows = []
    for r in (r for r in rows if "budget_window" in r):
        *grown, square = (
            sum(v for matrix in "qk" for _, v in chosen(r, f"w_{matrix}_{part}", modality))
            for part, modality in (("growth", "text"), ("growth", "image"), ("growth_total", ""), ("sq", ""))
        )
        windows.append((r["step"], *(1000 * part / square / r["budget_window"] for part in grown), square))
    return windows


def load(read, metrics, blocks):
    """Return the finished runs as {arm: {seed: run}}, and the number of planned runs of each arm."""
    arms, planned = {}, {}
    for plan in json.loads(read("ablation.json"))["runs"]:
        arm, folder = plan["arm"], plan["folder"]
        status = json.loads(read(folder + "/status.json") or "{}")
        planned[arm] = planned.get(arm, 0) + (plan["role"] == "verdict")
        if plan["role"] != "verdict" or status.get("status") not in ("completed", "diverged"):
            continue
        config = yaml.load(read(folder + "/config.yaml"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        lines = metrics_of(read, folder)
        # A resume repeats steps: use the last row of each step.
        rows = [row for _, row in sorted({row["step"]: row for row in lines}.items())]
        weights, done = config["loss"]["weights"], status["status"] == "completed"
        trained = [k[5:] for k in rows[1] if k.startswith("loss/") and weights.get(k[5:], 1)]
        run = {m: value(m, rows, done) for m in metrics} | {"folder": folder, "weights": weight_growth(rows)}
        unigram = {m: rows[0][f"val_unigram/{m}"] for m in trained}
        run["trained"] = trained
        run["learned"] = all(rows[-1].get(f"val_loss/{m}", np.inf) < u - 0.1 for m, u in unigram.items())
        alarms = [json.loads(line)["name"] for line in read(folder + "/alarms.jsonl").splitlines()]
        run["failed"] = not done or "divergence" in alarms
        run["lost"] = bool(status.get("lost")) or rows[-1]["step"] != status["step"]
        run["block"] = blocks[plan["family"]] + str(plan["point"])  # the block and the point of the axes
        arms.setdefault(arm, {})[plan["seed"]] = run
    return arms, planned


def judge(claim, arms, planned):
    """Return the effect, interval, p-value and failed checks of a claim; None if the arms share no seed."""
    names, metric = [claim["treatment"], claim["control"]], claim["metric"]
    pair = [arms.get(name, {}) for name in names]
    n = len(seeds := sorted(set(pair[0]) & set(pair[1])))
    if not n:
        return None

    def finite(runs):
        return [r[metric] for r in runs if not r["failed"] and np.isfinite(r[metric])]

    runs, block = [p[s] for p in pair for s in seeds], pair[0][seeds[0]]["block"]
    worst = max(finite(runs), default=np.nan)
    x = [np.mean([(finite([p[s]]) or [worst])[0] for s in seeds]) for p in pair]
    # The seed spread uses the runs of the treatment's block and of the control. For a metric of one modality, it uses
    # only arms that train this modality.
    values = {}
    modality = metric.partition("/")[2]
    for arm, of in arms.items():
        beside = [r for r in of.values() if r["block"] == block and modality in ["", *r["trained"]]]
        found = finite([r for r in (of.values() if arm in names else beside) if not r["lost"]])
        values |= {arm: found} if len(found) > 1 else {}
    df, two = sum(len(v) - 1 for v in values.values()), [finite([p[s] for s in seeds]) for p in pair]
    out = {
        "n": n,
        "means": x,
        "effect": x[0] - x[1],
        "ends": None,
        "how": "none",
        "p": 1.0,
        "sd": np.nan,
        "own": (np.nan, 1.0, 0.0),
    }
    if df:
        out["sd"] = np.sqrt(sum(np.var(v, ddof=1) * (len(v) - 1) for v in values.values()) / df)
        se, out["how"] = out["sd"] * np.sqrt(2 / n), "pooled"
        parts = [np.var(v, ddof=1) / n for v in two] if min(map(len, two)) > 1 else [0]
        if sum(parts):  # the second interval: error, degrees of freedom and skewness of the two arms alone
            welch = sum(parts) ** 2 / sum(q**2 / (len(v) - 1) for q, v in zip(parts, two, strict=True))
            thirds = [stats.skew(v, bias=False) * np.std(v, ddof=1) ** 3 / len(v) ** 2 for v in two]
            out["own"] = np.sqrt(sum(parts)), welch, (thirds[0] - thirds[1]) / sum(parts) ** 1.5
        if sum(parts) > se**2 * (1 + 1e-9):
            se, df, out["how"] = *out["own"][:2], "Welch"
        out |= {"se": se, "df": df, "p": 2 * stats.t.sf(abs(out["effect"] - claim["min_effect"]) / se, df)}
        out["ends"] = out["effect"] + se * stats.t.ppf([0.025, 0.975], df)
    checks = {
        "a bound": len(finite(runs)) < len(runs),
        "lost": any(r["lost"] for r in runs),
        "learned": "learned" not in claim.get("unchecked", {})
        and not all(r["learned"] for p in pair for r in p.values()),
        "seeds": n < 3 or claim.get("seeds", n) != n,
        "unfinished": any(len(arms[a]) < planned[a] for a in names),
    }
    every = {r["folder"] for p in pair for r in p.values()}
    return out | {"runs": every, "failed": [k for k, v in checks.items() if v]}


def decide(claim, r, level=0.95):
    if r["failed"] or r["ends"] is None:
        return "inconclusive"
    t, (own, df, skewness) = stats.t.ppf([(1 - level) / 2, (1 + level) / 2], r["df"]), r["own"]
    q = stats.t.ppf((1 + level) / 2, df)
    shifted = r["effect"] + own * (skewness * (2 * q * q + 1) / 6 + np.array([-q, q]))
    least, found = claim["min_effect"], set()
    for low, high in (r["effect"] + r["se"] * t, shifted):
        yes, no = low > least, high < least
        if claim.get("test") == "equivalence":
            yes, no = -least < low and high < least, low > least or high < -least
        found.add("reproduced" if yes else "contradicted" if no else "inconclusive")
    return found.pop() if len(found) == 1 else "inconclusive"


def compare(page, results, verdicts):
    """Print the largest differences from the verdicts of the page; exit with 1 if one exceeds 1e-3."""
    page, effect, interval = {v["claim"]: v for v in page}, (0.0, "-"), (0.0, "-")
    same = [i for i, r in results.items() if set(page[i]["runs"]) == r["runs"]]
    for i in same:
        mine, its = results[i]["ends"], page[i]["interval"]
        effect = max(effect, (abs(results[i]["effect"] - page[i]["effect"]), i))
        one = np.inf if (mine is None) != (its is None) else 0.0
        interval = max(interval, (one if mine is None or its is None else max(abs(mine - its)), i))
        if verdicts[i] != page[i]["verdict"]:
            print(f"verdict of {i}: {verdicts[i]} here, {page[i]['verdict']} on the page")
    print(f"{len(same)} claims compared; the page uses other runs for:", sorted(results.keys() - set(same)))
    print("largest difference of effect: {:.2g} ({})\nof interval: {:.2g} ({})".format(*effect, *interval))
    sys.exit(int(not same or max(effect[0], interval[0]) > 1e-3))


def print_ratios(arms, pairs):
    for pair in pairs:
        names = pair.split(":")
        runs = [list(arms[name].values()) for name in names]
        print(f"| {names[0]} / {names[1]}, n = {len(runs[0])} and {len(runs[1])} | text | image | both |")
        print("| --- " * 4 + "|")
        for metric in REDUCED:
            cells = []
            for modality in ("/text", "/image", ""):
                test = stats.ttest_ind(*([r[metric + modality] for r in of] for of in runs), equal_var=False)
                ends = np.exp(test.confidence_interval())
                effect = np.exp(np.subtract(*(np.mean([r[metric + modality] for r in of]) for of in runs)))
                cells.append(f"×{effect:.3g} ({ends[0]:.3g} to {ends[1]:.3g}), p = {test.pvalue:.2g}")
            print(f"| {metric} | " + " | ".join(cells) + " |")
        for name, of in zip(names, runs, strict=True):
            for windows in zip(*(r["weights"] for r in of), strict=True):
                step, text, image, total, square = np.mean(windows, axis=0)
                spread = np.std([window[-1] for window in windows], ddof=1)
                print(
                    f"{name}, step {step:.0f}: |W_q|² + |W_k|² = {square:,.0f} (sd {spread:.0f}); growth by the "
                    f"text loss {text:.2f}, by the image loss {image:.2f}, in total {total:.2f}"
                )
        print()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    _ = [parser.add_argument(name, type=Path) for name in ("runs", "grid", "--compare")]
    parser.add_argument("--ratios", nargs="+", default=[], metavar="TREATMENT:CONTROL")
    args = parser.parse_args()
    grid = yaml.safe_load(args.grid.read_text())
    claims = {c["id"]: c for c in grid["claims"] if "not_run" not in c and c.get("test") != "count"}
    blocks = {k: v.get("block", "") for k, v in grid["arms"].items()}
    if args.ratios:
        metrics = {name + modality for name in REDUCED for modality in ("/text", "/image", "")}
        return print_ratios(load(reader(args.runs), metrics, blocks)[0], args.ratios)
    arms, planned = load(reader(args.runs), {c["metric"] for c in claims.values()}, blocks)
    results = {i: r for i, c in claims.items() if (r := judge(c, arms, planned))}
    first = {i: decide(claims[i], r) for i, r in results.items()}
    for i, r in results.items():
        controls = [k for k in ("positive_control", "manipulation_check") if k in claims[i]]
        r["failed"] += [k for k in controls if first.get(claims[i][k]) != "reproduced"]
    verdicts, families = {i: decide(claims[i], r) for i, r in results.items()}, {}
    for i, c in claims.items():
        if c["status"] == "confirmatory":
            families.setdefault(c["alpha_family"], []).append(i)
    for ids in families.values():  # the Holm correction; a claim that cannot be judged counts with p = 1
        ids.sort(key=lambda i: 1.0 if i not in results or results[i]["failed"] else results[i]["p"])
        for k, i in enumerate(ids):
            if i in results:
                stopped = any(verdicts.get(j) in (None, "inconclusive") for j in ids[:k])
                level = 1 - 0.05 / (len(ids) - k)
                verdicts[i] = "inconclusive" if stopped else decide(claims[i], results[i], level)
    for i in results:  # only a positive control shows that the runs can detect an effect
        if verdicts[i] == "contradicted" and "positive_control" not in claims[i]:
            verdicts[i] = "inconclusive"
    row = "{:<16}{:>3}{:>9}{:>9}{:>9}{:>9}{:>9}{:>8}  {:<10}{:<14}{}".format
    print(row("claim", "n", "treatm.", "control", "effect", "low", "high", "sd", "by", "verdict", "failed"))
    for i, r in results.items():
        ends = [np.nan] * 2 if r["ends"] is None else r["ends"]
        numbers = [f"{v:.3f}" for v in (*r["means"], r["effect"], *ends, r["sd"])]
        print(row(i, r["n"], *numbers, r["how"], verdicts[i], ", ".join(r["failed"]) or "-"))
    print(f"No finished runs: {len(claims) - len(results)} claims. Units: nats for losses, else natural logs.\n")
    for h in grid.get("hypotheses", []):
        marks = ""
        for i, predicted in h["predicts"].items():
            possible = NOT_ABOVE | NOT_BELOW
            allowed = {"not above": NOT_ABOVE, "not below": NOT_BELOW}.get(predicted, {predicted})
            if i in results and results[i]["ends"] is not None and not results[i]["failed"]:
                (low, high), least = results[i]["ends"], claims[i]["min_effect"]
                ranges = {"above": (least, np.inf), "none": (-least, least), "below": (-np.inf, -least)}
                possible = {k for k, (a, b) in ranges.items() if high > a and low < b}
            marks += "+" if possible <= allowed else "?" if possible & allowed else "-"
        whole = "contradicted" if "-" in marks else "not told apart" if "?" in marks else "supported"
        print(f"{h['id']:<14}{whole:<16}{marks:<14}{', '.join(h['predicts'])}")
    if args.compare:
        compare(json.loads(args.compare.read_text()), results, verdicts)


if __name__ == "__main__":
    main()

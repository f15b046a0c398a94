"""Columns of other tools -> tags of docs/statistics.md, and fields of their configs -> mmqk's, by the table names.yaml.

A name is compared as words: ``train/CrossEntropyLoss`` is "train cross entropy loss". Noise, the number of the layer
(``layers.3``, ``blocks/3``, ``h.3``) and the modality are removed, and the rest must match a row of the table as a
whole. A name with a word that no row has is another series and stays unused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from mmqk.store import UserError, parse_tag, tag
from mmqk.store.formatting import some

TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
PARAMETERS = TABLE["parameters"]
LAYER = re.compile(r"(?:^|[^a-z])(?:layers?|(?:res)?blocks?|h)[ ._/-]?(\d+)", re.IGNORECASE)
NOISE, LOSS = (re.compile(rf"\b({TABLE['words'][name]})\b") for name in ("noise", "loss"))
STATISTICS = {
    statistic: re.compile(names.replace("EVAL", TABLE["words"]["EVAL"]).replace("LOGIT", TABLE["words"]["LOGIT"]))
    for statistic, names in TABLE["statistics"].items()
}


def words(name: str) -> str:
    """Return a name in lower case with one space between its words."""
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name)
    return " ".join(re.sub(r"[^A-Za-z0-9]+", " ", split).lower().split())


def tag_of(name: str) -> str | None:
    """Return the tag of a column of any tool; None if the table has no row for it."""
    number = LAYER.search(name)
    layer = int(number[1]) if number else None
    if match := re.fullmatch(TABLE["gradient_of"], name):
        parameter = (match[1] or match[2]).replace("/", ".")
        if layer is not None or re.search(r"weight|bias|head|emb|wte|\.", parameter):
            return f"grad_norm/{parameter}"
    if match := re.fullmatch(TABLE["weight_of"], name):
        parameter = (match[1] or match[2]).replace("/", ".")
        of = [m for m in TABLE["matrices"] if re.search(rf"(^|\.)({PARAMETERS[m]})(\.|$)", parameter)]
        return f"w_{of[0]}_norm/layer{layer:02d}" if of and layer is not None else None
    rest = NOISE.sub(" ", LOSS.sub("loss", words(LAYER.sub(" ", name))))
    modality = next((m for m, names in TABLE["modalities"].items() if re.search(rf"\b({names})\b", rest)), None)
    if modality:
        rest = re.sub(rf"\b({TABLE['modalities'][modality]})\b", " ", rest)
    rest = " ".join(rest.split())
    for statistic, names in STATISTICS.items():
        if names.fullmatch(rest):
            return tag(statistic, *([modality] if modality else []), layer=layer)
    own = parse_tag(name.removeprefix("train/"))
    keeps = own.layer is not None or re.fullmatch(TABLE["own"], own.statistic.partition("/")[0])
    return name.removeprefix("train/") if keeps else None


def tags_of(columns: Iterable[str], mapping: Mapping[str, str], source: str, own: bool = False) -> dict[str, str]:
    """Return the tag of each column that has one; ``mapping`` ({tag: column}) comes first. Columns of a run of mmqk
    (``own``) are tags already.

    If several columns have the same tag, a value of each step comes before one of an epoch, and a short name before a
    long one.

    Raises:
        UserError: ``mapping`` names a column that the file does not have, or no column is a loss.
    """
    names = list(columns)
    listed = some(names, 40)
    if missing := set(mapping.values()) - set(names):
        raise UserError(f"{source} has no column {min(missing)!r}: give --map one of {listed}")
    found = {column: tag for tag, column in mapping.items()}
    for name in sorted(names, key=lambda name: ("epoch" in name.lower(), len(name))):
        if name not in found and (tag := name if own else tag_of(name)) and tag not in found.values():
            found[name] = tag
    if not any(tag == "loss" or tag.startswith("loss/") for tag in found.values()):
        left = [name for name in names if "loss" in found.get(name, "loss") and not step_of((name,))]
        others = [name for name in left if not re.search(r"ppl|perplexity|bp[bcd]\b|bits", name, re.IGNORECASE)]
        others.sort(key=lambda name: not re.search(r"loss|ce\b|nll", name, re.IGNORECASE))
        advice = f"name it, such as --map {quote('loss=' + others[0])}" if others else "log the loss, in nats per token"
        raise UserError(f"{source} has no column known as a loss, only {listed or 'lines without numbers'}: {advice}")
    return {name: found[name] for name in names if name in found}


@lru_cache(maxsize=4096)
def step_of(columns: tuple[str, ...]) -> str | None:
    """Return the column that most likely counts the steps; None if no name fits."""
    names = {name: re.sub(r"^(train|trainer) (?=.* )", "", words(name)) for name in columns}
    names |= {name: name for name in columns if name == "_step"}
    for pattern in TABLE["steps"]:
        wanted = re.compile(pattern.replace("UNITS", TABLE["units"]))
        if found := [name for name, text in names.items() if wanted.fullmatch(text)]:
            return min(found, key=len)
    return None


def counts_units(name: str | None) -> bool:
    """Return whether a column counts samples or tokens by its name."""
    return name is not None and re.fullmatch(TABLE["units"], words(name)) is not None


def fields_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat config with mmqk's names of the fields where known; the other fields keep their names."""
    named: dict[str, Any] = {}
    for field, value in config.items():
        last = re.split(r"[./]", field)[-1].lower()
        known = [name for name, pattern in TABLE["fields"].items() if re.fullmatch(pattern, last)]
        named[field if field in TABLE["fields"] or not known or known[0] in named else known[0]] = value
        if re.fullmatch(r"(use_)?qk_(layer_?)?norm", last) and isinstance(value, bool):
            named["model.qk_norm.kind"] = ("layer" if "layer" in last else "rms") if value else "none"
    return named

"""Stores results in `<out>/<device>/<table>.json`, with machine, versions, command and the times of every round."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mmqk.store import write_json

PACKAGES = (
    "torch", "lightning", "transformers", "litgpt", "triton", "numpy", "webdataset", "tokenizers", "pillow",
)  # fmt: skip


def device_name(device: str) -> str:
    """Return the name of the GPU or of the CPU."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        name = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        name = None
    return name.group(1).strip() if name else platform.machine()


def machine(device: str) -> dict[str, Any]:
    """Return a description of the machine with its load, which shows whether other programs ran."""
    about: dict[str, Any] = {
        "device": device_name(device),
        "cpu": device_name("cpu"),
        "processor": platform.machine(),
        "system": platform.system(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
    }
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        about |= {
            "gpu_memory_gib": round(gpu.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return about


def versions() -> dict[str, str | None]:
    """Return the versions of Python and the packages; None if not installed."""
    installed: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = None
    return installed


def commit() -> str | None:
    """Return the commit of the code, with a plus if there are uncommitted changes; None outside a git checkout."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "mmqk", "benchmarks/*.py")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def folder_of(device: str) -> str:
    """Return the name of the folder of a device's results."""
    if device == "cpu":
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")


def keep(path: Path, unit: dict[str, Any]) -> None:
    """Write the record of a unit into the file, in place of its earlier record."""
    units = json.loads(path.read_text()) if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, [u for u in units if u["unit"] != unit["unit"]] + [unit])


def read(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the newest result of each unit and device in these folders."""
    newest: dict[tuple[str, ...], dict[str, Any]] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.json")):
            for unit in json.loads(path.read_text()):
                kind = (unit["table"], unit["machine"]["device"], unit["unit"])
                if kind not in newest or newest[kind]["started"] < unit["started"]:
                    newest[kind] = unit
    return list(newest.values())

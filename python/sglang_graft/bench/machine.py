"""What a result was measured on and with: no names of machines, users or paths."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = (
    *("sglang", "sglang-graft", "torch", "triton", "flashinfer-python", "sglang-kernel"),
    *("xgrammar", "transformers", "httpx", "numpy", "httptools"),
)


def machine(device: str) -> str:
    """The GPU's name, or how many cores the CPU has."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU, {os.cpu_count()} cores"


def versions(device: str, commit: str | None = None) -> dict[str, Any]:
    """Versions of all that matters; `commit` where the working tree has no history."""
    found: dict[str, Any] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    found["commit"] = commit or _output("git", "rev-parse", "HEAD")
    found["commit_dirty"] = (
        None if commit else bool(_output("git", "status", "--porcelain", "-uno"))
    )
    if device == "cuda":
        found["cuda"] = torch.version.cuda
        # A line for each GPU.
        drivers = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or ""
        found["driver"] = ", ".join(dict.fromkeys(drivers.splitlines())) or None
    return found


def _output(*line: str) -> str | None:
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(line, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()

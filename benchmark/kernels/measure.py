"""Times of CUDA graphs taken in turn, the device's copy bandwidth, and what ran where."""

import statistics
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

COPY_BYTES = 1 << 30


def capture(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of `step`, run once before so that all is compiled."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def milliseconds(step: Callable[[], object]) -> float:
    """Device time of one call."""
    start, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    start.record()
    step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def spread(values: list[float]) -> dict[str, float]:
    low, high = np.percentile(values, [20, 80])
    return {"p50": statistics.median(values), "p20": float(low), "p80": float(high)}


def in_turn(
    graphs: Mapping[str, torch.cuda.CUDAGraph], replays: int, scale: float
) -> dict[str, dict[str, float]]:
    """Milliseconds of a replay times `scale`; the contestants take turns, who begins too."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    for round_ in range(-2, replays):  # the first two warm up
        shift = round_ % len(names)
        for name in names[shift:] + names[:shift]:
            took = milliseconds(graphs[name].replay)
            if round_ >= 0:
                times[name].append(took * scale)
    return {name: spread(values) for name, values in times.items()}


def copy_bandwidth(replays: int = 20) -> float:
    """Bytes a second, read and written, of a large copy on the device."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = [milliseconds(lambda: target.copy_(source)) for _ in range(replays)]
    return 2 * COPY_BYTES / (statistics.median(times) / 1e3)


def where() -> dict[str, Any]:
    """The device, and the versions of all that takes part."""
    import pynvml

    pynvml.nvmlInit()
    driver = pynvml.nvmlSystemGetDriverVersion()
    pynvml.nvmlShutdown()
    packages = {"flashinfer": "flashinfer-python", "torch": "torch", "triton": "triton"}
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "cuda": torch.version.cuda,
        **{name: version(package) for name, package in packages.items()},
        "sglang": version("sglang"),
    }

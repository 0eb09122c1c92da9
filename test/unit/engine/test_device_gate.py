"""The gate between threads that read adapters and captures on the scheduler's thread."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sglang_graft.engine.device_gate import DeviceGate, GateClosedError

SECONDS = 30.0


def weight(layer: int | None, linear: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    return torch.ones(1), None


def test_a_read_that_needs_no_base_weights_passes_a_closed_gate() -> None:
    gate = DeviceGate()
    gate.close()
    with gate.visit(weight), gate.visit(None) as nothing:
        assert nothing is None


def test_closing_waits_for_those_inside_and_keeps_others_out() -> None:
    gate = DeviceGate()
    inside, leave, asked = threading.Event(), threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        with gate.visit(weight) as read:
            assert read is not None
            read(0, "q_proj")
            inside.set()
            assert leave.wait(SECONDS)
            order.append("first is done")

    def second() -> None:
        with gate.visit(weight) as read:
            assert read is not None
            asked.set()
            read(0, "q_proj")
            order.append("second is in")

    with ThreadPoolExecutor(2) as threads:
        jobs = [threads.submit(first)]
        assert inside.wait(SECONDS)
        threading.Timer(0.05, leave.set).start()
        gate.close()
        order.append("closed")
        jobs.append(threads.submit(second))
        assert asked.wait(SECONDS)
        order.append("opened")
        gate.open()
        for job in jobs:
            job.result(SECONDS)
    assert order == ["first is done", "closed", "opened", "second is in"]


def test_a_stopped_gate_turns_away_those_that_wait() -> None:
    gate = DeviceGate()
    gate.close()

    def read() -> None:
        with gate.visit(weight) as base:
            assert base is not None
            base(0, "q_proj")

    with ThreadPoolExecutor(1) as threads:
        job = threads.submit(read)
        gate.stop()
        with pytest.raises(GateClosedError):
            job.result(SECONDS)

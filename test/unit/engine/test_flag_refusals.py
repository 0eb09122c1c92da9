"""Flags that cannot be served are refused by name."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_graft.engine.refusals import REQUESTED, check_requested

HARMLESS = (None, False, True, "graft", 1, 32, "fcfs")


def arguments(**given: Any) -> SimpleNamespace:
    """Arguments that nothing is wrong with, but for `given`."""
    fine = {
        row.field: next(value for value in HARMLESS if not row.refused(value)) for row in REQUESTED
    }
    return SimpleNamespace(**fine | given)


def test_nothing_is_refused_without_reason() -> None:
    check_requested(arguments())


def test_c83_kv_events_are_refused_at_start() -> None:
    with pytest.raises(ValueError, match=r"--kv-events-config .* publishes no KV events"):
        check_requested(arguments(kv_events_config='{"publisher": "zmq"}'))

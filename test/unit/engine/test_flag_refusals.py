"""Flags that cannot be served are refused by name."""

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig

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


@pytest.mark.parametrize("field", ["debug_cuda_graph", "enable_torch_compile"])
def test_what_would_take_the_adapters_out_of_graphs_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=rf"--{field.replace('_', '-')} True: "):
        check_requested(arguments(**{field: True}))


def test_a_backend_of_decode_graphs_is_refused_by_either_flag() -> None:
    with pytest.raises(ValueError, match="--cuda-graph-backend-decode 'breakable'"):
        check_requested(arguments(cuda_graph_backend_decode="breakable"))
    asked = {"decode": {"backend": "breakable"}}
    for config in (asked, CudaGraphConfig.from_dict(asked), {"prefill": {"backend": "full"}}):
        with pytest.raises(ValueError, match="--cuda-graph-config"):
            check_requested(arguments(cuda_graph_config=config))
    for fine in ({"decode": {"bs": [1, 2]}, "prefill": {"backend": "disabled"}}, CudaGraphConfig()):
        check_requested(arguments(cuda_graph_config=fine))

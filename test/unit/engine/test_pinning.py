"""A pin leaves every request that is here its room."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_graft.cache import Lru, UnifiedTree
from sglang_graft.engine.pinning import check
from sglang_graft.pool import Owner, PageLedger
from sglang_graft.tiers.pins import Pins

PAGE = 16
TOTAL = 40
REF = SimpleNamespace(lora_name="legal")


def read(identity: str, pages: int) -> Any:
    return SimpleNamespace(
        adapter=SimpleNamespace(identity=identity), image=SimpleNamespace(pages=[0] * pages)
    )


def request(adapter: str | None, prompt: int, new: int) -> Any:
    return SimpleNamespace(
        lora_id=adapter,
        origin_input_ids=[1] * prompt,
        prefix_indices=[],
        sampling_params=SimpleNamespace(max_new_tokens=new),
        finished=lambda: False,
    )


def host(**places: Any) -> Any:
    empty = SimpleNamespace(reqs=[])
    return SimpleNamespace(
        **({"waiting_queue": [], "running_batch": empty, "last_batch": None, "chunked_req": None}
           | places),
        page_size=PAGE,
    )  # fmt: skip


@pytest.fixture
def residency() -> Any:
    tree = UnifiedTree(PageLedger(TOTAL + 1), page_tokens=PAGE, policy=Lru())
    node = tree.add_adapter("a's weights", 6)
    return SimpleNamespace(tree=tree, pins=Pins(tree), node={"a": node, None: tree.base}.get)


@pytest.mark.parametrize("place", ["waiting", "running", "last"])
def test_a_request_must_fit_beside_the_pins(residency: Any, place: str) -> None:
    # 10 pages of prompt, 10 of answer, 2 to round, 6 of weights: 28, which leaves 12.
    req = request("a", 160, 160)
    batch = SimpleNamespace(reqs=[req])
    where: dict[str, Any] = {
        "waiting": {"waiting_queue": [req]},
        "running": {"running_batch": batch},
        "last": {"last_batch": batch},
    }[place]
    check(host(**where), residency, REF, read("new", 12))
    with pytest.raises(ValueError, match="may need 28"):
        check(host(**where), residency, REF, read("new", 13))


def test_weights_that_are_pinned_already_take_nothing_more(residency: Any) -> None:
    req = request("a", 160, 160)
    assert residency.pins.take("a", residency.node("a"))
    check(host(waiting_queue=[req]), residency, REF, read("a's weights", 6))
    check(host(waiting_queue=[req]), residency, REF, read("new", 12))
    with pytest.raises(ValueError, match="would hold 19 pages of 40"):
        check(host(waiting_queue=[req]), residency, REF, read("new", 13))


def test_the_next_chunk_of_a_prompt_keeps_its_room(residency: Any) -> None:
    req = request(None, 96, 0)
    assert residency.tree.ledger.take(20, Owner.KV_RUNNING)
    check(host(chunked_req=req), residency, REF, read("new", 13))
    with pytest.raises(ValueError, match="still needs 7"):
        check(host(chunked_req=req), residency, REF, read("new", 14))

"""Operations on single adapters, on a pool of real parts under a scheduler of none."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from helpers_adapters import random_adapter
from helpers_residency import LAYOUT, SPEC, make, promote

from sglang_graft.engine.adapter_control import OPERATIONS
from sglang_graft.pool import Owner
from sglang_graft.tiers import Residency

SIZE = LAYOUT.page_bytes


class World:
    """Four adapters a to d in a pool for three of them, and what the operations look at."""

    def __init__(self) -> None:
        self.residency: Residency = make(pages=40)
        pages = 0
        for seed, name in enumerate("abcd"):
            rank = {(0, "q_proj"): 64, (1, "down_proj"): 64}
            pages = self.residency.add(
                name, name, random_adapter(SPEC, rank, seed)
            ).node.weight_pages
        self.pages = pages
        tiers = self.residency.offer.__self__  # type: ignore[attr-defined]
        tiers.images.store.wait()
        empty = SimpleNamespace(reqs=[])
        tree = self.residency.tree
        cache = SimpleNamespace(
            tree=tree,
            residency=self.residency,
            tiers=tiers,
            pool=SimpleNamespace(layout=LAYOUT, ledger=tree.ledger),
            check_now=self.check,
        )
        self.scheduler = SimpleNamespace(
            tree_cache=cache,
            waiting_queue=[],
            running_batch=empty,
            last_batch=None,
            chunked_req=None,
            page_size=LAYOUT.page_tokens,
        )

    def check(self) -> None:
        self.residency.check_invariants()
        self.residency.tree.check_invariants()
        self.residency.tree.ledger.check_invariants()

    def ask(self, operation: str, name: str, **more: Any) -> dict[str, Any]:
        arguments = {"id": name, "name": name, **more}
        answer: dict[str, Any] = OPERATIONS[operation](self.scheduler, arguments)
        self.check()
        return answer

    def cached(self, name: str, pages: int) -> None:
        """KV below an adapter that is on the device."""
        tree, node = self.residency.tree, self.residency.node(name)
        assert node is not None
        tree.evict(pages - tree.ledger.free)
        taken = tree.ledger.take(pages, Owner.KV_RUNNING)
        assert taken is not None
        tokens = array("q", [ord(name)] * pages * LAYOUT.page_tokens)
        tree.insert(node, tokens, taken, start=0)


@pytest.fixture
def world() -> World:
    made = World()
    assert 3 * made.pages <= 39 < 4 * made.pages + 3
    return made


def test_rows_say_where_everything_is(world: World) -> None:
    assert promote(world.residency, "a")
    world.cached("a", 2)
    world.ask("pin_adapter", "b", pinned=True)
    rows = world.ask("adapters", "")["adapters"]
    assert [rows[name]["state"] for name in "abcd"] == ["device", "loading", "host", "host"]
    assert (rows["a"]["bytes"], rows["a"]["kv_bytes"]) == (world.pages * SIZE, 2 * SIZE)
    assert (rows["b"]["pinned"], rows["c"]["device_bytes"]) == (True, 0)
    assert rows["c"]["host_bytes"] == world.pages * SIZE


def test_an_id_that_is_gone_is_refused(world: World) -> None:
    for operation in ("pin_adapter", "prioritize_adapter", "warm_adapter", "release_adapter"):
        with pytest.raises(ValueError, match="unloaded or replaced"):
            world.ask(operation, "gone")


def test_a_forecast_is_what_then_leaves(world: World) -> None:
    for name in "abc":
        assert promote(world.residency, name)
    world.cached("a", 39 - 3 * world.pages)
    foreseen = world.ask("foresee_adapter", "d", pin=False)
    assert foreseen["fits"]
    assert foreseen["leaves"]
    done = world.ask("warm_adapter", "d", to="device", failures=None)
    assert (done["step"], done["left"]) == ("coming", foreseen["leaves"])
    tiers = world.scheduler.tree_cache.tiers
    tiers.transfers.poll()
    again = world.ask("warm_adapter", "d", to="device", failures=done["failures"])
    assert (again["step"], again["left"]) == ("done", [])
    assert world.ask("foresee_adapter", "d", pin=True)["leaves"] == []


def test_a_pin_takes_what_was_foreseen_and_goes_back(world: World) -> None:
    for name in "abc":
        assert promote(world.residency, name)
    world.cached("c", 39 - 3 * world.pages)
    foreseen = world.ask("foresee_adapter", "d", pin=True)
    assert world.ask("pin_adapter", "d", pinned=True)["left"] == foreseen["leaves"] != []
    assert world.ask("pin_adapter", "d", pinned=True)["left"] == []
    assert world.ask("pin_adapter", "d", pinned=False)["left"] == []
    assert world.ask("pin_adapter", "d", pinned=False)["left"] == []


def test_pins_leave_room_and_say_so_before(world: World) -> None:
    world.ask("pin_adapter", "a", pinned=True)
    world.ask("pin_adapter", "b", pinned=True)
    said = world.ask("foresee_adapter", "c", pin=True)
    assert not said["fits"]
    assert "pinned adapters would hold" in said["reason"]
    with pytest.raises(ValueError, match="pinned adapters would hold"):
        world.ask("pin_adapter", "c", pinned=True)
    assert not world.ask("adapters", "")["adapters"]["c"]["pinned"]


def test_what_is_promised_is_not_taken(world: World) -> None:
    running = [SimpleNamespace(rid=str(i), finished=lambda: False) for i in range(20)]
    world.scheduler.running_batch = SimpleNamespace(reqs=running)
    world.scheduler.last_batch = SimpleNamespace(
        reqs=[*running, *(SimpleNamespace(rid=f"new {i}") for i in range(12))]
    )
    assert world.pages > 39 - 32
    done = world.ask("warm_adapter", "a", to="device", failures=None)
    assert done["step"] == "no room"
    assert done["missing_bytes"] == (world.pages - 7) * SIZE
    foreseen = world.ask("foresee_adapter", "a", pin=False)
    assert (foreseen["fits"], foreseen["missing_bytes"]) == (False, done["missing_bytes"])


def test_weights_that_were_only_read_are_foreseen_too(world: World) -> None:
    new = {"id": None, "identity": "new", "pin": False}
    assert world.ask("foresee_adapter", "x", **new | {"pages": 10})["fits"]
    said = world.ask("foresee_adapter", "x", **new | {"pages": 38})
    assert (said["fits"], "the whole pool has" in said["reason"]) == (False, True)
    identity = world.residency.known()[0].node.identity
    assert promote(world.residency, "a")
    said = world.ask("foresee_adapter", "x", id=None, identity=identity, pages=1, pin=False)
    assert (said["fits"], said["leaves"], said["bytes"]) == (True, [], world.pages * SIZE)


def test_an_unload_is_foreseen(world: World) -> None:
    assert promote(world.residency, "a")
    world.cached("a", 2)
    assert world.ask("release_adapter", "a")["freed_bytes"] == (world.pages + 2) * SIZE
    node = world.residency.node("a")
    assert node is not None
    world.residency.tree.lock(node)
    said = world.ask("release_adapter", "a")
    assert said == {"freed_bytes": 2 * SIZE, "following_bytes": world.pages * SIZE}
    world.residency.tree.unlock(node)
    assert world.residency.remove("a") == world.pages + 2
    assert world.ask("release_adapter", "b") == {"freed_bytes": 0, "following_bytes": 0}


def test_a_priority_is_set_and_shown(world: World) -> None:
    assert promote(world.residency, "a")
    assert promote(world.residency, "b")
    assert promote(world.residency, "c")
    world.ask("prioritize_adapter", "a", priority=2)
    assert world.ask("adapters", "")["adapters"]["a"]["priority"] == 2
    leaves = world.ask("foresee_adapter", "d", pin=False)["leaves"]
    assert leaves[0]["adapters"] == ["b"], "a is older, and dearer"


def test_an_unload_is_sglangs_own_between_two_turns() -> None:
    world = World()
    told = []

    def unload(request: Any) -> Any:
        told.append((request.lora_name, request.lora_id))
        return SimpleNamespace(success=len(told) < 3, error_message="what it says")

    world.scheduler.unload_lora_adapter = unload
    for _ in range(2):  # retired, then forgotten
        assert world.ask("unload_adapter", "a") == {"freed": "what it says"}
    with pytest.raises(ValueError, match="what it says"):
        world.ask("unload_adapter", "a")
    assert told == [("a", "a")] * 3

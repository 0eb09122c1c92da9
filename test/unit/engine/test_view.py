"""What the scheduler tells for metrics and the page, of a tree without SGLang."""

import json
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from helpers_tiers import World

from sglang_graft.engine import view
from sglang_graft.engine.observe import Observations
from sglang_graft.pool import Owner
from sglang_graft.serving.metrics_table import METRICS, Source


class Known:
    """A registration."""

    def __init__(self, name: str, node: Any) -> None:
        self.name, self.node, self.adapter_id = name, node, name


def cache_of(world: World, names: dict[str, int], pinned: tuple[int, ...] = ()) -> Any:
    """The parts of the tree cache that a view looks at."""
    known = [Known(name, world.nodes[number]) for name, number in names.items()]
    pins = SimpleNamespace(nodes=lambda: [world.nodes[number] for number in pinned])
    residency = SimpleNamespace(known=lambda: known, retired=list, pins=pins)
    layout = SimpleNamespace(page_bytes=1000, page_tokens=world.tree.page_tokens)
    return SimpleNamespace(
        tree=world.tree,
        tiers=world.tiers,
        residency=residency,
        pool=SimpleNamespace(ledger=world.ledger, layout=layout),
        observed=Observations(),
    )


@pytest.fixture
def world() -> World:
    world = World(40, 60)
    for number in range(3):
        world.register(number, 5)
    world.settle()
    for number in (0, 1):
        waiting = world.enqueue(number, (number, 1, 0))
        assert waiting
        world.settle()
    return world


def insert(world: World, identity: str | None, runs: list[list[int]]) -> None:
    adapter = world.tree.adapter(identity)
    assert adapter is not None
    for tokens in runs:
        pages = world.ledger.take(len(tokens) // world.tree.page_tokens, Owner.KV_RUNNING)
        assert pages is not None
        world.tree.insert(adapter, array("q", tokens), pages, start=0)


def test_metrics_has_all_that_the_table_reads(world: World) -> None:
    cache = cache_of(world, {"a": 0, "also a": 0, "b": 1, "c": 2}, pinned=(1,))
    found = json.loads(json.dumps(view.metrics(cache)))
    for metric in METRICS:
        if metric.source is Source.SCHEDULER:
            assert list(metric.read(found)), metric.name
    assert sum(found["adapters"].values()) == 3, "names with equal weights count once"
    assert (found["names"], found["pinned"]) == (4, 1)
    pages = dict(found["pages"])
    assert pages.pop("total") == sum(pages.values())


def test_the_picture_is_bounded_and_says_what_it_leaves_out(world: World) -> None:
    insert(world, None, [[number, number] for number in range(9)])
    cache = cache_of(world, {"a": 0, "b": 1, "c": 2})
    found = view.overview(cache, {"adapters": 2, "children": 4})
    assert found["adapters_known"] == 3
    shown = found["adapters_shown"]
    assert len(shown) == 2
    (base,) = [row for row in shown if row["identity"] is None]
    assert base["children"] == 9
    used = [child["last_use"] for child in base["children_shown"]]
    assert len(used) == 4
    assert used == sorted(used, reverse=True)
    assert json.dumps(found), "plain JSON"


def test_the_last_used_come_first_and_the_base_model_is_always_there(world: World) -> None:
    for identity in (world.nodes[2].identity, world.nodes[0].identity):
        node = world.tree.adapter(identity)
        assert node is not None
        world.tree.match(node, array("q"))
    cache = cache_of(world, {"a": 0, "b": 1, "c": 2})
    names = [row["names"] for row in view.overview(cache, {})["adapters_shown"]]
    assert names[:2] == [["a"], ["c"]]
    (only,) = view.overview(cache, {"adapters": 1})["adapters_shown"]
    assert only["identity"] is None


@pytest.mark.parametrize("arguments", [{"adapters": 0}, {"children": 17}, {"adapters": "5"}])
def test_other_bounds_are_refused(world: World, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"wanted 1 to \d+, got"):
        view.overview(cache_of(world, {}), arguments)


def test_departures_have_names_while_there_are_any(world: World) -> None:
    world.tree.evict(40)
    cache = cache_of(world, {"a": 0, "b": 1, "c": 2})
    rows = view.overview(cache, {})["departures"]
    assert rows
    assert {row["name"] for row in rows} <= {"a", "b", "c", None}
    assert rows[0]["clock"] >= rows[-1]["clock"], "the latest first"
    nameless = view.overview(cache_of(world, {}), {})["departures"]
    assert all(row["name"] is None for row in nameless)

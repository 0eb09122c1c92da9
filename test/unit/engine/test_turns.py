"""Nobody passes a request that waits for a slot, within one pass."""

from types import SimpleNamespace
from typing import Any

from sglang_graft.engine.turns import begin_pass, in_turn


def test_a_refused_request_holds_back_all_behind_it() -> None:
    host = SimpleNamespace(tree_cache=SimpleNamespace(waits_for_slot=True))
    asked: list[str] = []

    def original(_: Any, req: str, running: set[str | None]) -> bool:
        asked.append(req)
        return req in running

    begin_pass(host, None, None)
    answers = [in_turn(original, host, req, {"a"}) for req in ("a", "b", "a")]
    assert answers == [True, False, False]
    assert asked == ["a", "b"]
    begin_pass(host, None, None)
    assert in_turn(original, host, "a", {"a"})

"""Loads are read by a thread and come back in the order in which they were asked for."""

import threading
from types import SimpleNamespace
from typing import Any

from sglang_graft.engine.background_load import Loads


def request(name: str) -> Any:
    return SimpleNamespace(name=name, to_ref=lambda: name)


def test_the_caller_goes_on_while_a_folder_is_read() -> None:
    loads, may_end = Loads(), threading.Event()

    def read(ref: str) -> Any:
        assert may_end.wait(10)
        if ref == "bad":
            raise ValueError("no such folder")
        return ref

    for name in ("good", "bad"):
        loads.start(request(name), read)
    assert loads.done() == []
    may_end.set()
    ended: list[Any] = []
    while len(ended) < 2:
        ended += loads.done()
    (good, first), (bad, second) = ended
    assert (good.name, bad.name) == ("good", "bad")
    assert first.result() == "good"
    assert isinstance(second.exception(), ValueError)
    assert loads.done() == []

"""Reading adapters in threads: bounds, order, one read for many, and what goes wrong."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers_queues import FakeExecutor
from helpers_tiers import packed

from sglang_graft.tiers import AdapterStore, Packed

SECONDS = 30.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


class Files:
    """Reads wait for `gate`; some fail."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.read: list[str] = []
        self.running = self.most = 0
        self.lock = threading.Lock()
        self.written: list[tuple[list[int], torch.Tensor]] = []

    def open(self, path: Path) -> Packed:
        with self.lock:
            self.read.append(path.name)
            self.running += 1
            self.most = max(self.most, self.running)
        self.gate.wait(SECONDS)
        with self.lock:
            self.running -= 1
        if path.name == "gone":
            raise FileNotFoundError(f"{path} is gone")
        if path.name == "fault":
            raise KeyError("our own fault")
        return packed(1, 2, path.name)

    def write(self, pages: "list[int]", image: torch.Tensor) -> None:
        self.written.append((pages, image))


@pytest.fixture
def files() -> Files:
    return Files()


@pytest.fixture
def store(files: Files) -> Iterator[AdapterStore]:
    made = AdapterStore(files.open, files.write, workers=2, in_memory=3)
    yield made
    files.gate.set()
    made.close()


def results(store: AdapterStore, count: int) -> list[str]:
    found: list[str] = []

    def enough() -> bool:
        for job in store.poll():
            found.append(f"{job.key}: {job.error or 'read'}")
            if job.packed is not None:
                store.forget(job.packed)
            store.check_invariants()
        return len(found) >= count

    until(enough)
    return found


def test_fifty_requests_for_one_adapter_are_one_read(store: AdapterStore, files: Files) -> None:
    jobs = [store.request("a", Path("a")) for _ in range(50)]
    assert all(job is jobs[0] for job in jobs)
    assert store.poll() == [], "the loop never waits for a file"
    files.gate.set()
    assert results(store, 1) == ["a: read"]
    assert files.read == ["a"]
    assert store.idle


def test_bounds_hold_and_results_come_in_order(store: AdapterStore, files: Files) -> None:
    names = [f"n{i}" for i in range(20)]
    for name in names:
        store.request(name, Path(name))
        store.check_invariants()
    files.gate.set()
    assert results(store, 20) == [f"{name}: read" for name in names]
    assert files.most <= 2


def test_read_images_count_against_the_bound(store: AdapterStore, files: Files) -> None:
    files.gate.set()
    for name in "abcde":
        store.request(name, Path(name))
    taken: list[Packed] = []

    def three() -> bool:
        taken.extend(job.packed for job in store.poll() if job.packed)
        return len(taken) == 3

    until(three)
    assert store.poll() == []
    assert sorted(files.read) == ["a", "b", "c"]
    done: list[str] = []
    store.fill(taken[0], [7, 8], lambda: done.append("a"))
    until(lambda: bool(store.poll() or done))
    assert files.written[0][0] == [7, 8]
    until(lambda: len(files.read) == 4)


def test_a_failed_read_is_reported_once_and_can_be_tried_again(
    store: AdapterStore, files: Files
) -> None:
    files.gate.set()
    store.request("x", Path("gone"))
    store.request("y", Path("y"))
    assert results(store, 2) == ["x: gone is gone", "y: read"]
    assert store.request("x", Path("x")).error is None
    assert results(store, 1) == ["x: read"]


def test_an_abandoned_job_is_thrown_away(store: AdapterStore, files: Files) -> None:
    for name in "abcd":
        store.request(name, Path(name))
    store.abandon("a")  # under way
    store.abandon("d")  # not begun
    store.abandon("never asked for")
    again = store.request("a", Path("a"))
    assert not again.abandoned
    files.gate.set()
    assert results(store, 3) == ["b: read", "c: read", "a: read"]
    until(lambda: store.idle or bool(store.poll()))
    assert files.read.count("d") == 0


def test_our_own_faults_are_not_hidden(store: AdapterStore, files: Files) -> None:
    files.gate.set()
    store.request("x", Path("fault"))
    with pytest.raises(KeyError):
        until(lambda: bool(store.poll()))


def test_ranks_see_as_many_results_as_the_slowest() -> None:
    executor, agreed = FakeExecutor(), [0]
    store = AdapterStore(
        lambda path: packed(1, 1, path.name),
        lambda pages, image: None,
        executor=executor,
        agree=lambda count: min(count, agreed[0]),
    )
    store.request("a", Path("a"))
    executor.advance()
    assert store.poll() == []
    agreed[0] = 1
    assert [job.key for job in store.poll()] == ["a"]


def test_a_store_without_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one worker"):
        AdapterStore(lambda path: packed(1, 1, "a"), lambda pages, image: None, workers=0)

"""Reading ahead in threads: order, bound, and what becomes of the rest when one read fails."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_graft.tiers import ReadAhead

SECONDS = 30.0


class Disk:
    """A read of a name ends once it is released."""

    def __init__(self, *released: str) -> None:
        self._changed = threading.Condition()
        self._released = set(released)
        self.begun: list[str] = []

    def read(self, name: str) -> str:
        with self._changed:
            self.begun.append(name)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: name in self._released, SECONDS)
        if name.startswith("bad"):
            raise ValueError(f"{name} is no adapter")
        return name.upper()

    def release(self, *names: str) -> None:
        with self._changed:
            self._released.update(names)
            self._changed.notify_all()

    def wait_for(self, *names: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: set(names) <= set(self.begun), SECONDS)


def test_results_come_in_the_order_of_the_items_whoever_ends_first() -> None:
    disk = Disk()
    items = [(name, 1) for name in "abc"]
    with ReadAhead(disk.read, items, threads=3, nbytes=10) as reads:
        disk.wait_for("a", "b", "c")
        disk.release("c")
        disk.release("b")
        disk.release("a")
        assert [reads.take() for _ in items] == ["A", "B", "C"]
        reads.check_invariants()


def test_reads_wait_for_room_until_the_one_before_is_done_with() -> None:
    disk = Disk("a", "b", "c")
    with ReadAhead(disk.read, [("a", 4), ("b", 4), ("c", 4)], threads=3, nbytes=9) as reads:
        disk.wait_for("a", "b")
        assert [reads.take(), reads.take()] == ["A", "B"]
        assert sorted(disk.begun) == ["a", "b"]  # both are still in the caller's hands
        assert not reads.has_begun
        reads.done_with()
        disk.wait_for("c")
        assert reads.has_begun
        assert reads.take() == "C"
        reads.check_invariants()


def test_an_item_above_the_bound_is_read_alone() -> None:
    disk = Disk("small", "large", "last")
    items = [("small", 1), ("large", 100), ("last", 1)]
    with ReadAhead(disk.read, items, threads=3, nbytes=9) as reads:
        for result, begun in (("SMALL", ["small"]), ("LARGE", ["small", "large"])):
            assert reads.take() == result
            assert disk.begun == begun
            reads.done_with()
        assert reads.take() == "LAST"


def test_the_first_error_in_order_is_raised_and_the_rest_is_not_begun() -> None:
    disk = Disk("a", "bad 1", "bad 2")
    items = [("a", 1), ("bad 1", 1), ("bad 2", 1), ("never", 9)]

    def register_all() -> None:
        with ReadAhead(disk.read, items, threads=2, nbytes=9) as reads:
            for _ in items:
                reads.take()
                reads.done_with()

    with pytest.raises(ValueError, match="bad 1 is no adapter"):
        register_all()
    assert "never" not in disk.begun


def test_an_error_of_the_caller_waits_for_the_reads_under_way() -> None:
    disk, ended = Disk(), threading.Event()

    def read(name: str) -> str:
        found = disk.read(name)
        ended.set()
        return found

    def fail() -> None:
        with ReadAhead(read, [("a", 1), ("b", 9)], threads=2, nbytes=9):
            disk.wait_for("a")
            threading.Timer(0.05, disk.release, ["a"]).start()
            raise KeyError("kernels do not compile")

    with pytest.raises(KeyError, match="kernels"):
        fail()
    assert ended.is_set()
    assert disk.begun == ["a"]


def test_nothing_to_read_is_fine_and_taking_from_it_is_our_own_fault() -> None:
    with ReadAhead(str, [], threads=1, nbytes=1) as reads:
        reads.check_invariants()
        assert not reads.is_ready
        with pytest.raises(AssertionError, match="that nothing reads"):
            reads.take()
        with pytest.raises(AssertionError, match="nothing was taken"):
            reads.done_with()


def test_whether_a_result_is_there_is_told_without_waiting() -> None:
    disk = Disk("bad")
    with ReadAhead(disk.read, [("bad", 1), ("b", 1)], threads=2, nbytes=2) as reads:
        disk.wait_for("b")
        with pytest.raises(ValueError, match="bad is no adapter"):
            reads.take()
        assert reads.has_begun
        assert not reads.is_ready
        with pytest.raises(AssertionError, match="has not ended"):
            assert reads.error
        disk.release("b")
        assert reads.take() == "B"
        assert not reads.has_begun


def test_an_error_can_be_looked_at_before_it_is_raised() -> None:
    ended = threading.Event()

    def read(name: str) -> int:
        try:
            return int(name)
        finally:
            ended.set()

    with ReadAhead(read, [("x", 1)], threads=1, nbytes=9) as reads:
        assert ended.wait(SECONDS)
        with pytest.raises(ValueError, match="invalid literal"):
            reads.take()
    reads = ReadAhead(read, [("7", 1), ("x", 1)], threads=1, nbytes=9)
    assert reads.take() == 7
    reads._pool.shutdown(wait=True)  # both have ended
    assert isinstance(reads.error, ValueError)


def test_closing_drops_what_has_not_begun_for_good() -> None:
    disk = Disk("a", "b")
    reads = ReadAhead(disk.read, [("a", 1), ("b", 1)], threads=1, nbytes=1)
    assert reads.take() == "A"
    reads.close()
    reads.close()
    reads.done_with()
    assert disk.begun == ["a"]
    reads.check_invariants()


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 12), max_size=12),
    threads=st.integers(1, 4),
    nbytes=st.integers(1, 20),
)
def test_the_bound_holds_in_the_threads_too(sizes: list[int], threads: int, nbytes: int) -> None:
    lock, held = threading.Lock(), [0] * len(sizes)
    over: list[list[int]] = []

    def read(index: int) -> int:
        with lock:
            held[index] = sizes[index]
            if sum(held) > max(nbytes, *held):
                over.append(held.copy())
        return index

    with ReadAhead(read, list(enumerate(sizes)), threads=threads, nbytes=nbytes) as reads:
        for wanted in range(len(sizes)):
            index = reads.take()
            assert index == wanted
            reads.check_invariants()
            with lock:
                held[index] = 0
            reads.done_with()
    assert over == []

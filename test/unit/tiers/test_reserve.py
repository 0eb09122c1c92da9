"""Memory that threads have the system give: all of what is wanted, and no more of it stays."""

import psutil
import pytest

from sglang_graft.tiers import Reserve

SIZE = 192 << 20


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.mark.parametrize("threads", [1, 3, 64])
def test_all_that_is_wanted_is_there(threads: int) -> None:
    before = resident()
    reserve = Reserve(SIZE)
    reserve.employ(threads)
    rows = reserve.cut(SIZE)
    reserve.wait()
    assert resident() - before > 0.9 * SIZE
    assert len(rows) == SIZE
    assert reserve.seconds > 0
    reserve.stop()


def test_what_lies_behind_the_end_goes_back() -> None:
    before = resident()
    reserve = Reserve(SIZE)
    reserve.employ(2)
    rows = reserve.cut(5 << 20)
    reserve.employ(2)
    rows[-1] = 7
    reserve.wait()
    assert resident() - before < SIZE // 4
    assert len(rows) == 5 << 20
    assert rows.sum() in (0, 7)  # the write came before that of the threads, or behind it


def test_a_reserve_that_is_stopped_leaves_no_thread_at_work() -> None:
    before = resident()
    reserve = Reserve(64 * SIZE)
    reserve.employ(1)
    reserve.stop()
    assert all(job.done() for job in reserve._work)
    assert resident() - before < 32 * SIZE


def test_nobody_waits_for_memory_that_no_thread_touches() -> None:
    with pytest.raises(AssertionError, match="nobody works"):
        Reserve(4096).wait()


def test_more_than_there_can_be_is_refused_with_its_flag() -> None:
    for size in (1 << 60, 1 << 70):
        with pytest.raises(ValueError, match="--graft-host-memory-gb"):
            Reserve(size)

"""Few labels, and seldom others."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_graft.serving.adapter_labels import LEAST, OTHER, WINDOW_SECONDS, AdapterLabels


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def labels(most: int) -> tuple[AdapterLabels, Clock, list[str]]:
    clock, dropped = Clock(), list[str]()
    return AdapterLabels(most, dropped.append, clock), clock, dropped


def test_the_first_ones_have_labels_and_keep_them() -> None:
    found, clock, dropped = labels(2)
    assert [found.count(name) for name in "abca"] == ["a", "b", OTHER, "a"]
    clock.now = 10 * WINDOW_SECONDS
    assert found.count("c") == OTHER
    assert (found.names(), dropped) == (["a", "b"], [])


def test_a_much_busier_one_takes_the_label_of_the_least_busy() -> None:
    found, clock, dropped = labels(2)
    for name, count in (("a", 30), ("b", 12), ("c", 2 * LEAST), ("d", 2 * LEAST - 1)):
        for _ in range(count):
            found.count(name)
    assert found.label("c") == OTHER, "not before the window ends"
    clock.now = WINDOW_SECONDS
    assert found.count("c") == "c"
    assert (found.names(), dropped) == (["a", "c"], ["b"])
    assert found.label("d") == OTHER, "one exchange a window"


def test_a_little_busier_is_not_enough() -> None:
    found, clock, dropped = labels(1)
    for name, count in (("a", LEAST), ("b", 2 * LEAST - 1)):
        for _ in range(count):
            found.count(name)
    clock.now = WINDOW_SECONDS
    assert found.count("b") == OTHER
    assert dropped == []


def test_without_labels_all_are_others() -> None:
    found, clock, _ = labels(0)
    for _ in range(3):
        clock.now += WINDOW_SECONDS
        assert found.count("a") == OTHER


@given(st.integers(0, 4), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 200))))
def test_the_number_is_bounded_whatever_comes(most: int, calls: list[tuple[int, int]]) -> None:
    found, clock, dropped = labels(most)
    for name, seconds in calls:
        clock.now += seconds
        before = set(found.names())
        found.count(str(name))
        now = set(found.names())
        assert len(now) <= most
        assert len(before - now) <= 1
        assert before - now <= set(dropped)

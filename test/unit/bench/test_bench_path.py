"""Parts of a request's way, cut at marks that processes of a server leave."""

import asyncio
import importlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SERVING = Path(__file__).parents[3] / "benchmark" / "serving"
sys.path.insert(0, str(SERVING))

import bench_path  # noqa: E402
from bench_path import CLIENT, PARTS  # noqa: E402

MARKS_FOLDER = SERVING / "path_marks"


@pytest.fixture
def marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the marks, which writes below `tmp_path`."""
    monkeypatch.syspath_prepend(MARKS_FOLDER)
    monkeypatch.setenv("PATH_MARKS", "")  # no finder of its own in this process
    monkeypatch.delitem(sys.modules, "sitecustomize", raising=False)
    module = importlib.import_module("sitecustomize")
    monkeypatch.setattr(module, "FOLDER", str(tmp_path))
    yield module
    if module._file.cache_info().currsize:
        module._file().close()
    sys.modules.pop("sitecustomize", None)


def way(begin: float, step: float) -> list[tuple[float, str]]:
    return [(begin + step * (i + 1), mark) for i, mark in enumerate(PARTS.values())]


def test_each_part_ends_at_its_mark() -> None:
    marks = sorted(way(10.0, 0.001) + way(20.0, 0.002))
    count = len(PARTS)
    windows = [(10.0, 10.0 + 0.001 * (count + 1)), (20.0, 20.0 + 0.002 * count + 0.010)]
    parts = bench_path.parts_ms(marks, windows)
    for part in PARTS:
        assert parts[part] == pytest.approx([1.0, 2.0])
    assert parts[CLIENT] == pytest.approx([1.0, 10.0])


def test_later_marks_of_a_name_do_not_count() -> None:
    # A third batch, before the first result is sent.
    again = [(1.0 + 0.0092, "batch"), (1.0 + 0.0094, "forward")]
    parts = bench_path.parts_ms(sorted(way(1.0, 0.001) + again), [(1.0, 1.02)])
    for part in ("batch", "next batch", "next forward", "result"):
        assert parts[part] == pytest.approx([1.0])


def test_parts_of_a_step_that_is_launched_after_the_result_are_nothing() -> None:
    order = ["batch", "forward", "launched", "result", "batch", "detokenizer", "forward"]
    order = ["received", "tokenized", "scheduler", *order, "launched", "detokenized", "answer back"]
    marks = [(1.0 + 0.001 * (i + 1), mark) for i, mark in enumerate(order)]
    parts = bench_path.parts_ms(marks, [(1.0, 1.0 + 0.001 * (len(order) + 1))])
    for part in ("next batch", "next forward", "next launched"):
        assert parts[part] == [0.0]
    for part in ("launched", "result"):
        assert parts[part] == pytest.approx([1.0])
    assert parts["detokenizer"] == pytest.approx([2.0])
    assert parts["detokenized"] == pytest.approx([3.0])


def test_a_request_without_a_mark_is_an_error() -> None:
    marks = [row for row in way(1.0, 0.001) if row[1] != "detokenizer"]
    with pytest.raises(ValueError, match="no mark 'detokenizer' for"):
        bench_path.parts_ms(marks, [(1.0, 1.02)])
    with pytest.raises(ValueError, match="no mark 'answer back' for"):
        bench_path.parts_ms(way(1.0, 0.001), [(1.0, 1.0 + 0.001 * (len(PARTS) - 0.5))])


def test_marks_of_several_processes_are_in_order(tmp_path: Path) -> None:
    (tmp_path / "1").write_text("b\t2.0\nd\t4.0\n")
    (tmp_path / "2").write_text("a\t1.0\nc\t3.0\n")
    assert [name for _, name in bench_path.read_marks(tmp_path)] == list("abcd")


def test_the_table_has_what_graft_takes_more() -> None:
    sides = {
        side: {part: [ms, 3 * ms, 3 * ms] for part in ("whole", *PARTS, CLIENT)}
        for side, ms in (("off", 1.0), ("graft", 1.25))
    }
    rows = bench_path.table(sides).splitlines()
    assert rows[2] == "| whole | 3.000 | 3.750 | +0.750 | 1.800 | 2.250 | +0.450 |"
    assert len(rows) == 2 + 1 + len(PARTS) + 1


def test_functions_are_marked_at_start_and_end(marked: Any, tmp_path: Path) -> None:
    class Scheduler:
        def look(self, found: list[int]) -> int:
            return len(found)

    async def wait(x: int) -> int:
        await asyncio.sleep(0)
        return x

    async def stream(x: int) -> AsyncIterator[int]:
        for i in range(x):
            yield i

    module = ModuleType("watched")
    for function in (wait, stream):
        setattr(module, function.__name__, function)
    module.Scheduler = Scheduler  # type: ignore[attr-defined]
    marked.MARKED["watched"] = (
        ("Scheduler.look", "scheduler", ""),
        ("wait", "", "waited"),
        ("stream", "began", ""),
    )
    marked.wrap(module)

    async def all_of_it() -> list[int]:
        assert await module.wait(3) == 3
        return [i async for i in module.stream(2)]

    assert Scheduler().look([]) == 0  # an empty look is no mark
    assert Scheduler().look([1]) == 1
    assert asyncio.run(all_of_it()) == [0, 1]
    assert [name for _, name in bench_path.read_marks(tmp_path)] == ["scheduler", "waited", "began"]


def test_every_marked_function_is_wrapped_as_its_module_is_imported(
    tmp_path: Path, marked: Any
) -> None:
    """In a process that begins as a server's do; the functions of the pinned SGLang are there."""
    code = (
        "import sitecustomize as s, functools, importlib\n"
        "for name, rows in s.MARKED.items():\n"
        "    module = importlib.import_module(name)\n"
        "    for path, *_ in rows:\n"
        "        found = functools.reduce(getattr, path.split('.'), module)\n"
        "        print('wrapped', path, hasattr(found, '__wrapped__'))\n"
    )
    env = os.environ | {"PATH_MARKS": str(tmp_path), "PYTHONPATH": str(MARKS_FOLDER)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("wrapped")]
    targets = [row for found in marked.MARKED.values() for row in found]
    assert rows == [["wrapped", path, "True"] for path, _, _ in targets]
    assert {name for _, *names in targets for name in names} - {""} == set(PARTS.values())

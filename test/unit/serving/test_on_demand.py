"""Lazy loading and following over a store that only keeps books."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from sglang_graft.adapters.location import READ_FILES
from sglang_graft.serving import on_demand
from sglang_graft.serving.on_demand import OnDemand, RefusedError

SECONDS = 0.01


class Books:
    """A store: what each name serves is the text of its weights file."""

    def __init__(self) -> None:
        self.names: dict[str, tuple[str, str]] = {}
        self.calls: list[str] = []
        self.users: dict[str, int] = {}
        self.refuse: dict[str, str] = {}
        self.during_load: Callable[[], object] = lambda: None

    def loaded(self, name: str) -> str | None:
        return self.names[name][0] if name in self.names else None

    async def load(self, name: str, path: Path) -> str | None:
        self.calls.append(f"load {name}")
        assert name not in self.names
        await asyncio.sleep(SECONDS)
        if name in self.refuse:
            return self.refuse[name]
        self.names[name] = (f"id {len(self.calls)}", (path / READ_FILES[1]).read_text())
        self.during_load()
        return None

    async def unload(self, name: str) -> str | None:
        self.calls.append(f"unload {name}")
        del self.names[name]  # from here on a request that is not kept away would fail
        while self.users.get(name):
            await asyncio.sleep(SECONDS)
        return None

    async def replace(self, name: str, path: Path) -> str | None:
        return await self.unload(name) or await self.load(name, path)

    async def check(self, path: Path) -> str | None:
        await asyncio.sleep(0)
        text = (path / READ_FILES[1]).read_text()
        return "it says so" if text == "bad" else None


def write(folder: Path, weights: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / READ_FILES[1]).write_text(weights)
    (folder / READ_FILES[0]).write_text("{}")


Scenario = Callable[[OnDemand, Books], Awaitable[None]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "root/legal", "one")
    return tmp_path / "root"


@pytest.fixture
def play(root: Path) -> Callable[[Scenario], None]:
    """Runs a scenario over `root`."""

    def run(scenario: Scenario) -> None:
        async def whole() -> None:
            books = Books()
            folders = OnDemand([root], SECONDS, books)
            try:
                await asyncio.wait_for(scenario(folders, books), timeout=60)
            finally:
                await folders.stop()
            folders.catalog.check_invariants()

        asyncio.run(whole())

    return run


async def ask(folders: OnDemand, books: Books, name: str) -> str | None:
    """A request: what serves it, counted in while the name is held."""
    async with folders.hold([name]):
        if books.loaded(name) is None:
            return None
        await asyncio.sleep(0)
        served = books.names[name][1]
        books.users[name] = books.users.get(name, 0) + 1
    await asyncio.sleep(SECONDS / 2)
    books.users[name] -= 1
    return served


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(SECONDS)


def test_parallel_first_uses_load_once(play: Callable[[Scenario], None]) -> None:
    async def scenario(folders: OnDemand, books: Books) -> None:
        asked = [ask(folders, books, "legal") for _ in range(20)]
        assert await asyncio.gather(*asked) == ["one"] * 20
        assert books.calls == ["load legal"]

    play(scenario)


def test_a_client_that_leaves_does_not_stop_the_load(play: Callable[[Scenario], None]) -> None:
    async def scenario(folders: OnDemand, books: Books) -> None:
        first = asyncio.create_task(ask(folders, books, "legal"))
        await until(lambda: bool(books.calls))
        second = asyncio.create_task(ask(folders, books, "legal"))
        first.cancel()
        assert await second == "one"
        assert books.calls == ["load legal"]

    play(scenario)


@pytest.mark.parametrize("name", ["nobody", "../root/legal", ".x", "a b", "x:legal", "legal/"])
def test_names_without_a_folder_are_left_alone(play: Callable[[Scenario], None], name: str) -> None:
    async def scenario(folders: OnDemand, books: Books) -> None:
        assert await ask(folders, books, name) is None
        assert not await folders.exists(name)
        assert books.calls == []

    play(scenario)


def test_many_who_ask_for_nobody_share_one_look(
    play: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(folders: OnDemand, books: Books) -> None:
        looks = []
        original = on_demand.find

        def find(name: str, *rest: object) -> object:
            looks.append(name)
            return original(name, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(on_demand, "find", find)
        asked = [ask(folders, books, "nobody") for _ in range(50)]
        assert await asyncio.gather(*asked) == [None] * 50
        assert looks == ["nobody"]

    play(scenario)


def test_candidates_of_the_model_field(root: Path) -> None:
    folders = OnDemand([root], SECONDS, Books(), reserved={"base"})
    assert folders.candidate("team/legal") == "team/legal"
    assert folders.candidate("base:legal") == "legal"
    assert folders.candidate("base: legal ") == "legal"
    for model in ("base", "default", "", "a:b:c", "../x", "a b"):
        assert folders.candidate(model) is None
    assert OnDemand([], SECONDS, Books()).candidate("legal") is None


def test_without_roots_nothing_happens() -> None:
    async def scenario() -> None:
        folders = OnDemand([], SECONDS, Books())
        async with folders.hold(["legal", None]):
            assert asyncio.all_tasks() == {asyncio.current_task()}
        assert await folders.listed() == []

    asyncio.run(scenario())


def test_a_bad_folder_is_refused_and_not_listed(
    play: Callable[[Scenario], None], root: Path
) -> None:
    async def scenario(folders: OnDemand, books: Books) -> None:
        write(root / "worse", "bad")
        with pytest.raises(RefusedError, match="'worse' cannot be used: it says so") as caught:
            await ask(folders, books, "worse")
        assert caught.value.status_code == 400
        assert [folder.name for folder in await folders.listed()] == ["legal"]
        assert await folders.exists("worse")
        write(root / "worse", "good")
        assert await ask(folders, books, "worse") == "good"
        assert books.calls == ["load worse"]

    play(scenario)


def test_a_refusal_of_the_scheduler_is_kept_for_a_while(
    play: Callable[[Scenario], None], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(folders: OnDemand, books: Books) -> None:
        books.refuse["legal"] = "too large"
        for _ in range(3):
            with pytest.raises(RefusedError, match="too large"):
                await ask(folders, books, "legal")
        assert books.calls == ["load legal"]
        assert await folders.listed() == []
        monkeypatch.setattr(on_demand, "RETRY_SECONDS", 0.0)
        write(root / "legal", "smaller")  # another content is tried at once
        books.refuse["legal"] = "too large still"
        for _ in range(2):
            with pytest.raises(RefusedError, match="still"):
                await ask(folders, books, "legal")
        del books.refuse["legal"]
        assert await ask(folders, books, "legal") == "smaller"
        assert books.calls == ["load legal"] * 4

    play(scenario)


def test_a_folder_that_is_being_written_is_waited_for(
    play: Callable[[Scenario], None], root: Path
) -> None:
    async def scenario(folders: OnDemand, books: Books) -> None:
        folders.seconds = 30 * SECONDS
        write(root / "slow", "0")
        asked = asyncio.create_task(ask(folders, books, "slow"))
        for number in range(5):
            write(root / "slow", str(number))
            await asyncio.sleep(SECONDS)
        assert await asked == "4"

    play(scenario)


def test_a_folder_that_never_rests_is_told_so(play: Callable[[Scenario], None], root: Path) -> None:
    async def scenario(folders: OnDemand, books: Books) -> None:
        async def write_on() -> None:
            for number in range(10**6):
                write(root / "restless", str(number))
                await asyncio.sleep(0)

        writer = asyncio.create_task(write_on())
        with pytest.raises(RefusedError, match="still being written") as caught:
            await ask(folders, books, "restless")
        writer.cancel()
        assert caught.value.status_code == 503
        assert books.calls == []

    play(scenario)


def test_what_changes_while_it_is_read_is_not_kept(
    play: Callable[[Scenario], None], root: Path
) -> None:
    async def scenario(folders: OnDemand, books: Books) -> None:
        books.during_load = lambda: write(root / "legal", "two")
        with pytest.raises(RefusedError, match="changed while it was read") as caught:
            await ask(folders, books, "legal")
        assert caught.value.status_code == 503
        assert books.names == {}
        books.during_load = lambda: None
        assert await ask(folders, books, "legal") == "two"

    play(scenario)


def test_changed_content_replaces_and_no_request_falls_between(
    play: Callable[[Scenario], None], root: Path
) -> None:
    async def scenario(folders: OnDemand, books: Books) -> None:
        assert await ask(folders, books, "legal") == "one"
        served = []

        async def client() -> None:
            while not served or served[-1] != "two":
                served.append(await ask(folders, books, "legal"))

        clients = [asyncio.create_task(client()) for _ in range(4)]
        write(root / "legal", "two")
        await asyncio.gather(*clients)
        assert set(served) == {"one", "two"}
        assert books.calls == ["load legal", "unload legal", "load legal"]

    play(scenario)


def test_a_change_for_the_worse_unloads(play: Callable[[Scenario], None], root: Path) -> None:
    async def scenario(folders: OnDemand, books: Books) -> None:
        assert await ask(folders, books, "legal") == "one"
        write(root / "legal", "bad")
        await until(lambda: books.names == {})
        with pytest.raises(RefusedError, match="it says so"):
            await ask(folders, books, "legal")
        write(root / "legal", "three")
        assert await ask(folders, books, "legal") == "three"

    play(scenario)


def test_a_removed_folder_is_unloaded_and_a_new_one_listed(
    play: Callable[[Scenario], None], root: Path
) -> None:
    async def names(folders: OnDemand) -> list[str]:
        return [folder.name for folder in await folders.listed()]

    async def scenario(folders: OnDemand, books: Books) -> None:
        assert await names(folders) == ["legal"]
        assert await ask(folders, books, "legal") == "one"
        assert await names(folders) == []  # the store lists what is loaded
        shutil.rmtree(root / "legal")
        await until(lambda: books.names == {})
        assert await ask(folders, books, "legal") is None
        write(root / "team/sales", "x")
        while await names(folders) != ["team/sales"]:
            await asyncio.sleep(SECONDS)

    play(scenario)


def test_a_root_that_vanishes_unloads_nothing(
    play: Callable[[Scenario], None], root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(folders: OnDemand, books: Books) -> None:
        assert await ask(folders, books, "legal") == "one"
        root.rename(root.with_name("moved"))
        await until(lambda: caplog.text.count("cannot be read") >= 3)
        assert books.names
        root.with_name("moved").rename(root)
        await folders.look()
        assert await ask(folders, books, "legal") == "one"
        assert books.calls == ["load legal"]

    play(scenario)


def test_a_name_that_someone_else_loaded_is_not_ours(
    play: Callable[[Scenario], None], root: Path
) -> None:
    async def scenario(folders: OnDemand, books: Books) -> None:
        books.names["legal"] = ("by hand", "other")
        assert await ask(folders, books, "legal") == "other"
        write(root / "legal", "two")
        for _ in range(3):
            await folders.look()
        assert books.calls == []
        assert await folders.listed() == []

    play(scenario)


def test_an_unload_by_hand_lasts_until_the_next_use(play: Callable[[Scenario], None]) -> None:
    async def scenario(folders: OnDemand, books: Books) -> None:
        assert await ask(folders, books, "legal") == "one"
        await books.unload("legal")
        for _ in range(3):
            await folders.look()
        assert [folder.name for folder in await folders.listed()] == ["legal"]
        assert await ask(folders, books, "legal") == "one"
        assert books.calls == ["load legal", "unload legal", "load legal"]

    play(scenario)


def test_several_names_are_held_together(play: Callable[[Scenario], None], root: Path) -> None:
    async def scenario(folders: OnDemand, books: Books) -> None:
        write(root / "sales", "s")
        async with folders.hold(["sales", None, "legal", "sales", "nobody"]):
            assert set(books.names) == {"legal", "sales"}
            write(root / "legal", "two")
            for _ in range(4):
                await folders.look()
                await asyncio.sleep(SECONDS)
            assert books.names["legal"][1] == "one"
        await until(lambda: books.names.get("legal", ("", ""))[1] == "two")

    play(scenario)

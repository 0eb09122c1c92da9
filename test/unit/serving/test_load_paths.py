"""What reaches SGLang's load when a client, or the operator's own program, asks for it."""

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_graft import config
from sglang_graft.adapters.location import READ_FILES
from sglang_graft.serving.load_paths import checked, refuse_tensors

CLIENT = object()


class Manager:
    """The parts of SGLang's tokenizer manager that a load touches."""

    served_model_name = "base"
    server_args = SimpleNamespace(model_path="models/base")

    def __init__(self) -> None:
        self.read: list[str] = []
        self.unloaded: list[str] = []
        self.touch: Path | None = None

    async def original(self, obj: Any) -> Any:
        self.read.append(obj.lora_path)
        if self.touch is not None:
            self.touch.write_text("changed")
        return SimpleNamespace(success=True, error_message=None)

    async def unload_lora_adapter(self, obj: Any) -> None:
        self.unloaded.append(obj.lora_name)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub name that were looked up would end the test."""

    def connect(*_: object) -> None:
        raise AssertionError("something asks the network")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("root/legal", "outside"):
        (tmp_path / folder).mkdir(parents=True)
        for name in READ_FILES[:2]:
            (tmp_path / folder / name).write_text("x")
    (tmp_path / "root/out").symlink_to(tmp_path / "outside")
    (tmp_path / "root/alias").symlink_to("legal")
    return tmp_path / "root"


@pytest.fixture
def with_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = config.GraftConfig(enable=True, adapter_root=str(root))
    monkeypatch.setenv(config.CONFIG_ENV, options.model_dump_json())


def ask(manager: Manager, path: object, name: str = "x", request: object = CLIENT) -> Any:
    obj = SimpleNamespace(lora_name=name, lora_path=str(path))
    return asyncio.run(checked(manager.original, manager, obj, request))


@pytest.mark.usefixtures("with_root")
def test_C74_clients_load_below_the_root_and_what_was_checked_is_read(root: Path) -> None:
    manager = Manager()
    assert ask(manager, root / "legal").success
    assert ask(manager, root / "alias").success
    assert manager.read == [str(root.resolve() / "legal")] * 2


@pytest.mark.usefixtures("with_root")
@pytest.mark.parametrize(
    "path", ["ROOT/../outside", "ROOT/out", "/etc", "file:///etc", "org/hub-name", "", "ROOT\0"]
)
def test_C74_clients_load_nothing_else(root: Path, path: str) -> None:
    manager = Manager()
    result = ask(manager, path.replace("ROOT", str(root)))
    assert not result.success
    assert "path" in result.error_message
    assert manager.read == []


@pytest.mark.usefixtures("with_root")
def test_C74_a_file_that_leads_out_refuses_its_folder(root: Path) -> None:
    (root / "legal" / READ_FILES[1]).unlink()
    (root / "legal" / READ_FILES[1]).symlink_to(root.parent / "outside" / READ_FILES[1])
    manager = Manager()
    assert "by a link" in ask(manager, root / "legal").error_message
    assert manager.read == []


@pytest.mark.usefixtures("with_root")
def test_the_operators_own_program_is_not_fenced_in(root: Path) -> None:
    manager = Manager()
    assert ask(manager, root.parent / "outside", request=None).success
    assert manager.read == [str(root.parent / "outside")]


def test_without_a_root_any_folder_but_nothing_else(root: Path) -> None:
    manager = Manager()
    assert ask(manager, root.parent / "outside").success
    for path in ("org/hub-name", "https://example.com/a", "", f"{root}\0", root / "nobody"):
        assert "nothing is fetched" in ask(manager, path).error_message
    assert manager.read == [str(root.parent / "outside")]


@pytest.mark.parametrize("name", ["", "base", "models/base", "default", "a\nb", " a", "a" * 129])
def test_names_that_mean_something_else(root: Path, name: str) -> None:
    manager = Manager()
    assert ask(manager, root / "legal", name).error_message.startswith("lora_name: ")
    assert manager.read == []


@pytest.mark.usefixtures("with_root")
def test_what_changed_while_it_was_read_is_unloaded(root: Path) -> None:
    manager = Manager()
    manager.touch = root / "legal" / READ_FILES[1]
    result = ask(manager, root / "legal")
    assert not result.success
    assert "changed while it was read" in result.error_message
    assert manager.unloaded == ["x"]


def test_C73_tensors_never_reach_the_scheduler() -> None:
    def original(*_: object) -> None:
        raise AssertionError("it would unpickle them")

    obj = SimpleNamespace(lora_name="x", serialized_named_tensors=["anything"])
    result = asyncio.run(refuse_tensors(original, Manager(), obj, CLIENT))
    assert not result.success
    assert "loading from tensors is not supported" in result.error_message

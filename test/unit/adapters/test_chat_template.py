"""Where an adapter folder has its chat template."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from sglang_graft.adapters import AdapterError
from sglang_graft.adapters.chat_template import (
    LARGEST,
    TEMPLATE_NAME,
    TOKENIZER_NAME,
    read_chat_template,
)
from sglang_graft.adapters.location import READ_FILES

TEXT = "{{ messages[0].content }} \N{GREEK SMALL LETTER PI}"


def in_config(folder: Path, value: Any) -> Path:
    (folder / TOKENIZER_NAME).write_text(json.dumps({"chat_template": value, "bos_token": "x"}))
    return folder


def test_a_folder_without_one(tmp_path: Path) -> None:
    assert read_chat_template(tmp_path) is None
    (tmp_path / TOKENIZER_NAME).write_text('{"bos_token": "x"}')
    assert read_chat_template(tmp_path) is None
    assert read_chat_template(in_config(tmp_path, None)) is None


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (TEXT, {"default": TEXT}),
        ({"default": TEXT, "tool_use": "t"}, {"default": TEXT, "tool_use": "t"}),
        (
            [{"name": "default", "template": TEXT}, {"name": "rag", "template": "r"}],
            {"default": TEXT, "rag": "r"},
        ),
    ],
)
def test_of_the_tokenizers_config(tmp_path: Path, value: Any, wanted: dict[str, str]) -> None:
    found = read_chat_template(in_config(tmp_path, value))
    assert found == (tmp_path / TOKENIZER_NAME, wanted)


def test_a_file_of_its_own_wins(tmp_path: Path) -> None:
    in_config(tmp_path, "old")
    (tmp_path / TEMPLATE_NAME).write_text(TEXT, encoding="utf-8")
    assert read_chat_template(tmp_path) == (tmp_path / TEMPLATE_NAME, {"default": TEXT})


@pytest.mark.parametrize(
    "value", [3, True, [], {}, ["x"], {"tool_use": "t"}, {"default": 3}, [{"name": "default"}]]
)
def test_what_is_no_template_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(AdapterError, match="chat_template"):
        read_chat_template(in_config(tmp_path, value))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x" * (LARGEST + 1)])
def test_files_that_are_no_text_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / TEMPLATE_NAME).write_bytes(content)
    with pytest.raises(AdapterError, match=TEMPLATE_NAME):
        read_chat_template(tmp_path)


def test_pipes_and_links_to_nothing_are_refused(tmp_path: Path) -> None:
    for name in (TEMPLATE_NAME, TOKENIZER_NAME):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).symlink_to("gone")
        with pytest.raises(AdapterError, match="cannot be read"):
            read_chat_template(folder)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(AdapterError, match="not a regular file"):
            read_chat_template(folder)


def test_both_files_are_watched_and_fenced_in() -> None:
    assert {TEMPLATE_NAME, TOKENIZER_NAME} <= set(READ_FILES)

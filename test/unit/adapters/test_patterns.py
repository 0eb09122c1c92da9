"""Expressions of a config run in bounded time or not at all."""

import re
import time
from collections import deque
from pathlib import Path

import helpers_peft as hp
import pytest

from sglang_graft.adapters import AdapterError, read_adapter
from sglang_graft.adapters.patterns import PatternReader

# What trainers really write; the first has the shape of those for vision models.
USUAL = [
    r"(?:.*?(?:vision|image|language|text).*?(?:self_attn|attention|attn|mlp|ffn|dense).*?"
    r"(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj|v_proj)))",
    r".*self_attn\.[qv]_proj$",
    r"^(?!.*vision)(?!.*mm).*(q|k|v|o)_proj$",
    r"model\.layers\.([0-9]|1[0-9])\.mlp\.(up|down)_proj",
    r"(?P<a>.)\w*(?P=a)",
    "(?:ab){3}",
    ".*.*.*.*x",
]
COSTLY = [
    "(.*)*x",
    "((.*)*)*x",
    "(a|a)*b",
    "(?:a?){30}b",
    "(?x) ( a+ ) + b",
    "(?#[)(a+)+(?#])",
    "(?:m|(?=m)m|m)" * 20,
    "(?=(.*)*x)y",
    "(?>(.*)*x)",
    "(a)?(?(1)(.*)*x|y)",
    "(?:){1000000000}",
    "(?:.*)*+x",
    ".*.*.*.*.*x",
    "x" * 1_000_000,
]
BROKEN = ["(" * 5000 + ")" * 5000, "a{99999999999999999999}", "[z-a]", "q_proj("]


def compiled(text: str) -> re.Pattern[str]:
    return PatternReader(Path("config")).compile("key", text)


@pytest.mark.parametrize("text", USUAL)
def test_usual_expressions_are_taken(text: str) -> None:
    assert compiled(text).pattern == text


@pytest.mark.parametrize("text", COSTLY, ids=range(len(COSTLY)))
def test_costly_expressions_are_refused_without_running(text: str) -> None:
    with pytest.raises(AdapterError, match=r"key: .* could take too long to match"):
        compiled(text)


def test_a_plain_text_is_set_into_its_surroundings() -> None:
    assert PatternReader(Path("config")).compile("key", "a{}", "<({})>").pattern == "<(a{})>"


def test_the_patterns_of_one_config_share_a_budget() -> None:
    reader = PatternReader(Path("config"))
    for number in range(5000):
        reader.compile("key", str(number))
    with pytest.raises(AdapterError, match="use fewer patterns"):
        deque(reader.compile("key", str(number)) for number in range(5000))


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern", "target_modules"])
def test_broken_expressions_are_refused(key: str, text: str, tmp_path: Path) -> None:
    hp.save_adapter(tmp_path)
    hp.edit_config(tmp_path, **{key: text if key == "target_modules" else {text: 2}})
    with pytest.raises(AdapterError, match=f"{key}.* is not a regular expression"):
        read_adapter(tmp_path, hp.tiny_spec())


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern", "target_modules"])
def test_a_hostile_config_is_refused_at_once(key: str, tmp_path: Path) -> None:
    hp.save_adapter(tmp_path)
    hp.edit_config(tmp_path, **{key: "(.*)*x" if key == "target_modules" else {"(.*)*x": 2}})
    start = time.monotonic()
    with pytest.raises(AdapterError, match="could take too long"):
        read_adapter(tmp_path, hp.tiny_spec())
    assert time.monotonic() - start < 10


def test_many_targets_make_few_warnings(tmp_path: Path) -> None:
    hp.save_adapter(tmp_path)
    hp.edit_config(tmp_path, target_modules=["q_proj", "v_proj", *map(str, range(100_000))])
    warnings = read_adapter(tmp_path, hp.tiny_spec()).warnings
    assert len(warnings) == 17
    assert warnings[-1] == "target_modules: 99984 more match no tensor"

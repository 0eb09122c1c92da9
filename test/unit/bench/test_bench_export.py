"""Files for `sglang.bench_serving`, read by its own reader."""

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_graft.bench.export import export, lines
from sglang_graft.bench.make_model import make_model
from sglang_graft.bench.units import Load

LOAD = Load(name="chat", rate=4.0, seconds=3.0, adapters=4)


class Words:
    """A tokenizer as far as the reader uses one."""

    def apply_chat_template(self, messages: list[dict[str, str]], **more: Any) -> list[int]:
        return [int(word) for m in messages for word in m["content"].split()]


def decode(tokens: list[int]) -> str:
    return " ".join(map(str, tokens))


def test_bench_serving_reads_prompts_lengths_and_adapters(tmp_path: Path) -> None:
    from sglang.benchmark.datasets.openai_dataset import sample_openai_requests

    workload = LOAD.workload()
    path = tmp_path / "chat.jsonl"
    found = lines(workload, decode, 40_000)
    path.write_text("\n".join(json.dumps(line) for line in found))
    read = sample_openai_requests(str(path), 0, Words())  # type: ignore[arg-type]
    assert len(read) == len(workload.requests)
    wanted = sorted((r.arrival_s, i) for i, r in enumerate(workload.requests))
    for row, (_, index) in zip(read, wanted, strict=True):
        request = workload.requests[index]
        assert row.prompt_len == request.prompt_tokens
        assert row.output_len == 64
        assert row.extra_request_body is not None
        name = workload.adapters[request.adapter].name
        assert row.extra_request_body["lora_path"] == name
        roles = [message["role"] for message in row.prompt]
        assert roles[:2] == ["system", "user"]
        assert set(roles[3::2]) <= {"user"}
        assert set(roles[2::2]) <= {"assistant"}


@pytest.mark.parametrize("name", ["uniform-cold", "swing", "agents"])
def test_other_workloads_have_their_roles(name: str) -> None:
    workload = Load(name=name, rate=None, seconds=65.0).workload()
    for line in lines(workload, decode, 40_000):
        roles = [message["role"] for message in line["messages"]]
        assert roles[-1] == "user"
        assert ("system" in roles) == (name == "agents" or len(roles) in (2, 4))


def test_the_command_names_the_file_and_the_rate(tmp_path: Path) -> None:
    model = make_model("tiny", tmp_path / "model")
    command = export(LOAD, model, tmp_path / "out")
    count = len(LOAD.workload().requests)
    assert f"--dataset-path {tmp_path / 'out' / 'chat.jsonl'}" in command
    assert f"--num-prompts {count} --request-rate" in command
    first = json.loads((tmp_path / "out" / "chat.jsonl").read_text().splitlines()[0])
    assert len(first["messages"][0]["content"].split()) == 512
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((model / "config.json").read_text())
    with pytest.raises(ValueError, match="tokenizer"):
        export(LOAD, tmp_path / "bare", tmp_path / "out")

"""benchmark/serving/bench_soak.py, short, on the CPU: all its parts against a real server."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_graft.bench import gate
from sglang_graft.bench.make_model import make_model
from sglang_graft.bench.soak_actors import Controller
from sglang_graft.bench.soak_doubts import MOST_KEPT

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark" / "serving"))

import bench_soak

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("tiny", tmp_path_factory.mktemp("model"))


def soak(monkeypatch: pytest.MonkeyPatch, model: Path, folder: Path, *more: str) -> int:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    line = ["--model", str(model), "--json", str(folder / "out.json"), "--device", "cpu"]
    line += ["--work-dir", str(folder / "work"), "--adapters", "8", "--rate-scale", "0.5"]
    monkeypatch.setattr(sys, "argv", ["bench_soak.py", *line, *more])
    return bench_soak.main()


def doubt_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right answers are doubted, so that all of them are judged at the end."""
    check = Controller.check

    def checked(self: Controller, what: str, origin: str, row: gate.Row) -> None:
        check(self, what, origin, row)
        if len(self.doubts.kept) < MOST_KEPT:  # more are never judged
            self.doubts.add("doubted", origin, self.truth[origin], row)

    monkeypatch.setattr(Controller, "check", checked)


def test_a_short_soak(monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path) -> None:
    doubt_all(monkeypatch)
    more = ("--budget-gb", "0.03", "--workloads", "chat,agents", "--seconds", "15", "--strict")
    assert soak(monkeypatch, model, tmp_path, *more) == 0
    text = (tmp_path / "out.json").read_text()
    assert str(tmp_path) not in text
    found: dict[str, Any] = json.loads(text)
    assert (found["partial"], found["problems"], found["problems_number"]) == (False, [], 0)
    requests, done, canaries = found["requests"], found["done"], found["canaries"]
    assert requests["completed"] > 0
    assert requests["failed"] == 0
    assert done["load"] > 0
    assert done["loaded answers equal"] > 0
    assert all(d["gap"] < gate.TOLERANCE["float32"] for d in found["doubtful"])
    assert len(found["doubtful"]) > 0
    assert done.get("leave", 0) + done.get("abort", 0) > 0
    # Of the base model and three ranks; before, amid and after the traffic.
    assert canaries["questions"] == 12
    assert canaries["agree"] == canaries["rounds"] >= 5
    assert found["moved"]["bytes_to_device"] > 0
    assert found["memory"]["scheduler"]["end_mib"] > 0
    assert "gpu" not in found["memory"]
    assert set(found["drift"]) == {"all", "chat", "agents"}
    assert found["left"]["end"]["pages"] == found["left"]["start"]["pages"]
    assert "--graft-check" in found["command"]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (("--workloads", "chat,nothing"), "got ['nothing']"),
        (("--workloads", "chat,chat"), "each once"),
        (("--workloads", "agents", "--budget-gb", "0.001"), "--budget-gb"),
    ],
)
def test_what_cannot_be_soaked(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: Path,
    tmp_path: Path,
    more: tuple[str, ...],
    text: str,
) -> None:
    with pytest.raises(SystemExit) as ended:
        soak(monkeypatch, model, tmp_path, *more)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err

"""Runs against fake servers: what is measured is kept, and is not measured again."""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from typing import Any, cast

import helpers_bench
import httpx
import pytest
from helpers_bench import FakeServer, save_config

from sglang_graft.bench import run
from sglang_graft.bench.budget import Split
from sglang_graft.bench.peers import parse_peers
from sglang_graft.bench.play import Record
from sglang_graft.bench.process import Launched
from sglang_graft.bench.report import report
from sglang_graft.bench.run import Bench, Plan
from sglang_graft.bench.server import (
    Running,
    ServerError,
    Settings,
    Start,
    command,
    environment,
)
from sglang_graft.bench.shape import ModelShape
from sglang_graft.bench.units import Load, Results, Unit

BUDGET_GB = 1e-3


class Quiet:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.ended = 0

    def say(self, text: str) -> None:
        self.lines.append(text)

    def requests(self, done: int, planned: int, last: Record) -> None:
        self.ended += 1


class FakeLaunched(Launched):
    """Notes what is done to it."""

    def __init__(self, events: list[tuple[str, ...]], label: str, own: ExitStack) -> None:
        super().__init__(cast(Popen[bytes], None))
        self._events, self._label, self._own = events, label, own

    def pause(self) -> None:
        self._events.append(("pause", self._label))

    def resume(self) -> None:
        self._events.append(("resume", self._label))

    def end(self) -> None:
        self._events.append(("stop", self._label))
        self._own.close()


class Farm:
    """Starts fake servers in place of real ones. `broken`: labels of peers that do not start;
    `events`: every start and end, in order."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.adapters: list[Mapping[str, Path]] = []
        self.broken: set[str] = set()
        self.more: dict[str, Any] = {}
        self.servers: list[FakeServer] = []
        self.events: list[tuple[str, ...]] = []

    @contextmanager
    def serving(
        self, starts: Sequence[Start], settings: Settings
    ) -> Iterator[list[Running | ServerError]]:
        self.events.append(("start", *(start.peer.label for start in starts)))
        with ExitStack() as stack:
            yield [self._one(stack, start, settings) for start in starts]
        self.events.append(("end",))

    def _one(self, stack: ExitStack, start: Start, settings: Settings) -> Running | ServerError:
        self.started.append(start.peer.label)
        self.adapters.append(start.adapters)
        if start.peer.label in self.broken:
            return ServerError("the server ended\nout of memory")
        kv = {"kv_tokens": start.split.kv_tokens, "pages": start.split.budget_bytes // 1024}
        server = FakeServer(**kv | self.more)
        self.servers.append(server)
        own = ExitStack()
        own.enter_context(helpers_bench.serving(server))
        stack.callback(own.close)

        line = command(start.peer, start.split, start.adapters, settings, 1)
        launched = FakeLaunched(self.events, start.peer.label, own)
        return Running(server.url, 0.1, tuple(line), launched)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_config(tmp_path / "model")


@pytest.fixture
def shape(model: Path) -> ModelShape:
    return ModelShape.read(model, "cpu")


@pytest.fixture
def farm(monkeypatch: pytest.MonkeyPatch) -> Farm:
    found = Farm()
    monkeypatch.setattr(run, "serving", found.serving)
    return found


def plan(*peers: str, **more: Any) -> Plan:
    load = Load(name="uniform-cold", rate=80.0, seconds=0.2, adapters=3, most=4)
    given: dict[str, Any] = {
        "peers": parse_peers(peers),
        "loads": [load, replace(load, rate=120.0)],
        "budgets_gb": [BUDGET_GB],
        "drain_s": 20.0,
        "sample_s": 0.05,
    }
    return Plan(**given | more)


def bench(
    what: Plan | list[Plan],
    model: Path,
    shape: ModelShape,
    out: Path,
    *,
    start_limit_s: float = 60.0,
    **more: Any,
) -> tuple[int, Quiet]:
    quiet = Quiet()
    plans = what if isinstance(what, list) else [what]
    settings = Settings(model=model, shape=shape, device="cpu", start_limit_s=start_limit_s)
    about = {"machine": "CPU, 0 cores", "versions": {"torch": "0"}, "model": "tiny", "dtype": "f"}
    results, work = Results(out / "results"), out / "work"
    left = Bench(plans, results, settings, work, about, quiet, **more).run()
    return left, quiet


def test_one_server_a_peer_and_one_file_a_unit(
    farm: Farm, model: Path, shape: ModelShape, tmp_path: Path
) -> None:
    what = plan("graft:cost", "stock:2", "base")
    left, quiet = bench(what, model, shape, tmp_path)
    assert left == 0
    assert farm.started == ["graft:cost", "stock:2", "base"]
    found = {
        (r["unit"]["peer"]["label"], r["unit"]["load"]["rate"]): r
        for r in Results(tmp_path / "results").read_some()
    }
    assert len(found) == 6
    for (label, _), result in found.items():
        assert result["status"] == "measured"
        assert result["figures"]["completed"] == result["figures"]["planned"] == 4
        assert len(result["records"]["ttft_s"]) == 4
        assert len(result["samples"]["at_s"]) >= 2
        assert result["warm"]["decode_s_per_token_alone"] > 0
        text = json.dumps(result)
        assert str(tmp_path) not in text
        assert ("adapter-0" in text) or label == "base"
    assert found["graft:cost", 80.0]["moved"]["invalid_kv_share"]["mean"] == 0
    before, after = found["graft:cost", 80.0]["host_before_and_after"]
    assert before["pages"]["total"] == after["pages"]["total"] > 0
    assert found["base", 80.0]["host_before_and_after"] == [None, None]
    assert found["stock:2", 80.0]["moved"]["invalid_kv_share"]["mean"] == pytest.approx(
        0.25, abs=0.01
    )
    assert quiet.ended == 24
    names = [{body.get("lora_path") for body in server.bodies} for server in farm.servers]
    assert names[2] == {None}
    assert names[0] >= {"adapter-0", "adapter-1", "adapter-2"}
    assert all(server.flushed >= 4 for server in farm.servers)


def test_servers_start_together_and_are_measured_one_by_one(
    farm: Farm, model: Path, shape: ModelShape, tmp_path: Path
) -> None:
    what = plan("graft:cost", "stock:500", "stock:2", "base")
    left, _ = bench(what, model, shape, tmp_path, start_together=2)
    assert left == 0
    assert farm.events == [  # what the budget cannot hold is not started, and takes no place
        ("start", "graft:cost", "stock:2"),
        ("pause", "graft:cost"),
        ("pause", "stock:2"),
        ("resume", "graft:cost"),
        ("stop", "graft:cost"),
        ("resume", "stock:2"),
        ("stop", "stock:2"),
        ("end",),
        ("start", "base"),
        ("pause", "base"),
        ("resume", "base"),
        ("stop", "base"),
        ("end",),
    ]
    found = {
        r["unit"]["peer"]["label"]: (r["started_together"], r["beside"])
        for r in Results(tmp_path / "results").read_some()
        if r["status"] == "measured"
    }
    assert found == {"graft:cost": (2, 1), "stock:2": (2, 0), "base": (1, 0)}
    text = report(tmp_path / "results")
    assert "left out): graft:cost, 1 paused; stock:2, 0 paused." in text
    assert "\n| graft:cost | - |" in text
    assert "\n| base | 0 |" in text


def test_plans_whose_servers_start_together(
    farm: Farm, model: Path, shape: ModelShape, tmp_path: Path
) -> None:
    first, other = (
        plan("graft:cost", "stock:2"),
        plan("stock:2", "base", budgets_gb=[2 * BUDGET_GB]),
    )
    again = replace(first, peers=first.peers[1:])  # asked for twice, measured once
    left, quiet = bench([first, other, again], model, shape, tmp_path, start_together=None)
    assert left == 0
    assert quiet.lines[0] == "0 of 8 units are there, 8 to go"
    assert farm.events[0] == ("start", "graft:cost", "stock:2", "stock:2", "base")
    assert len(farm.started) == 4
    found = list(Results(tmp_path / "results").read_some())
    assert {r["status"] for r in found} == {"measured"}
    assert {r["started_together"] for r in found} == {4}
    beside = {(r["unit"]["peer"]["label"], r["unit"]["budget_gb"]): r["beside"] for r in found}
    assert list(beside.values()).count(0) == 1
    assert beside["base", 2 * BUDGET_GB] == 0


def test_of_servers_that_start_together_one_that_does_not_fails_alone(
    farm: Farm, model: Path, shape: ModelShape, tmp_path: Path
) -> None:
    farm.broken = {"stock:2"}
    what = plan("graft:cost", "stock:2", "base")
    left, _ = bench(what, model, shape, tmp_path, start_together=3)
    assert left == 0
    found = {
        (r["unit"]["peer"]["label"], r["status"], r["started_together"], r.get("beside"))
        for r in Results(tmp_path / "results").read_some()
    }
    assert found == {
        ("graft:cost", "measured", 3, 1),
        ("stock:2", "failed", 3, 1),
        ("base", "measured", 3, 0),
    }


def test_a_run_that_is_ended_ends_every_server(
    farm: Farm, model: Path, shape: ModelShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def told(self: Any, client: Any, unit: Any) -> None:
        raise SystemExit(143)

    monkeypatch.setattr(run._Side, "_unit", told)
    what = plan("graft:cost", "base")
    with pytest.raises(SystemExit):
        bench(what, model, shape, tmp_path, start_together=2)
    assert len(farm.servers) == 2
    for server in farm.servers:
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url)
    assert not list(Results(tmp_path / "results").read_all())


def test_time_is_needed_for_one_start_of_all_and_for_each_warm_up(
    farm: Farm, model: Path, shape: ModelShape, tmp_path: Path
) -> None:
    one = plan("graft:cost")
    bench(replace(one, loads=one.loads[:1]), model, shape, tmp_path, start_together=2)
    (known,) = Results(tmp_path / "results").read_all()
    known["start_s"], known["warm"]["seconds"] = 200.0, 50.0
    slow = known | {"started_together": 2, "start_s": 400.0}
    for label, result in (("stock:3", known), ("stock:4", slow)):
        unit = next(plan(label).units())
        Results(tmp_path / "results").write(unit, {**result, "unit": unit.describe()})
    Results(tmp_path / "results").path(next(one.units())).unlink()
    # 20 s of drain, 0.2 s of load, 2 x 50 s of warm-up, and 200 or 400 s of start.
    for together, needed in ((1, 321), (2, 521)):
        for limit, starts in ((needed - 2, False), (needed, True)):
            before = len(farm.events)
            what, how = plan("base", "stock:2"), {"start_together": together}
            bench(what, model, shape, tmp_path, **how, stop_after_s=limit)
            assert (len(farm.events) > before) is starts, (together, limit)
            for unit in what.units():
                Results(tmp_path / "results").path(unit).unlink(missing_ok=True)


def test_what_was_measured_is_not_measured_again(
    farm: Farm, model: Path, shape: ModelShape, tmp_path: Path
) -> None:
    first = plan("stock:2")
    bench(replace(first, loads=first.loads[:1]), model, shape, tmp_path)
    before = {r["unit"]["key"]: r for r in Results(tmp_path / "results").read_some()}
    left, quiet = bench(first, model, shape, tmp_path)
    assert left == 0
    assert quiet.lines[0] == "1 of 2 units are there, 1 to go"
    after = {r["unit"]["key"]: r for r in Results(tmp_path / "results").read_some()}
    assert len(after) == 2
    assert after.items() >= before.items()
    bench(first, model, shape, tmp_path)
    assert farm.started == ["stock:2", "stock:2"]


def test_no_unit_begins_that_could_run_past_the_end(
    farm: Farm, model: Path, shape: ModelShape, tmp_path: Path
) -> None:
    left, quiet = bench(plan("stock:2"), model, shape, tmp_path, stop_after_s=5.0)
    assert left == 2
    assert farm.started == []
    assert "no time for" in quiet.lines[-1]
    text = report_with_one_more(farm, model, shape, tmp_path)
    assert "**missing**" in text
    assert "1 of 1 units" in text


def report_with_one_more(farm: Farm, model: Path, shape: ModelShape, out: Path) -> str:
    one = plan("stock:2")
    bench(replace(one, loads=one.loads[:1]), model, shape, out)
    return report(out / "results")


def test_a_budget_that_is_too_small_is_a_result(
    farm: Farm, model: Path, shape: ModelShape, tmp_path: Path
) -> None:
    left, _ = bench(plan("stock:500"), model, shape, tmp_path)
    assert left == 0
    assert farm.started == []
    assert {r["status"] for r in Results(tmp_path / "results").read_some()} == {"infeasible"}
    assert "infeasible: the longest request" in report(tmp_path / "results")


def test_a_server_that_does_not_start_is_a_result_that_can_be_tried_again(
    farm: Farm, model: Path, shape: ModelShape, tmp_path: Path
) -> None:
    farm.broken = {"stock:2"}
    left, _ = bench(plan("stock:2", "base"), model, shape, tmp_path)
    assert left == 0
    statuses = [r["status"] for r in Results(tmp_path / "results").read_some()]
    assert sorted(statuses) == ["failed", "failed", "measured", "measured"]
    assert "failed: out of memory" in report(tmp_path / "results")
    bench(plan("stock:2", "base"), model, shape, tmp_path)
    assert farm.started == ["stock:2", "base"]
    farm.broken = set()
    bench(plan("stock:2", "base"), model, shape, tmp_path, retry_failed=True)
    assert farm.started == ["stock:2", "base", "stock:2"]
    assert {r["status"] for r in Results(tmp_path / "results").read_some()} == {"measured"}


def test_a_server_that_hangs_in_its_gate_fails_and_holds_nothing_up(
    farm: Farm, model: Path, shape: ModelShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = run._Side._gate

    async def hangs(self: run._Side, client: httpx.AsyncClient, unit: Unit) -> None:
        if unit.peer.label == "stock:2":
            await asyncio.Event().wait()
        await gate(self, client, unit)

    monkeypatch.setattr(run._Side, "_gate", hangs)
    left, _ = bench(plan("stock:2", "base"), model, shape, tmp_path, start_limit_s=3.0)
    assert left == 0
    found = {
        (r["unit"]["peer"]["label"], r["status"], r.get("why"))
        for r in Results(tmp_path / "results").read_some()
    }
    why = "stock:2: the warm-up had not ended after 3 s"
    assert found == {("stock:2", "failed", why), ("base", "measured", None)}


@pytest.mark.parametrize(
    ("peer", "more", "message"),
    [
        ("stock:2", {"kv_tokens": 7}, "--mem-fraction-static"),
        ("stock:2", {"probe": False}, "GRAFT_STOCK_PROBE"),
        ("graft:cost", {"pages": 5000}, "more than the budget"),
    ],
)
def test_a_server_with_another_budget_is_not_measured(
    peer: str,
    more: dict[str, Any],
    message: str,
    farm: Farm,
    model: Path,
    shape: ModelShape,
    tmp_path: Path,
) -> None:
    farm.more = more
    bench(plan(peer), model, shape, tmp_path)
    found = list(Results(tmp_path / "results").read_some())
    assert {r["status"] for r in found} == {"failed"}
    assert all(message in r["why"] for r in found)


def test_command_lines(model: Path, shape: ModelShape) -> None:
    graft, stock, base = parse_peers(["graft:cost", "stock:2", "base"])
    cut = Split(1000, 0, 64, 1000, "")
    more = {"all": ("--attention-backend", "x"), "stock": ("--s",), "graft": ("--g",)}
    settings = Settings(model=model, shape=shape, device="cuda", more=more)
    folders = {"a": Path("/a"), "b": Path("/b")}
    lines = [command(peer, cut, folders, settings, 5) for peer in (graft, stock, base)]
    for line in lines:
        assert line[line.index("--max-total-tokens") + 1] == "64"
        assert line[line.index("--attention-backend") + 1] == "x"
        assert line[line.index("--page-size") + 1] == str(shape.page_tokens)
    on_cpu = replace(settings, device="cpu")
    lines_there = [command(peer, cut, folders, on_cpu, 5) for peer in (graft, stock, base)]
    assert ["--page-size" in line for line in lines_there] == [True, False, False]
    assert [("--g" in line, "--s" in line) for line in lines] == [
        (True, False),
        (False, True),
        (False, False),
    ]
    assert lines[0][-3:] == ["--lora-paths", "a=/a", "b=/b"]
    assert "--enable-graft" in lines[0]
    assert lines[1][lines[1].index("--max-loras-per-batch") + 1] == "2"
    assert lines[1][lines[1].index("--lora-backend") + 1] == "csgmv"
    assert "--lora-paths" not in lines[2]


def test_only_servers_without_graft_are_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFT_POLICY", "elora")
    graft, stock = parse_peers(["graft:cost", "stock:2"])
    assert not {"GRAFT_POLICY", "GRAFT_STOCK_PROBE"} & set(environment(graft))
    assert environment(stock)["GRAFT_STOCK_PROBE"] == "1"

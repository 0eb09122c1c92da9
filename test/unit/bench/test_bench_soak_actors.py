"""Parts of a soak beside its traffic, against a server that answers as it is told to."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from subprocess import Popen
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from helpers_bench import FakeServer, save_config, serving

from sglang_graft.bench.process import Launched
from sglang_graft.bench.server import Running
from sglang_graft.bench.shape import ModelShape
from sglang_graft.bench.soak_actors import Canaries, Controller, Leavers, Soak, Watch
from sglang_graft.bench.units import Load
from sglang_graft.sim.workloads import merge


class Server(FakeServer):
    """With the routes of control. An adapter moves the tokens by the length of its folder's name.

    deaf: how it misbehaves.
    """

    deaf: str = ""

    def app(self) -> FastAPI:
        app = super().app()
        self.folders: dict[str, str] = {}
        self.aborted: list[str] = []

        @app.post("/load_lora_adapter")
        async def load(request: Request) -> Response:
            body = await request.json()
            if "not-there" in body["lora_path"]:
                return Response(status_code=500 if self.deaf == "bad input" else 400)
            self.folders[body["lora_name"]] = body["lora_path"]
            return Response(status_code=400 if self.deaf == "load" else 200)

        @app.post("/unload_lora_adapter")
        async def unload(request: Request) -> Response:
            found = self.folders.pop((await request.json())["lora_name"], None)
            if self.deaf == "unload":
                return Response()
            return Response(status_code=400 if found is None else 200)

        @app.post("/abort_request")
        async def abort(request: Request) -> Response:
            self.aborted.append((await request.json())["rid"])
            self.hangs = False
            return Response()

        return app

    def _generate(self, body: dict[str, Any]) -> Response:
        name = body.get("lora_path")
        if name == "nobody" or body["sampling_params"]["max_new_tokens"] < 0:
            return JSONResponse({}, status_code=404)
        if "logprob_start_len" in body:
            return self._forced(body)
        wrong = self.deaf in ("wrong weights", "far tie") and name in self.folders
        if self.deaf == "canary" or wrong:
            body["input_ids"] = [*body["input_ids"], 1]
        return super()._generate(body)

    def _forced(self, body: dict[str, Any]) -> Response:
        """Log-probabilities of an answer's tokens, the last of the input."""
        prompt = body["input_ids"][: body["logprob_start_len"] + 1]
        ids, right = body["input_ids"][len(prompt) :], sum(prompt) % 1000
        off = -0.501 if self.deaf == "far tie" else -2.0
        own = [[-0.5 if x == right + i else off, x, None] for i, x in enumerate(ids)]
        best = [[[-0.5, right + i, None]] for i in range(len(ids))]
        skipped = [None, prompt[-1], None]  # SGLang has none for the first token asked about
        logprobs = {"input_token_logprobs": [skipped, *own], "input_top_logprobs": [None, *best]}
        return JSONResponse({"output_ids": [0], "meta_info": logprobs})


LOAD = Load(name="chat", rate=4.0, seconds=4.0, adapters=4)
FOLDERS = {"known": {"chat-adapter-0": Path("a")}, "spare": {"spare-8": Path("b")}}


def soaked(
    tmp_path: Path, play: Callable[[Soak, Server], Coroutine[Any, Any, None]], **more: Any
) -> Soak:
    """What `play` left of a soak of a second."""
    shape = ModelShape.read(save_config(tmp_path / "model"), "cpu")

    async def run(server: Server) -> Soak:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            soak = Soak(client, merge([LOAD.workload()]), shape, 1.0, tmp_path, seed=0)
            await play(soak, server)
        return soak

    with serving(Server(**more)) as server:
        assert isinstance(server, Server)
        return asyncio.run(run(server))


def test_canaries_that_stay_the_same(tmp_path: Path) -> None:
    async def play(soak: Soak, server: Server) -> None:
        canaries = Canaries(soak)
        await canaries.start()
        soak.begin = time.perf_counter()
        await canaries.run()
        await canaries.round("at the end")
        found = canaries.report()
        # The base model and an adapter of each rank, three prompts each.
        assert (found["questions"], found["rounds"]) == (9, 5)
        assert (found["agree"], found["equal"], found["answers"]) == (5, 45, 45)

    assert not soaked(tmp_path, play).problems


def test_a_canary_that_changes_is_a_problem(tmp_path: Path) -> None:
    async def play(soak: Soak, server: Server) -> None:
        canaries = Canaries(soak)
        await canaries.start()
        server.deaf = "canary"
        await canaries.round("amid the traffic")
        assert canaries.report()["agree"] == 1

    problems = soaked(tmp_path, play).problems
    assert len(problems) == 2  # one by one, and all at once
    assert all("canaries amid the traffic" in text for text in problems)


def test_control_without_a_problem(tmp_path: Path) -> None:
    async def play(soak: Soak, server: Server) -> None:
        control = Controller(soak, FOLDERS["known"], FOLDERS["spare"])
        await control.start()
        assert not server.folders
        for _ in range(20):
            await control.step()
        await control.bad_input()
        assert len(control.held) == 3
        assert sorted(server.folders) == sorted(control.held)

    soak = soaked(tmp_path, play)
    assert not soak.problems
    assert soak.done["load"] == 21
    assert soak.done["bad input"] == 4
    assert soak.done["loaded answers equal"] == 20 + soak.done["replace"] > 20


@pytest.mark.parametrize(
    ("deaf", "text"),
    [
        ("load", "load of"),
        ("unload", "unload of soak-1"),
        ("wrong weights", "answers as another adapter"),
        ("bad input", "a folder that is not there was answered with 500"),
    ],
)
def test_control_finds_what_is_wrong(tmp_path: Path, deaf: str, text: str) -> None:
    async def play(soak: Soak, server: Server) -> None:
        control = Controller(soak, FOLDERS["known"], FOLDERS["spare"])
        await control.start()
        server.deaf = deaf
        for _ in range(4):
            await control.step()
        await control.bad_input()
        await control.judge()
        soak.problems += control.doubts.problems()

    assert text in soaked(tmp_path, play).problems[0]


def test_an_answer_that_parts_at_a_far_tie_is_judged_by_all_its_tokens(tmp_path: Path) -> None:
    async def play(soak: Soak, server: Server) -> None:
        control = Controller(soak, FOLDERS["known"], FOLDERS["spare"])
        await control.start()
        server.deaf = "far tie"
        await control.step()
        (problem, *_) = control.doubts.problems()
        assert problem.endswith("not judged yet")
        assert "answers as another adapter" in problem
        await control.judge()
        assert not control.doubts.problems()
        assert all(doubt["gap"] == pytest.approx(0.001) for doubt in control.doubts.kept)
        assert sorted(server.folders) == control.held  # what judged is unloaded

    assert not soaked(tmp_path, play).problems


def test_an_abort_is_asked_for_until_the_stream_ends(tmp_path: Path) -> None:
    async def play(soak: Soak, server: Server) -> None:
        leavers = Leavers(soak)
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 9}, "stream": True}
        await leavers.abort(body)
        await leavers.leave(body)
        assert set(server.aborted) == {"soak-0-1"}

    soak = soaked(tmp_path, play, failures=["hang"])
    assert not soak.problems
    assert soak.done["leave"] == 1


def test_a_server_that_has_ended_ends_the_soak(tmp_path: Path) -> None:
    async def play(soak: Soak, server: Server) -> None:
        soak.seconds = 1000.0
        # No process has this number: Linux ends below.
        ended = Running(
            server.url, 0.0, (), Launched(cast(Popen[bytes], SimpleNamespace(pid=2**22 + 1)))
        )
        watch = Watch(soak, ended, "cpu")
        await watch.run()
        assert soak.gone.is_set()
        assert watch.pool.samples

    (problem,) = soaked(tmp_path, play).problems
    assert "the server has ended" in problem


def test_results_name_no_folder(tmp_path: Path) -> None:
    async def play(soak: Soak, server: Server) -> None:
        soak.problem(f"no {tmp_path}/adapters/one")

    assert soaked(tmp_path, play).problems[0].endswith("no WORK/adapters/one")

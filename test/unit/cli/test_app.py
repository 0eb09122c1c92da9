"""`graft doctor` and `graft pool`."""

import dataclasses
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from helpers_pool import POOL
from typer.testing import CliRunner

from sglang_graft.cli import doctor
from sglang_graft.cli.app import app
from sglang_graft.engine import scheduler

RUN = CliRunner()


def doctor_report() -> tuple[int, dict[str, Any]]:
    result = RUN.invoke(app, ["doctor", "--json"])
    return result.exit_code, json.loads(result.stdout.strip().splitlines()[-1])


def unhealthy(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [finding for finding in report["findings"] if not finding["healthy"]]


def test_doctor_is_content_with_a_right_installation() -> None:
    code, report = doctor_report()
    assert unhealthy(report) == []
    assert code == 0
    hooks = [finding["item"] for finding in report["findings"] if finding["topic"] == "hook"]
    assert "managers.schedule_policy.PrefillAdder.add_one_req" in hooks
    assert "--speculative-algorithm" in report["refused"]


def test_doctor_names_a_hook_whose_target_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    first = scheduler.HOOKS[0]
    changed = dataclasses.replace(first, parameters=("self", "other"))
    monkeypatch.setattr(scheduler, "HOOKS", (changed, *scheduler.HOOKS[1:]))
    code, report = doctor_report()
    (finding,) = unhealthy(report)
    assert code == 1
    assert finding["item"] in first.target
    assert "wanted parameters ('self', 'other')" in finding["detail"]
    assert finding["remedy"] == "pip install sglang==0.5.17"


def test_doctor_wants_the_pinned_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SGLANG_VERSION", "0.0.1")
    code, report = doctor_report()
    assert code == 1
    assert unhealthy(report)[0]["remedy"] == "pip install sglang==0.0.1"


def test_doctor_sees_a_plugin_list_without_graft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    code, report = doctor_report()
    assert code == 1
    assert [finding["item"] for finding in unhealthy(report)] == ["SGLANG_PLUGINS"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the variable plays no part")
def test_doctor_explains_the_other_cpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    result = RUN.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "unset SGLANG_USE_CPU_ENGINE" in " ".join(result.stdout.split())


@pytest.fixture
def url() -> Iterator[str]:
    class Fake(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(POOL).encode()
            locked = self.path == "/locked/graft/pool"
            if locked and self.headers["Authorization"] != "Bearer secret":
                self.send_response(401)
            else:
                self.send_response(200 if locked or self.path == "/graft/pool" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Fake) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_pool_shows_pages_and_adapters(url: str) -> None:
    shown = RUN.invoke(app, ["pool", "--url", url])
    assert shown.exit_code == 0
    assert "legal" in shown.stdout
    assert "(base model)" in shown.stdout
    plain = RUN.invoke(app, ["pool", "--url", url + "/", "--json"])
    assert json.loads(plain.stdout) == POOL


def test_pool_of_a_server_with_an_admin_key(url: str) -> None:
    locked = ["pool", "--url", url + "/locked"]
    assert RUN.invoke(app, locked).exit_code == 1
    assert RUN.invoke(app, [*locked, "--key", "other"]).exit_code == 1
    assert RUN.invoke(app, [*locked, "--key", "secret"]).exit_code == 0


def test_pool_without_a_graft_server_says_so(url: str) -> None:
    result = RUN.invoke(app, ["pool", "--url", url + "/other"])
    assert result.exit_code == 1
    assert "--enable-graft" in result.output

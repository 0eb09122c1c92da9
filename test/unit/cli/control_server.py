"""A server's control routes in memory, with faults on demand, behind httpx."""

import json
from typing import Any
from urllib.parse import parse_qs, unquote

import httpx

from sglang_graft.cli.control_client import ControlClient

SETTINGS: dict[str, Any] = {"pinned": False, "ttl_seconds": None, "priority": 0}


class ControlServer:
    """Adapters, aliases, and every change in order. `fails` maps (method, path) to a status."""

    def __init__(self) -> None:
        self.adapters: dict[str, dict[str, Any]] = {}
        self.aliases: dict[str, str] = {}
        self.calls: list[str] = []
        self.fails: dict[tuple[str, str], int] = {}
        self.cold: set[str] = set()
        self.tenants: dict[str, Any] = {}
        self.tenants_before: dict[str, Any] = {}
        self.tenant_changes = 0
        self.instance: str | None = "first"

    def client(self, key: str = "") -> ControlClient:
        return ControlClient("http://server", key, transport=httpx.MockTransport(self._answer))

    def add(self, name: str, path: str, **settings: Any) -> None:
        self.adapters[name] = {
            "name": name,
            "path": path,
            "identity": f"weights of {path}",
            "below_root": False,
            **SETTINGS,
            **settings,
        }

    def state(self) -> tuple[dict[str, Any], dict[str, str]]:
        return json.loads(json.dumps(self.adapters)), dict(self.aliases)

    def restart(self) -> None:
        """What a restart leaves: nothing but the tenants file."""
        self.adapters, self.aliases, self.instance = {}, {}, f"after {self.instance}"

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if self.instance is None:
            raise httpx.ConnectError("refused")
        path = unquote(request.url.path)
        flags = parse_qs(request.url.query.decode())
        body = json.loads(request.content) if request.content else None
        dry = "dry_run" in flags
        if request.method != "GET" and not dry:
            self.calls.append(f"{request.method} {path}")
        status = self.fails.get((request.method, path))
        if status is not None and not dry:
            return httpx.Response(status, json={"message": f"{path} fails"})
        if path.startswith("/graft/tenants"):
            return self._tenants(request.method, body, dry)
        if path == "/health/ready":
            return httpx.Response(503, json={"ready": False, "instance": self.instance})
        name = path.removeprefix("/graft/adapters").removeprefix("/")
        match request.method, path:
            case "GET", "/graft/adapters":
                rows = list(self.adapters.values())
                return _ok({"adapters": rows, "available": [], "aliases": self.aliases})
            case "POST", "/graft/adapters":
                return self._load(body, dry)
            case "PATCH", "/graft/aliases":
                table = self.aliases | body
                self.aliases = {alias: to for alias, to in table.items() if to is not None}
                return _ok(self.aliases)
            case "POST", "/generate":
                return self._prompt(body)
            case "PATCH", _ if name in self.adapters:
                self.adapters[name] |= {key: body[key] for key in body if key in SETTINGS}
                return _ok({"adapter": self.adapters[name], "left": []})
            case "DELETE", _ if name in self.adapters:
                del self.adapters[name]
                return _ok({})
        return httpx.Response(404, json={"message": f"No adapter named {name!r} is loaded."})

    def _load(self, body: dict[str, Any], dry: bool) -> httpx.Response:
        name, path = body["name"], str(body["path"])
        if path.endswith("bad"):
            return httpx.Response(400, json={"message": f"{path} is refused"})
        if dry:
            return _ok({"identity": f"weights of {path}", "leaves": []})
        if name in self.adapters and not body["load_inplace"]:
            return httpx.Response(409, json={"message": "loaded already"})
        old = self.adapters.get(name, SETTINGS)
        kept = {key: old[key] for key in SETTINGS}
        self.add(name, path, **kept | {key: body[key] for key in body if key in SETTINGS})
        answer: dict[str, Any] = {"adapter": self.adapters[name], "left": []}
        if "warm" in body:
            done = name not in self.cold
            answer["warm"] = {"to": body["warm"], "done": done, "reason": "no room"}
        return _ok(answer)

    def _tenants(self, method: str, body: Any, dry: bool) -> httpx.Response:
        if method == "GET":
            return _ok({"changes": self.tenant_changes})
        if method == "PUT":
            return self._put_tenants(body["tenants"], dry)
        return self._undo_tenants(body["changes"])

    def _put_tenants(self, wanted: dict[str, Any], dry: bool) -> httpx.Response:
        if "greedy" in wanted:
            return httpx.Response(409, json={"detail": "page_floor: all floors together are 9"})
        old = self.tenants
        found = {
            "added": [name for name in wanted if name not in old],
            "changed": [name for name in wanted if name in old and wanted[name] != old[name]],
            "removed": [name for name in old if name not in wanted],
        }
        same = wanted == old
        if not dry and not same:
            self.tenants_before, self.tenants = old, wanted
            self.tenant_changes += 1
        return _ok({"changes": self.tenant_changes, "same": same, **found})

    def _undo_tenants(self, changes: int) -> httpx.Response:
        if changes != self.tenant_changes:
            return httpx.Response(409, json={"detail": "cannot be taken back"})
        self.tenants = self.tenants_before
        self.tenant_changes += 1
        return _ok({"changes": self.tenant_changes})

    def _prompt(self, body: dict[str, Any]) -> httpx.Response:
        assert body["lora_path"] in {*self.adapters, *self.aliases}
        if body["text"] == "fail":
            return httpx.Response(400, json={"error": {"message": "too long"}})
        return _ok({"text": "an answer"})


def _ok(content: Any) -> httpx.Response:
    return httpx.Response(200, json=content)

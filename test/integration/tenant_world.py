"""A tenants file with its keys, adapters for its tenants, and a client for each."""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import tiny_adapters
from harness import ANSWER_SECONDS, ONE_REQUEST, Server

from sglang_graft.tenants import make_key

ADMIN_KEY = "the-operators-own-key"
FLOOR, CAP = 60, 60
COLD = 50
ADAPTER = {"r": 4, "lora_alpha": 16, "target_modules": list(tiny_adapters.ALL)}


def save_adapters(root: Path, cold: int = COLD) -> dict[str, Path]:
    """`a/x0` to `a/x49` for the flood, two of b's own and one that both may use."""
    names = [*(f"a/x{number}" for number in range(cold)), "b/main", "b/other", "both/shared"]
    return {
        name: tiny_adapters.save(root / name, ADAPTER, seed=400 + number)
        for number, name in enumerate(names)
    }


@dataclass
class World:
    """What the tenants file says now, and the keys behind its hashes."""

    path: Path
    keys: dict[str, str] = field(default_factory=dict)
    tenants: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, name: str, **fields: Any) -> None:
        """A tenant with a key of its own."""
        self.keys[name], hashed = make_key()
        self.tenants[name] = {"keys": [hashed], **fields}

    def write(self) -> None:
        """Put the file there all at once."""
        hidden = self.path.with_suffix(".new")
        hidden.write_text(json.dumps({"tenants": self.tenants}))
        hidden.replace(self.path)

    @contextmanager
    def asking(self, server: Server, name: str) -> Iterator[Server]:
        """The same server with the key of a tenant; "admin" is the operator, "" has none."""
        key = {"admin": ADMIN_KEY, "": ""}.get(name) or self.keys.get(name, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with httpx.Client(timeout=ANSWER_SECONDS, headers=headers, limits=ONE_REQUEST) as client:
            yield dataclasses.replace(server, client=client)


def make(path: Path) -> World:
    """a floods below its cap, b has a floor, c a rate, d and e share KV, f has the base only."""
    world = World(path)
    world.add("a", adapters=["a/*", "both/*"], page_cap=CAP)
    world.add("b", adapters=["b/*", "both/*"], base=True, page_floor=FLOOR)
    world.add("c", adapters=["b/other"], requests_per_second=0.01, burst_seconds=300)
    world.add("d", adapters=["both/*"], share_kv=True)
    world.add("e", adapters=["both/*"], share_kv=True)
    world.add("f", base=True)
    world.write()
    return world

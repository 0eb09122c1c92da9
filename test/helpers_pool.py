"""A pool report as `/graft/pool` gives it."""

from typing import Any

POOL: dict[str, Any] = {
    "pages": {
        "total": 9, "free": 4, "adapter": 2, "kv_cached": 3, "kv_running": 0, "in_flight": 0
    },
    "page_bytes": 2**20,
    "page_tokens": 32,
    "invalid_kv_pages": 0,
    "base": {
        "identity": None, "state": "device", "pages": 0, "kv_pages": 1, "locks": 0, "loads": 0,
        "evictions": 0,
    },
    "adapters": [
        {
            "name": "legal", "identity": "a1", "state": "device", "pages": 2, "kv_pages": 2,
            "locks": 0, "hits": 5, "loads": 1, "evictions": 0,
        }
    ],
}  # fmt: skip

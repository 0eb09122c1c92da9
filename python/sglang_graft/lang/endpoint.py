"""A server with Graft as a backend of the frontend language.

Seam (0.5.17): subclass of `lang.backend.runtime_endpoint.RuntimeEndpoint`. Reasons: no request of
SGLang's names an adapter, and each one that carries the text of a program (gen, stream, select,
fork) passes `_add_images` last; an error in a stream ends there as KeyError 'text'; the route that
joins KV (`/concate_and_append_request`) is not there in 0.5.17, while joining as text works.
"""

import copy
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import requests
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.utils import http_request

from sglang_graft.lang.choice import UNSET, Choice, checked

EXECUTOR_ATTRIBUTE = "_graft_adapter"
"""Of a StreamExecutor: the choice for what it executes now."""


class Endpoint(RuntimeEndpoint):
    """Adapters for programs on the server at `base_url`; `adapter` is that of all by default.

    Further arguments are those of SGLang's RuntimeEndpoint.
    """

    def __init__(self, base_url: str, *args: Any, adapter: str | None = None, **more: Any) -> None:
        super().__init__(base_url, *args, **more)
        self.adapter = checked(adapter)
        self.support_concate_and_append = False

    def using(self, name: str | None) -> "Endpoint":
        """The same server, with another adapter by default."""
        other = copy.copy(self)
        other.adapter = checked(name)
        return other

    def cache_prefix(self, prefix_str: str) -> None:
        """Compute the KV of a text with the default adapter."""
        data = {"text": prefix_str, "sampling_params": {"max_new_tokens": 0}}
        self._add_adapter(data, UNSET)
        url = f"{self.base_url}/generate"
        self._assert_success(http_request(url, data, api_key=self.api_key, verify=self.verify))

    def _add_images(self, s: Any, data: dict[str, Any]) -> None:
        super()._add_images(s, data)
        self._add_adapter(data, getattr(s, EXECUTOR_ATTRIBUTE, UNSET))

    def _add_adapter(self, data: dict[str, Any], choice: Choice) -> None:
        name = self.adapter if choice is UNSET else choice
        if name is not None:
            data["lora_path"] = name

    def _assert_success(self, res: Any) -> None:
        super()._assert_success(res)
        if isinstance(res, requests.Response):  # only streams
            res.iter_lines = partial(_events, res.iter_lines)  # type: ignore[method-assign]


def _events(lines: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """The lines of a stream. Raises RuntimeError for an error in it, as without a stream."""
    for line in lines(*args, **kwargs):
        if line.startswith(b'data: {"error"'):
            raise RuntimeError(json.loads(line.removeprefix(b"data: ")))
        yield line

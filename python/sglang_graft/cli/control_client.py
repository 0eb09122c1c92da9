"""What the commands ask of a running server's control routes, and what they say when it refuses."""

import os
from typing import Any
from urllib.parse import quote

import httpx

URL = "http://127.0.0.1:30000"
URL_ENV, KEY_ENV, API_KEY_ENV = "GRAFT_URL", "GRAFT_ADMIN_KEY", "GRAFT_API_KEY"
SECONDS = 900.0
"""For one answer: a load returns when the folder was read."""


class ServerError(Exception):
    """The server refused (`status_code`), or nothing answers there (None)."""

    def __init__(self, message: str, status_code: int | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code


class ControlClient:
    """One server. `key` opens the control routes, `api_key` those that answer prompts."""

    def __init__(
        self,
        url: str,
        key: str = "",
        *,
        api_key: str = "",
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.key = key
        self.api_key = api_key or os.environ.get(API_KEY_ENV, "") or key
        self._client = httpx.Client(timeout=SECONDS, transport=transport)

    def __enter__(self) -> "ControlClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def instance(self) -> str | None:
        """Which process answers; another one after a restart. None while nobody does."""
        try:
            # Not `ask`: a server that is not ready says so with 503 and has an instance too.
            found = self._client.get(f"{self.url}/health/ready").json().get("instance")
        except (httpx.HTTPError, ValueError, AttributeError):
            return None
        return found if isinstance(found, str) else None

    def adapters(self) -> dict[str, Any]:
        """The listing of /graft/adapters."""
        return self.ask("GET", "/graft/adapters")

    def load(self, body: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Load or replace an adapter."""
        return self.ask("POST", "/graft/adapters", body, dry_run=dry_run)

    def change(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Change the settings of a loaded adapter."""
        return self.ask("PATCH", adapter_path(name), body)

    def unload(self, name: str, *, dry_run: bool = False) -> dict[str, Any]:
        """Unload an adapter."""
        return self.ask("DELETE", adapter_path(name), dry_run=dry_run)

    def why(self, name: str, *, pin: bool = False) -> dict[str, Any]:
        """Whether a loaded adapter would fit, and what would leave."""
        return self.ask("GET", f"/graft/why/{_quoted(name)}", pin=pin)

    def aliases(self) -> dict[str, str]:
        """Every alias and its adapter."""
        return self.ask("GET", "/graft/aliases")

    def switch(self, changes: dict[str, str | None]) -> dict[str, str]:
        """Change aliases in one step; None takes one away."""
        return self.ask("PATCH", "/graft/aliases", changes)

    def tenants(self) -> dict[str, Any]:
        """The report of /graft/tenants."""
        return self.ask("GET", "/graft/tenants")

    def put_tenants(self, wanted: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Give the server all of its tenants; which of them differ."""
        return self.ask("PUT", "/graft/tenants", {"tenants": wanted}, dry_run=dry_run)

    def undo_tenants(self, changes: int) -> dict[str, Any]:
        """Take back the last change of the tenants, whose number is `changes`."""
        return self.ask("POST", "/graft/tenants/undo", {"changes": changes})

    def prompt(self, name: str, text: str, new_tokens: int) -> dict[str, Any]:
        """One greedy answer of an adapter."""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens}
        body = {"text": text, "lora_path": name, "sampling_params": sampling}
        return self.ask("POST", "/generate", body, key=self.api_key)

    def ask(
        self, method: str, path: str, body: Any = None, *, key: str | None = None, **flags: bool
    ) -> dict[str, Any]:
        """The JSON object that answers. Raises ServerError."""
        key = self.key if key is None else key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        query = {name: "true" for name, on in flags.items() if on}
        try:
            response = self._client.request(
                method, self.url + path, json=body, params=query, headers=headers
            )
        except httpx.HTTPError as error:
            raise ServerError(
                f"{self.url}: {error or type(error).__name__}. Is a server with --enable-graft"
                " running there?"
            ) from None
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise ServerError(
                f"{self.url}{path}: the server asks for its admin key; give it with --key or"
                f" {KEY_ENV}",
                response.status_code,
            )
        if not response.is_success:
            raise ServerError(_reason(response), response.status_code)
        answer: dict[str, Any] = response.json()
        return answer


def adapter_path(name: str) -> str:
    """The route of one adapter; a name may have slashes."""
    return f"/graft/adapters/{_quoted(name)}"


def _quoted(name: str) -> str:
    return quote(name, safe="/")


def _reason(response: httpx.Response) -> str:
    try:
        answer = response.json()
    except ValueError:
        return f"HTTP {response.status_code}"
    if isinstance(answer, dict):
        nested = answer.get("error")
        inner = nested.get("message") if isinstance(nested, dict) else nested
        for found in (answer.get("message"), inner, answer.get("detail")):
            if isinstance(found, str) and found:
                return found
    return f"HTTP {response.status_code}: {response.text}"

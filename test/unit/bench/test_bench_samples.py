"""Reports of a server: one that hangs is missed, and holds nothing up."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from sglang_graft.bench.clock import RealClock
from sglang_graft.bench.samples import REPORT_S, Sample, Sampler
from sglang_graft.bench.warm import flush


def limits_of(ask: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> list[float]:
    """How long the client would wait for each answer; none comes."""
    limits: list[float] = []

    def hang(request: httpx.Request) -> httpx.Response:
        limits.append(request.extensions["timeout"]["read"])
        raise httpx.ReadTimeout("no answer", request=request)

    async def run() -> None:
        transport = httpx.MockTransport(hang)
        async with httpx.AsyncClient(base_url="http://x", transport=transport, timeout=3600) as c:
            await ask(c)

    asyncio.run(run())
    return limits


def unused(report: Any, at_s: float) -> Sample:
    raise AssertionError(f"no report came: {report} at {at_s}")


def test_a_report_that_does_not_come_is_missed() -> None:
    found: list[Sampler] = []

    async def sample(client: httpx.AsyncClient) -> None:
        sampler = Sampler(client, "/graft/pool", unused, RealClock(), 2.0)
        found.append(sampler)
        await sampler.once()

    assert limits_of(sample) == [REPORT_S]
    assert found[0].missed == 1
    assert found[0].samples == []


def test_a_cache_that_is_never_emptied_ends_the_unit() -> None:
    with pytest.raises(httpx.ReadTimeout):
        limits_of(flush)


def test_emptying_waits_as_long_as_for_an_idle_server() -> None:
    async def emptied(client: httpx.AsyncClient) -> None:
        with pytest.raises(httpx.ReadTimeout):
            await flush(client, limit_s=7.0)

    assert limits_of(emptied) == [7.0]

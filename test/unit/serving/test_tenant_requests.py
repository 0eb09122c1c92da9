"""What a request of a tenant may bring, and what is made of it, where all requests meet."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException
from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_graft.serving import names, tenant_requests, tenants
from sglang_graft.serving.tenant_requests import ForbiddenError, carry, claim, count
from sglang_graft.serving.tenants import Caller, Tenants
from sglang_graft.tenants import Tenant, make_key
from sglang_graft.tenants.carrier import decode

MANAGER = SimpleNamespace(
    enable_priority_scheduling=False,
    server_args=SimpleNamespace(schedule_low_priority_values_first=False),
    rid_to_state={},
)


@pytest.fixture
def state() -> Iterator[Tenants]:
    fields: dict[str, dict[str, Any]] = {
        "a": {"adapters": ("x", "y/*"), "tokens_per_second": 1.0, "priority": 7},
        "b": {"base": True, "share_kv": True, "requests_per_second": 1.0},
    }
    made = {name: Tenant(keys=(make_key()[1],), **more) for name, more in fields.items()}
    state = Tenants(Path("f"), made)
    tenants.set_current(state)
    yield state
    tenants.set_current(None)
    tenants.set_caller(None)


def request(tenant: str | None, **fields: Any) -> GenerateReqInput:
    """A normalized request with `tenant` as its caller."""
    tenants.set_caller(None if tenant is None else Caller(tenant))
    obj = GenerateReqInput(**({"text": "w"} | fields))
    obj.normalize_batch_and_arguments()
    return obj


@pytest.mark.parametrize(
    ("tenant", "lora_path"),
    [("a", "z"), ("a", None), ("a", ""), ("a", "y/1/2"), ("b", "x"), ("gone", "x")],
)
def test_what_it_may_not_use_is_403(state: Tenants, tenant: str, lora_path: str | None) -> None:
    obj = request(tenant, lora_path=lora_path)
    with pytest.raises(HTTPException) as error:
        claim(MANAGER, obj)
    assert error.value.status_code == 403


def test_every_name_of_a_batch_counts(state: Tenants) -> None:
    claim(MANAGER, request("a", text=["w", "w"], lora_path=["x", "y/1"]))
    for bad in ("z", None):
        with pytest.raises(HTTPException):
            claim(MANAGER, request("a", text=["w", "w"], lora_path=["x", bad]))


def test_a_stream_that_has_begun_gets_its_403_as_an_event(
    state: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "nothing_sent", lambda: False)
    with pytest.raises(ForbiddenError) as error:
        claim(MANAGER, request("a", stream=True))
    assert error.value.status_code == 403
    monkeypatch.setattr(names, "nothing_sent", lambda: True)
    with pytest.raises(HTTPException):
        claim(MANAGER, request("a", stream=True))


@pytest.mark.parametrize("field", [{"session_params": {"id": "s"}}, {"session_id": "s"}])
def test_sessions_are_the_operators(state: Tenants, field: dict[str, Any]) -> None:
    with pytest.raises(HTTPException, match="operator"):
        claim(MANAGER, request("b", **field))
    claim(MANAGER, request(None, **field))


def test_what_a_client_may_not_set_is_taken_away(state: Tenants) -> None:
    for tenant in ("b", None):
        obj = request(tenant, lora_id="id", http_worker_ipc="ipc://x", priority=99)
        claim(MANAGER, obj)
        assert (obj.lora_id, obj.http_worker_ipc) == (None, None)
        assert obj.priority == (None if tenant else 99)
    tenants.set_current(None)
    obj = request(None, lora_id="id")
    claim(MANAGER, obj)
    assert obj.lora_id is None, "without tenants too"


def test_samples_of_a_request_keep_what_was_resolved(state: Tenants) -> None:
    obj = request("a", lora_path="x")
    obj.lora_id = "resolved"
    claim(MANAGER, obj, lifecycle_id=object())
    assert obj.lora_id == "resolved"


def test_ids_begin_with_the_tenant(state: Tenants) -> None:
    for rid in ("r", "", "t:b:r", "resp_t:b:r", "HEALTH_CHECK_1"):
        obj = request("a", lora_path="x", rid=rid)
        claim(MANAGER, obj)
        assert obj.rid == f"t:a:{rid}"
    obj = request("a", lora_path="x", rid="resp_t:a:r")
    claim(MANAGER, obj)
    assert obj.rid == "resp_t:a:r"
    obj = request("a", text=["w", "w"], lora_path="x", rid=["r", "s"])
    claim(MANAGER, obj)
    assert obj.rid == ["t:a:r", "t:a:s"]
    obj = request(None, rid="r")
    claim(MANAGER, obj)
    assert obj.rid == "r"


@pytest.mark.parametrize(("low_first", "priority"), [(False, 7), (True, -7)])
def test_priority_is_the_files(state: Tenants, low_first: bool, priority: int) -> None:
    arguments = SimpleNamespace(schedule_low_priority_values_first=low_first)
    manager = SimpleNamespace(enable_priority_scheduling=True, server_args=arguments)
    obj = request("a", lora_path="x", priority=1000)
    claim(manager, obj)
    assert obj.priority == priority


def test_a_batch_counts_all_of_its_samples(state: Tenants) -> None:
    claim(MANAGER, request("b", text=["w"] * 6, sampling_params={"n": 2}))
    bucket = state.meter._requests["b"]
    assert round(bucket.most - bucket.left(0)) == 11, "the gate has counted the first"


def tokenized(extra_key: str | None) -> TokenizedGenerateReqInput:
    return TokenizedGenerateReqInput(
        input_text="",
        input_ids=[1, 2, 3],
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=SamplingParams(),
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        extra_key=extra_key,
    )


@pytest.mark.parametrize("client", [None, "mine", "\x01graft\x01b\x01p"])
def test_the_scheduler_learns_the_tenant_from_us_alone(state: Tenants, client: str | None) -> None:
    for tenant, found in (("a", ("a", False)), ("b", ("b", True)), (None, ("", False))):
        obj, made = request(tenant), tokenized(client)
        carry(made, MANAGER, obj)
        assert decode(made.extra_key or "")[:2] == found
    tenants.set_current(None)
    made = tokenized(client)
    carry(made, MANAGER, request(None))
    assert made.extra_key == client


def test_tokens_are_counted_as_they_come(state: Tenants) -> None:
    obj = request("a")
    carry(tokenized(None), MANAGER, obj)
    bucket = state.meter._tokens["a"]

    def used() -> int:
        return round(bucket.most - bucket.left(0))

    assert used() == 3
    tenants.set_caller(Caller("b"))  # whoever asks while the outputs come
    manager = SimpleNamespace(rid_to_state={"r": SimpleNamespace(obj=obj)})
    for total, wanted in ((1, 4), (5, 8), (5, 8)):
        output = SimpleNamespace(rids=["r", "gone"], completion_tokens=[total, 9])
        count(manager, output)
        assert used() == wanted
    count(manager, SimpleNamespace(rids=["r"]))
    assert used() == 8


class Responses:
    def _make_not_found_error(self, response_id: str) -> str:
        return f"not found {response_id}"


def test_responses_are_found_by_their_tenant_alone(state: Tenants) -> None:
    async def create(self: Any, request: Any, raw: Any) -> str:
        return str(request.request_id)

    async def find(self: Any, response_id: str) -> str:
        return "found"

    def made(tenant: str | None, previous: str | None = None) -> str:
        tenants.set_caller(Caller(tenant))
        body = SimpleNamespace(request_id="resp_chosen", previous_response_id=previous)
        return str(asyncio.run(tenant_requests.create_response(create, Responses(), body)))

    def found(tenant: str | None, response_id: str) -> str:
        tenants.set_caller(Caller(tenant))
        return str(asyncio.run(tenant_requests.find_response(find, Responses(), response_id)))

    mine = made("a")
    assert mine.startswith("resp_t:a:")
    assert made(None) == "resp_chosen"
    assert found("a", mine) == "found"
    assert found(None, mine) == "found"
    assert found("b", mine) == f"not found {mine}"
    assert found("b", "resp_chosen") == "not found resp_chosen"
    assert made("b", previous=mine) == f"not found {mine}"
    assert made("a", previous=mine).startswith("resp_t:a:")
    assert found("b", "no-id") == "found", "SGLang says that it is none"

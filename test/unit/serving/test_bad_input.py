"""Whose fault an error is decides between 4xx and 5xx."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams
from starlette.testclient import TestClient

from sglang_graft.serving import bad_input, tokenized_checks
from sglang_graft.serving.bad_input import BODY_ERRORS_OF, BodyError, BodyErrors, normalize, reading
from sglang_graft.serving.tokenized_checks import check_fields, check_ranges

VOCABULARY = 100


def fails(error: Exception) -> Any:
    def original(*_: Any, **__: Any) -> None:
        raise error

    return original


@pytest.mark.parametrize("error", [TypeError("x"), KeyError("x"), AssertionError("x")])
def test_what_reads_a_body_fails_with_a_value_error(error: Exception) -> None:
    with pytest.raises(ValueError, match=type(error).__name__):
        reading(fails(error))
    with bad_input.body_errors(), pytest.raises(BodyError, match=type(error).__name__):
        reading(fails(error))
    with bad_input.body_errors(), pytest.raises(BodyError, match="mine"):
        reading(fails(ValueError("mine")))


@pytest.mark.parametrize("error", [OSError("x"), MemoryError("x"), RuntimeError("x")])
def test_faults_of_the_server_stay_faults(error: Exception) -> None:
    with pytest.raises(type(error)):
        reading(fails(error))


def answer(path: str, error: Exception) -> Any:
    app = FastAPI()

    @app.post(path)
    async def handler() -> None:
        raise error

    app.add_middleware(BodyErrors)
    return TestClient(app, raise_server_exceptions=False).post(path)


@pytest.mark.parametrize(
    "path", [path for path, errors in BODY_ERRORS_OF.items() if ValueError in errors]
)
def test_what_handlers_let_through_of_their_bodies_is_400(path: str) -> None:
    response = answer(path, ValueError("no such parser"))
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "no such parser"
    assert answer(path, ValueError()).json()["error"]["message"] == "ValueError"
    assert answer(path, RuntimeError("broken")).status_code == 500


def test_a_profile_that_is_not_running_cannot_be_stopped() -> None:
    assert answer("/stop_profile", RuntimeError("not in progress")).status_code == 400
    assert answer("/stop_profile", ValueError("broken")).status_code == 500


def test_other_handlers_are_left_alone() -> None:
    assert answer("/flush_cache", ValueError("broken")).status_code == 500


@pytest.mark.parametrize("n", [0, -1, 10**9, "2", 1.5, True, [1]])
def test_n_is_bounded_before_anything_is_copied(n: Any) -> None:
    for params in ({"n": n}, [{"n": 1}, {"n": n}]):
        body = GenerateReqInput(text="x", sampling_params=params)
        with pytest.raises(ValueError, match="n: wanted"):
            normalize(GenerateReqInput.normalize_batch_and_arguments, body)


@pytest.mark.parametrize(
    "fields",
    [
        {"input_embeds": []},
        {"text": "x", "sampling_params": []},
        {"text": ["x"], "sampling_params": [3]},
    ],
)
def test_bodies_that_cannot_be_normalized_are_wrong(fields: dict[str, Any]) -> None:
    body = GenerateReqInput(**fields)
    with pytest.raises(ValueError):
        normalize(GenerateReqInput.normalize_batch_and_arguments, body)


def test_expert_records_need_a_recorder() -> None:
    manager = SimpleNamespace(server_args=SimpleNamespace(expert_distribution_recorder_mode=None))
    with pytest.raises(ValueError, match="--expert-distribution-recorder-mode"):
        bad_input.refuse_record(manager)
    manager.server_args.expert_distribution_recorder_mode = "stat"
    bad_input.refuse_record(manager)


def test_memory_is_never_released() -> None:
    with pytest.raises(ValueError, match="neither released nor resumed"):
        bad_input.refuse_memory(None, None)


@pytest.mark.parametrize("rid", [["a"], [], 3])
def test_a_single_request_has_one_id(rid: Any) -> None:
    with pytest.raises(ValueError, match="rid: wanted a text"):
        normalize(
            GenerateReqInput.normalize_batch_and_arguments, GenerateReqInput(text="x", rid=rid)
        )


def test_a_list_that_is_too_short_is_wrong() -> None:
    body = GenerateReqInput(text=["x", "y"], bootstrap_pair_key=[])
    normalize(GenerateReqInput.normalize_batch_and_arguments, body)
    with pytest.raises(ValueError, match="IndexError"):
        reading(GenerateReqInput.__getitem__, body, 1)


def test_embeddings_too() -> None:
    with pytest.raises(ValueError, match="IndexError"):
        normalize(EmbeddingReqInput.normalize_batch_and_arguments, EmbeddingReqInput(input_ids=[]))


def test_samples_that_are_wanted_pass() -> None:
    body = GenerateReqInput(text="x", sampling_params={"n": 3})
    normalize(GenerateReqInput.normalize_batch_and_arguments, body)
    assert body.parallel_sample_num == 3


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"temperature": 0, "max_new_tokens": 3, "stop": "x", "stop_token_ids": [1, 2], "n": 2},
        {"stop": ["x", "y"], "logit_bias": {"1": -1}, "custom_params": {"a": [1, None]}},
        {"temperature": None, "top_k": None, "regex": None},
    ],
)
def test_sampling_parameters_that_pass(given: dict[str, Any]) -> None:
    check_fields("sampling_params", given, tokenized_checks._SAMPLING)
    check_ranges(SamplingParams(**given), VOCABULARY)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"max_new_tokens": "3"}, "max_new_tokens"),
        ({"temperature": [1]}, "temperature"),
        ({"nonsense": 1}, "no field is named nonsense"),
        ({"is_normalized": True}, "no field is named is_normalized"),
        ({"custom_params": {"a": {"b": {}}}}, "custom_params"),
        ([], "wanted an object"),
        (None, "wanted an object"),
    ],
)
def test_sampling_parameters_of_other_types_are_refused(given: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_fields("sampling_params", given, tokenized_checks._SAMPLING)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"top_k": 2**31}, "top_k"),
        ({"min_new_tokens": 2**31}, "min_new_tokens"),
        ({"max_new_tokens": 2**63}, "max_new_tokens"),
        ({"stream_interval": 0}, "stream_interval"),
        ({"sampling_seed": 2**63}, "sampling_seed"),
        ({"logit_bias": {"1": math.nan}}, "logit_bias"),
        ({"logit_bias": {"1": 1e30}}, "logit_bias"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"min_new_tokens": 1, "stop_token_ids": [VOCABULARY]}, "stop_token_ids"),
    ],
)
def test_numbers_that_no_tensor_holds_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_ranges(SamplingParams(**given), VOCABULARY)


def test_what_the_tokenizer_runs_into_is_the_bodys() -> None:
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCABULARY))
    body = GenerateReqInput(text="x", sampling_params={})
    with pytest.raises(ValueError, match="TypeError: x"):
        tokenized_checks.create(fails(TypeError("x")), manager, body, "x", [1])
    body.positional_embed_overrides = [1]
    with pytest.raises(ValueError, match="positional_embed_overrides"):
        tokenized_checks.create(fails(TypeError("x")), manager, body, "x", [1])

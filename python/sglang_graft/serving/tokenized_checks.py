"""What reaches the scheduler is of the types and in the ranges that it works with.

Targets (0.5.17): AROUND `TokenizerManager._create_tokenized_object`, where a request is complete
and nothing has been sent, and AROUND `_tokenize_one_request`, which works on one request only.
Reasons: SGLang copies sampling parameters, session parameters and other fields of a body as they
are. What is of another type, or out of a tensor's range, fails in the scheduler, which ends, and
with it every request of everybody.
"""

import re
from collections.abc import Awaitable, Callable
from functools import cache
from operator import attrgetter
from typing import Any

import msgspec
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import SessionParams, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_graft.engine.hooks import Hook

INT32, INT64 = 2**31 - 1, 2**63 - 1
# A logit stays a number in float16 with these; a NaN among the logits ends the scheduler.
LEAST_PENALTY, LARGEST_BIAS = 0.01, 10_000

# What a wrong value of a body runs into while SGLang makes sense of it.
BODY_ERRORS = (
    *(TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, RecursionError),
    re.error,
)

_over_http: list[bool] = []


def serve_over_http() -> None:
    """From now on fields have JSON's types; those of a program may be numpy's, or sets."""
    if not _over_http:
        _over_http.append(True)


# Set by SGLang from the others; a client that sets them gets past its checks.
_INTERNAL = {"stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len"}
_INTERNAL |= {"is_normalized"}


def _optional_fields(struct: Any, names: list[str]) -> list[tuple[str, Any, Any]]:
    fields = {f.name: f.type for f in msgspec.structs.fields(struct)}
    return [(name, fields[name] | None, None) for name in names]


_GIVEN = [f.name for f in msgspec.structs.fields(SamplingParams) if f.name not in _INTERNAL]
_SAMPLING = msgspec.defstruct("SamplingInput", _optional_fields(SamplingParams, _GIVEN))
_SESSION = msgspec.defstruct(
    "SessionInput",
    _optional_fields(SessionParams, [f.name for f in msgspec.structs.fields(SessionParams)]),
)
_PLAIN = [
    *("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "stream"),
    *("return_sampling_mask", "lora_id", "session_id", "custom_logit_processor", "priority"),
    *("routed_experts_start_len", "extra_key", "routing_key", "rid", "bootstrap_host"),
    *("bootstrap_port", "bootstrap_room", "routed_dp_rank", "disagg_prefill_dp_rank"),
]
_REQUEST = msgspec.defstruct("RequestInput", _optional_fields(TokenizedGenerateReqInput, _PLAIN))
_plain_values = attrgetter(*_PLAIN)


def create(original: Callable[..., Any], self: Any, obj: Any, *args: Any, **more: Any) -> Any:
    """AROUND `_create_tokenized_object`. ValueError for what the scheduler could not take."""
    if _over_http:
        check_fields("sampling_params", obj.sampling_params, _SAMPLING)
    if obj.positional_embed_overrides is not None and not isinstance(
        obj.positional_embed_overrides, PositionalEmbeds
    ):
        raise ValueError("positional_embed_overrides: not a field of HTTP requests")
    try:
        made = original(self, obj, *args, **more)
    except BODY_ERRORS as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    vocabulary = self.model_config.vocab_size
    check_ranges(made.sampling_params, vocabulary)
    if isinstance(made, TokenizedGenerateReqInput) and _over_http:
        _check_request(made, vocabulary)
    return made


async def tokenize(original: Callable[..., Awaitable[Any]], self: Any, obj: Any) -> Any:
    """AROUND `_tokenize_one_request`."""
    try:
        return await original(self, obj)
    except BODY_ERRORS as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


@cache
def _names(struct: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(struct.__struct_fields__)


def check_fields(name: str, given: Any, wanted: type[msgspec.Struct]) -> None:
    """ValueError for a field that `wanted` lacks, or of another type."""
    if not isinstance(given, dict):
        raise ValueError(f"{name}: wanted an object, got {type(given).__name__}")
    unknown = given.keys() - _names(wanted)
    if unknown:
        raise ValueError(f"{name}: no field is named {', '.join(sorted(map(str, unknown)))}")
    try:
        msgspec.convert(given, wanted)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}: {error}") from None


def check_ranges(params: Any, vocabulary: int) -> None:
    """ValueError for a number that no tensor of the scheduler can hold."""
    for field, low, high in (
        ("top_k", 1, INT32),
        ("min_new_tokens", 0, INT32),
        ("max_new_tokens", 0, INT64),
        ("stream_interval", 1, INT64),
        ("sampling_seed", -INT64, INT64),
    ):
        _check_range(f"sampling_params.{field}", getattr(params, field), low, high)
    for bias in (params.logit_bias or {}).values():
        _check_range("sampling_params.logit_bias", bias, -LARGEST_BIAS, LARGEST_BIAS)
    _check_range("sampling_params.repetition_penalty", params.repetition_penalty, LEAST_PENALTY, 2)
    if params.min_new_tokens > 0:
        for token in params.stop_token_ids or ():
            _check_range("sampling_params.stop_token_ids", token, 0, vocabulary - 1)


def _check_request(made: Any, vocabulary: int) -> None:
    check_fields("request", dict(zip(_PLAIN, _plain_values(made), strict=True)), _REQUEST)
    if made.session_params is not None:
        session = msgspec.structs.asdict(made.session_params)
        check_fields("session_params", session, _SESSION)
    _check_range("top_logprobs_num", made.top_logprobs_num, 0, vocabulary)
    _check_range("logprob_start_len", made.logprob_start_len, -1, INT64)
    _check_range("routed_experts_start_len", made.routed_experts_start_len, 0, INT64)
    _check_range("priority", made.priority, -INT64, INT64)


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise ValueError(f"{name}: wanted a number from {low} to {high}, got {value}")


HOOKS = (
    Hook(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
        kind="around",
        function=create,
        parameters=(
            *("self", "obj", "input_text", "input_ids", "input_embeds", "mm_inputs"),
            "token_type_ids",
        ),
        reason="a wrong value in a body is an error of its request alone",
    ),
    Hook(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._tokenize_one_request",
        kind="around",
        function=tokenize,
        parameters=("self", "obj"),
        reason="a wrong value in a body is an error of its request alone",
    ),
)

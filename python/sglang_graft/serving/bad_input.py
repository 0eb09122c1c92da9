"""An error that a request's own body causes is 4xx with the reason; a fault of ours stays 5xx.

Targets (0.5.17):
- AROUND `normalize_batch_and_arguments` and `__getitem__` of /generate's and /encode's bodies, and
  AROUND `_convert_to_internal_request` and `_validate_request` of the OpenAI handlers: these look
  at a body and at nothing else, so whatever they run into is in the body. SGLang answers 500.
- the FastAPI application: what the handlers of `BODY_ERRORS_OF` let through of their bodies.
- /v1/messages: SGLang makes 500 of what the chat handler calls a wrong request; see `reading`.

What is raised anywhere else is left alone: it is logged, and answered with 500.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2
from starlette.responses import JSONResponse

from sglang_graft.engine.hooks import Hook
from sglang_graft.serving.route_table import OLLAMA_CHAT, OLLAMA_GENERATE
from sglang_graft.serving.tokenized_checks import BODY_ERRORS, INT32

logger = logging.getLogger(__name__)

MOST_SAMPLES = 1024
"""Answers that one request may ask for, `n`; each is a request of its own in memory."""

_EXPERT_ROUTES = (
    "/start_expert_distribution_record",
    "/stop_expert_distribution_record",
    "/dump_expert_distribution_record",
)

Errors = tuple[type[Exception], ...]

# Path -> what a wrong body makes its handler raise, and nothing else does.
BODY_ERRORS_OF: dict[str, Errors] = {
    # They only work on their bodies.
    "/parse_function_call": (ValueError, *BODY_ERRORS),
    "/separate_reasoning": (ValueError, *BODY_ERRORS),
    # They parse their bodies themselves, and call what reports by its result.
    "/add_external_corpus": (ValueError, TypeError),
    "/remove_external_corpus": (ValueError, AttributeError),
    # They let through what `generate_request`, or the report, says of wrong requests.
    "/v1/loads": (ValueError,),
    OLLAMA_CHAT: (ValueError, jinja2.TemplateError),
    OLLAMA_GENERATE: (ValueError,),
    **dict.fromkeys(_EXPERT_ROUTES, (ValueError,)),
    # The scheduler's own words, when it is or is not profiling already.
    "/start_profile": (RuntimeError,),
    "/stop_profile": (RuntimeError,),
}


class BodyError(BaseException):
    """A wrong request on a route whose handler takes every Exception for a fault of the server."""


_passes_handler: ContextVar[bool] = ContextVar("passes_handler", default=False)


@contextmanager
def body_errors() -> Iterator[None]:
    """In this block a wrong body is a BodyError, which no handler takes for something else."""
    token = _passes_handler.set(True)
    try:
        yield
    finally:
        _passes_handler.reset(token)


def reading(original: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """AROUND what only looks at a body: ValueError, which SGLang answers with 400."""
    try:
        return original(*args, **more)
    except ValueError as error:
        if _passes_handler.get():
            raise BodyError(str(error)) from error
        raise
    except BODY_ERRORS as error:
        message = f"{type(error).__name__}: {error}"
        kind = BodyError if _passes_handler.get() else ValueError
        raise kind(message) from error


def check_tokens(self: Any, request: Any, raw_request: Any) -> None:
    """BEFORE detokenizing: ValueError for numbers that no tokenizer takes."""
    for tokens in request.tokens if isinstance(request.tokens, list) else ():
        for token in tokens if isinstance(tokens, list) else [tokens]:
            if isinstance(token, int) and not 0 <= token <= INT32:
                raise ValueError(f"tokens: wanted numbers from 0 to {INT32}, got {token}")


def normalize(original: Callable[..., Any], self: Any) -> Any:
    """AROUND `normalize_batch_and_arguments`, which copies a body once for each sample."""
    if isinstance(self.input_ids, Mapping):
        self.input_ids = self.input_ids["input_ids"]  # see `serving/ollama`
    params = getattr(self, "sampling_params", None)
    for one in params if isinstance(params, list) else [params]:
        n = one.get("n") if isinstance(one, dict) else None
        if n is not None and not (type(n) is int and 1 <= n <= MOST_SAMPLES):
            raise ValueError(f"n: wanted a number from 1 to {MOST_SAMPLES}, got {n!r}")
    result = reading(original, self)
    ids = [self.rid] if self.is_single else self.rid
    if not (isinstance(ids, list) and all(isinstance(rid, str) for rid in ids)):
        raise ValueError("rid: wanted a text, or one for each prompt of a batch")
    return result


def refuse_record(self: Any) -> None:
    """BEFORE the calls about expert records, which end a scheduler that has no recorder."""
    if self.server_args.expert_distribution_recorder_mode is None:
        raise ValueError("the server runs without --expert-distribution-recorder-mode")


def refuse_memory(self: Any, obj: Any, request: Any = None) -> None:
    """BEFORE releasing or resuming memory: the second ends a scheduler that has released none."""
    raise ValueError("memory is neither released nor resumed: the pool holds adapters and KV")


class BodyErrors:
    """ASGI middleware: 400 for the errors of `BODY_ERRORS_OF`."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Everything else passes untouched."""
        errors = BODY_ERRORS_OF.get(scope.get("path", ""), ())
        try:
            await self.app(scope, receive, send)
        except errors as error:
            logger.warning("%s: bad input: %r", scope["path"], error)
            text = str(error) or type(error).__name__
            content = {"error": {"message": text, "type": "BadRequest", "code": 400}}
            await JSONResponse(content, status_code=400)(scope, receive, send)


_OPENAI = "sglang.srt.entrypoints.openai."
_HANDLERS = (
    "serving_chat.OpenAIServingChat",
    "serving_completions.OpenAIServingCompletion",
    "serving_embedding.OpenAIServingEmbedding",
    "serving_classify.OpenAIServingClassify",
    "serving_score.OpenAIServingScore",
    "serving_rerank.OpenAIServingRerank",
)
_VALIDATING = tuple(handler for handler in _HANDLERS if "score" not in handler)
_CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
_BODIES = ("GenerateReqInput", "EmbeddingReqInput")
_REASON = "a wrong body is an error of its request"

HOOKS = (
    *(
        Hook(
            target=f"{_OPENAI}{handler}._convert_to_internal_request",
            kind="around",
            function=reading,
            parameters=("self", "request", "raw_request"),
            reason=_REASON,
        )
        for handler in _HANDLERS
    ),
    *(
        Hook(
            target=f"{_OPENAI}{handler}._validate_request",
            kind="around",
            function=reading,
            parameters=("self", "request"),
            reason=_REASON,
        )
        for handler in _VALIDATING
    ),
    *(
        Hook(
            target=f"{_CONTROL}.{path.removeprefix('/')}",
            kind="before",
            function=refuse_record,
            parameters=("self",),
            reason="a call that the scheduler cannot serve does not end it",
        )
        for path in _EXPERT_ROUTES
    ),
    *(
        Hook(
            target=f"{_CONTROL}.{name}_memory_occupation",
            kind="before",
            function=refuse_memory,
            parameters=("self", "obj", "request"),
            reason="a call that the scheduler cannot serve does not end it",
        )
        for name in ("release", "resume")
    ),
    Hook(
        target=f"{_OPENAI}serving_tokenize.OpenAIServingDetokenize._convert_to_internal_request",
        kind="before",
        function=check_tokens,
        parameters=("self", "request", "raw_request"),
        reason=_REASON,
    ),
    *(
        Hook(
            target=f"sglang.srt.managers.io_struct.{body}.normalize_batch_and_arguments",
            kind="around",
            function=normalize,
            parameters=("self",),
            reason=_REASON,
        )
        for body in _BODIES
    ),
    *(
        Hook(
            target=f"sglang.srt.managers.io_struct.{body}.__getitem__",
            kind="around",
            function=reading,
            parameters=("self", "i"),
            reason="a list that is shorter than its batch is an error of its request",
        )
        for body in _BODIES
    ),
)

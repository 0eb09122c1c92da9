"""Bodies of SGLang's routes, with the fields by which clients of other servers name adapters.

SGLang's own bodies drop fields that they do not know, so a request with `lora_name` would be
answered by the base model.
"""

from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import BaseModel, ModelWrapValidatorHandler, model_validator
from sglang.srt.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

from sglang_graft.serving.tokenized_checks import BODY_ERRORS


class _Named(BaseModel):
    lora_name: str | None = None
    """The adapter, as gateways made for vLLM send it."""

    @model_validator(mode="wrap")
    @classmethod
    def _whole(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """SGLang's own validators take any JSON for an object, and fail with 500."""
        try:
            return handler(values)
        except BODY_ERRORS as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


class _Pathed(_Named):
    lora_path: str | None = None
    """The adapter, as SGLang's own routes take it."""


class ChatBody(_Named, ChatCompletionRequest):
    """POST /v1/chat/completions."""


class CompletionBody(_Named, CompletionRequest):
    """POST /v1/completions."""


class EmbeddingBody(_Named, EmbeddingRequest):
    """POST /v1/embeddings."""


class MessagesBody(_Pathed, AnthropicMessagesRequest):
    """POST /v1/messages."""


class CountBody(_Pathed, AnthropicCountTokensRequest):
    """POST /v1/messages/count_tokens."""


class TokenizeBody(_Pathed, TokenizeRequest):
    """POST /tokenize; with `messages`, by the adapter's own chat template."""


@dataclass
class GenerateBody(GenerateReqInput):
    """POST /generate."""

    model: str | None = field(default=None, kw_only=True)
    lora_name: str | None = field(default=None, kw_only=True)


@dataclass
class EncodeBody(EmbeddingReqInput):
    """POST /encode and /classify."""

    model: str | None = field(default=None, kw_only=True)
    lora_name: str | None = field(default=None, kw_only=True)

"""What every HTTP route does, and hence who may call it.

Target (0.5.17): `utils.auth._get_auth_level_from_app_and_scope`. Reasons: SGLang leaves some routes
that change the server open to all (/load_lora_adapter_from_tensors, /set_trace_level, sessions),
and it does not find the level of a route that was added by `include_router`: such routes were open
whatever their decorator says. Here a route needs the admin key unless the table says otherwise.
"""

import os
from collections.abc import Callable
from enum import Enum
from typing import Any

from sglang.srt.utils.auth import AuthLevel
from starlette.routing import Match, Route

from sglang_graft.engine.hooks import Hook


class Does(Enum):
    """What a route does; the last two need the admin key where one is set."""

    READS = "tells about the server"
    SERVES = "answers a request of its own, and may load adapters below --graft-adapter-root"
    SHOWS = "gives static files of Graft, also without any key (see page_routes)"
    OPERATES = "tells what only operators should see"
    CHANGES = "changes what other requests get, or what the server holds afterwards"


# Routes that SGLang lets the environment rename.
OLLAMA_CHAT = os.environ.get("SGLANG_OLLAMA_CHAT_ROUTE", "/api/chat")
OLLAMA_GENERATE = os.environ.get("SGLANG_OLLAMA_GENERATE_ROUTE", "/api/generate")
OLLAMA_TAGS = os.environ.get("SGLANG_OLLAMA_TAGS_ROUTE", "/api/tags")
OLLAMA_SHOW = os.environ.get("SGLANG_OLLAMA_SHOW_ROUTE", "/api/show")
VERTEX = os.environ.get("AIP_PREDICT_ROUTE", "/vertex_generate")

_PATHS = {
    Does.READS: f"""
        / /openapi.json /docs /docs/oauth2-redirect /redoc /metrics /metrics/
        /ping /health /health/ready
        /get_model_info /model_info /get_weight_version /weight_version
        /get_server_info /server_info /get_load /v1/loads /v1/models /v1/models/{{model:path}}
        {OLLAMA_TAGS} {OLLAMA_SHOW}
    """,
    Does.SERVES: f"""
        /health_generate /generate /encode /classify /invocations {VERTEX}
        /v1/completions /v1/chat/completions /v1/embeddings /v1/classify /v1/score /v1/rerank
        /v1/responses /v1/responses/{{response_id}} /v1/responses/{{response_id}}/cancel
        /v1/messages /v1/messages/count_tokens /v1/audio/transcriptions /v1/realtime
        /tokenize /v1/tokenize /detokenize /v1/detokenize /parse_function_call /separate_reasoning
        {OLLAMA_CHAT} {OLLAMA_GENERATE}
    """,
    Does.SHOWS: "/graft /graft/page/{name}",
    Does.OPERATES: """
        /graft/pool /graft/requests /graft/overview /graft/why/{name:path}
        /list_external_corpora /is_scaling_elastic_ep /get_weights_by_name
        /get_remote_instance_transfer_engine_info /remote_instance_transfer_engine_info
    """,
    Does.CHANGES: """
        /graft/adapters /graft/adapters/{name:path} /graft/aliases /graft/aliases/{alias:path}
        /graft/tenants /graft/tenants/undo
        /graft/drain /set_internal_state /flush_cache /add_external_corpus /remove_external_corpus
        /clear_hicache_storage_backend /hicache/storage-backend/clear /hicache/storage-backend
        /start_profile /stop_profile /set_trace_level /freeze_gc /configure_logging
        /start_expert_distribution_record /stop_expert_distribution_record
        /dump_expert_distribution_record /scale_elastic_ep /slow_down
        /update_weights_from_disk /update_weights_from_tensor /update_weights_from_distributed
        /update_weights_from_ipc /update_weight_version /weights_checker
        /init_weights_send_group_for_remote_instance /send_weights_to_remote_instance
        /init_weights_update_group /destroy_weights_update_group
        /release_memory_occupation /resume_memory_occupation
        /load_lora_adapter /load_lora_adapter_from_tensors /unload_lora_adapter
        /v1/load_lora_adapter /v1/unload_lora_adapter
        /open_session /close_session /abort_request /pause_generation /continue_generation
    """,
}
TABLE = {path: does for does, paths in _PATHS.items() for path in paths.split()}


def _nowhere() -> None:
    raise AssertionError("these routes only match paths")


_FREE = (Does.READS, Does.SERVES, Does.SHOWS)
_MATCHERS = [(Route(path, _nowhere), does) for path, does in TABLE.items()]


def what_it_does(scope: Any) -> Does | None:
    """What the route of an ASGI scope does, whatever its method; None for a path not in TABLE."""
    for route, does in _MATCHERS:
        if route.matches(scope)[0] != Match.NONE:
            return does
    return None


def level(original: Callable[..., Any], app: Any, scope: Any) -> AuthLevel:
    """AROUND `_get_auth_level_from_app_and_scope`: never less than SGLang's own."""
    own = original(app, scope)
    if own == AuthLevel.NORMAL and what_it_does(scope) not in _FREE:
        return AuthLevel.ADMIN_OPTIONAL
    return AuthLevel(own)


HOOKS = (
    Hook(
        target="sglang.srt.utils.auth._get_auth_level_from_app_and_scope",
        kind="around",
        function=level,
        parameters=("app", "scope"),
        reason="what changes the server needs the admin key",
    ),
)

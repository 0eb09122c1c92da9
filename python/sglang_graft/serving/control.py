"""Ask the scheduler to run an operation of `engine/control`."""

import asyncio
from typing import Any

from sglang_graft.engine import control


class RefusedOperationError(ValueError):
    """The scheduler refused an operation, and changed nothing."""


async def ask(manager: Any, operation: str, **arguments: Any) -> dict[str, Any]:
    """The reply of the scheduler behind SGLang's tokenizer `manager`; arguments are plain JSON.

    Raises RefusedOperationError with the scheduler's reason.
    """
    manager.auto_create_handle_loop()
    message = control.message(operation, arguments)
    # A caller that gives up must not leave the scheduler's answer to the next one.
    sent = asyncio.ensure_future(manager.get_internal_state_communicator(message))
    (result,) = await asyncio.shield(sent)
    state = result.internal_state
    if control.ERROR in state:
        raise RefusedOperationError(state[control.ERROR])
    reply: dict[str, Any] = state[control.REPLY]
    return reply

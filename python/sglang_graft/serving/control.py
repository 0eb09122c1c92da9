"""Ask the scheduler to run an operation of `engine/control`."""

from typing import Any

from sglang_graft.engine import control


class RefusedOperationError(ValueError):
    """The scheduler refused an operation, and changed nothing."""


async def ask(manager: Any, operation: str, **arguments: Any) -> dict[str, Any]:
    """The reply of the scheduler behind SGLang's tokenizer `manager`; arguments are plain JSON.

    Raises RefusedOperationError with the scheduler's reason.
    """
    manager.auto_create_handle_loop()
    (result,) = await manager.get_internal_state_communicator(control.message(operation, arguments))
    state = result.internal_state
    if control.ERROR in state:
        raise RefusedOperationError(state[control.ERROR])
    reply: dict[str, Any] = state[control.REPLY]
    return reply

"""Who may use the device beside the scheduler's thread, and when.

While a CUDA graph is captured, a call of another thread that allocates or waits makes the capture
fail, and its own launches could end up in it. Threads that read adapters need the device only for
those that depend on the base model's weights.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sglang_graft.adapters import BaseWeight


class GateClosedError(RuntimeError):
    """The start has ended without this read: nobody waits for it."""


class DeviceGate:
    """Open at first. `close` it before a capture, `open` it behind it, `stop` it to give up."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_open = True
        self._has_stopped = False
        self._inside = 0

    @contextmanager
    def visit(self, base_weight: BaseWeight | None) -> Iterator[BaseWeight | None]:
        """`base_weight` for one read; from its first call to the end the device is the read's.

        The call waits for an open gate; GateClosedError once it is stopped.
        """
        entered = False

        def read(layer: int | None, linear: str) -> tuple[torch.Tensor, torch.Tensor | None]:
            nonlocal entered
            assert base_weight is not None, "there are no base weights to read"
            if not entered:
                self._enter()
                entered = True
            return base_weight(layer, linear)

        try:
            yield None if base_weight is None else read
        finally:
            if entered:
                self._leave()

    def close(self) -> None:
        """Let nobody in, and wait for those inside, whose work on the device has ended then."""
        with self._changed:
            self._is_open = False
            self._changed.wait_for(lambda: not self._inside)

    def open(self) -> None:
        """Let in those that wait."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Turn away those that wait, and all that come."""
        with self._changed:
            self._has_stopped = True
            self._changed.notify_all()

    def _enter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_open or self._has_stopped)
            if self._has_stopped:
                raise GateClosedError("the start has ended")
            self._inside += 1

    def _leave(self) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

"""The one error of this package: an adapter that cannot be applied exactly."""

from pathlib import Path


class AdapterError(ValueError):
    """An adapter is refused as a whole; nothing of it was registered or kept.

    Catch it where an adapter is loaded: the caller gets the text, the server goes on. `file` is the
    file (or folder) at fault, `item` the tensor or config key, `reason` says wanted and got.
    """

    def __init__(self, file: Path, item: str, reason: str) -> None:
        super().__init__(file, item, reason)
        self.file = file
        self.item = item
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.file}: {self.item}: {self.reason}"

"""The one error of this package: an adapter that cannot be applied exactly."""

import reprlib
from pathlib import Path

_LONGEST = 400

_REPR = reprlib.Repr()
_REPR.maxlevel = 3
_REPR.maxstring = _REPR.maxother = 200
_REPR.maxdict = _REPR.maxlist = 8


def show(value: object) -> str:
    """`repr(value)`, kept short and shallow: what a file holds may be huge or nested deeply."""
    return _REPR.repr(value)


class AdapterError(ValueError):
    """An adapter is refused as a whole; nothing of it was registered or kept.

    Catch it where an adapter is loaded: the caller gets the text, the server goes on. `file` is the
    file (or folder) at fault, `item` the tensor or config key, `reason` says wanted and got. The
    text is one printable line of bounded length, whatever the file holds.
    """

    def __init__(self, file: Path, item: str, reason: str) -> None:
        super().__init__(file, item, reason)
        self.file = file
        self.item = item
        self.reason = reason

    def __str__(self) -> str:
        return ": ".join(map(_one_line, (str(self.file), self.item, self.reason)))


def _one_line(text: str) -> str:
    # Names come from the file: a line break or half a surrogate pair would break logs and replies.
    plain = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    if len(plain) <= _LONGEST:
        return plain
    return f"{plain[: _LONGEST // 2]} ... {plain[-_LONGEST // 2 :]}"

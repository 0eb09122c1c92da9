"""What an unload gives back, as it travels from the scheduler to the HTTP process.

SGLang's `LoRAUpdateOutput` (0.5.17) has one field for text, `error_message`, which a success leaves
empty: the numbers go there as JSON, and `serving/unload` takes them out again.
"""

import json
from typing import NamedTuple


class Freed(NamedTuple):
    """Pages freed at once, and pages that follow when the last request has ended."""

    pages: int
    following: int
    page_bytes: int

    def to_text(self) -> str:
        """JSON for `LoRAUpdateOutput.error_message`."""
        return json.dumps(self._asdict())

    @classmethod
    def from_text(cls, text: str) -> "Freed":
        """Undo `to_text`."""
        return cls(**json.loads(text))

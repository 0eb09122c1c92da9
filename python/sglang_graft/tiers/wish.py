"""What a waiting request wants of the tiers, and what it waits for."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass

from sglang_graft.cache import AdapterNode
from sglang_graft.cache.shares import Share


@dataclass(frozen=True, slots=True, eq=False)
class Wish:
    """A waiting request: `key` is its id, `tokens` its prompt, `salt` the client's cache space.

    Its adapter is loaded as pages of `share`, None is the common one.
    """

    key: str
    node: AdapterNode
    tokens: array[int]
    salt: str = ""
    share: Share | None = None


class Need(enum.Enum):
    """What a wish waits for."""

    NOTHING = "nothing"
    DISK = "disk"  # its image is being read
    COPY = "copy"  # its bytes are on their way to the device
    ROOM = "room"  # no pages for its adapter now
    CAP = "cap"  # no pages for its adapter below the cap of its share: nobody else can help
    FAILED = "failed"  # its image could not be read

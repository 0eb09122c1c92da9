"""A tenant within its floor does not wait for what others bring into the same pass.

A prefill batch ends for all of its requests at once, and reading an adapter from disk takes
Python's lock from the scheduler. So a pass that admits a request of a tenant within its floor
admits nobody else's, and while such a request waits, nobody else's adapter is newly looked at.
Others would starve behind a steady stream of such requests; so after `PATIENCE` such passes in a
row comes one in which they are taken as ever.
"""

from collections.abc import Iterable

from sglang_graft.cache.shares import Share

PATIENCE = 4


def is_within_floor(share: Share) -> bool:
    """Whether what runs for a tenant takes no more than its floor.

    What is only cached does not count: others may take that beyond the floor at any time.
    """
    return share.floor > 0 and share.running + share.protected <= share.floor


class Precedence:
    """Of one scheduler. `begin_pass` first, then the others in the order of the queue."""

    def __init__(self) -> None:
        self._within: set[Share] = set()
        self._admitted = False
        self._held_back = False
        self._passes = 0
        """Passes in a row in which somebody was held back."""

    def begin_pass(self, shares: Iterable[Share]) -> None:
        """A pass over the waiting queue."""
        self._passes = self._passes + 1 if self._held_back else 0
        self._within = {share for share in shares if is_within_floor(share)}
        self._admitted = self._held_back = False

    def admitted(self, share: Share) -> None:
        """A request of `share` was admitted in this pass."""
        self._admitted |= share in self._within

    def waits_for_others(self, share: Share) -> bool:
        """Whether a request of `share` may not be admitted beside those of this pass."""
        return self._admitted and self._holds_back(share)

    def comes_later(self, share: Share, waiting: set[Share]) -> bool:
        """Whether nothing is begun for a request of `share` that came while `waiting` wait."""
        return not self._within.isdisjoint(waiting) and self._holds_back(share)

    def _holds_back(self, share: Share) -> bool:
        if share in self._within or self._passes >= PATIENCE:
            return False
        self._held_back = True
        return True

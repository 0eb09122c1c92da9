"""How much memory SGLang's scheduler keeps free for the answers of running requests.

SGLang 0.5.17 admits a request when its prompt and its own whole answer fit beside what is held and
a part of what the running requests may still generate: the new-token ratio. It starts anew after
each pause, decays with every decode step, and when memory runs out nevertheless, a request is
retracted and the ratio becomes what the others have used of their answers so far. Figures are the
defaults there, with `--schedule-conservativeness` 1 and no `SGLANG_*` variable set.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

FIRST_RATIO = 0.7
LEAST_RATIO = 0.14 * FIRST_RATIO
DECAY_STEPS = 600
"""Decode steps from the first ratio to the least."""
STEPS_AFTER_RETRACTION = 20
"""Decode steps for which a retraction shall leave room."""
MOST_TOKENS = 4096
"""No more new tokens than these are expected of a request."""


@dataclass(slots=True)
class Reserve:
    """The new-token ratio, as it is now."""

    ratio: float = FIRST_RATIO

    def pause(self) -> None:
        """Nothing runs and nothing waits."""
        self.ratio = FIRST_RATIO

    def decode(self, steps: int) -> None:
        """So many steps were made without a retraction."""
        decay = (FIRST_RATIO - LEAST_RATIO) / DECAY_STEPS
        self.ratio = max(self.ratio - steps * decay, LEAST_RATIO)

    def retracted(self, made: Iterable[int], most: Iterable[int]) -> None:
        """Memory ran out; by request that stays: tokens it has generated, tokens it may generate.

        The ratio may end up below the least one, until the next step.
        """
        used = [tokens + STEPS_AFTER_RETRACTION for tokens in made]
        self.ratio = min(1.0, sum(used) / (sum(most) + 1))

    def tokens(self, left: Iterable[int]) -> float:
        """Kept for running requests that may generate `left` more tokens each."""
        return self.ratio * sum(min(tokens, MOST_TOKENS) for tokens in left)

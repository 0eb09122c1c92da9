"""A token bucket that may be overdrawn: who overdraws it waits longer."""

import math


class Bucket:
    """`rate` units a second, at most `burst` seconds' worth saved; starts full.

    Takes are never refused: a request's answer is paid for when its length is known. `wait` says
    when something may begin again. Times are seconds of any clock that never goes back.
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate = rate
        self.most = max(1.0, rate * burst)
        self._left = self.most
        self._at = now

    def take(self, units: float, now: float) -> None:
        """Take `units`, also more than there are; a negative number gives them back."""
        self._left = min(self.most, self.left(now) - units)
        self._at = max(now, self._at)

    def left(self, now: float) -> float:
        """Units there now; negative after an overdraft."""
        return min(self.most, self._left + max(0.0, now - self._at) * self.rate)

    def wait(self, now: float) -> float:
        """Seconds until one whole unit is there, 0 when it is there now."""
        missing = 1.0 - self.left(now)
        return max(0.0, missing / self.rate)

    def change(self, rate: float, burst: float, now: float) -> None:
        """New limits; what was overdrawn stays so."""
        self.take(0, now)
        self.rate, self.most = rate, max(1.0, rate * burst)
        self._left = min(self._left, self.most)


def retry_after(seconds: float) -> str:
    """The value of a Retry-After header: whole seconds, at least one."""
    return str(max(1, math.ceil(seconds)))

"""What moving and computing cost here: the prices of the cost model."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Prices of one window; every replica must hold the same ones.

    Defaults: pinned copies as measured on an H200 (50.7 GB/s); a disk of 2 GB/s is assumed. Prefill
    is computed for an 8B model of Llama-3.1's shape at 500 TFLOP/s: 2 * 8.03e9 FLOP a token, and
    4 * 32 layers * 4096 FLOP for each token before it.
    """

    h2d_bytes_per_s: float = 50.7e9
    disk_bytes_per_s: float = 2e9
    prefill_s_per_token: float = 2 * 8.03e9 / 500e12
    prefill_s_per_token_pair: float = 4 * 32 * 4096 / 500e12

    def __post_init__(self) -> None:
        for name in ("h2d_bytes_per_s", "disk_bytes_per_s", "prefill_s_per_token"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name}: wanted more than 0, got {value}")
        if self.prefill_s_per_token_pair < 0:
            raise ValueError(
                f"prefill_s_per_token_pair: wanted 0 or more, got {self.prefill_s_per_token_pair}"
            )

    def load_seconds(self, nbytes: float) -> float:
        """Seconds to copy from the host to the device."""
        return nbytes / self.h2d_bytes_per_s

    def read_seconds(self, nbytes: float) -> float:
        """Seconds to read from the disk into the host."""
        return nbytes / self.disk_bytes_per_s

    def prefill_seconds(self, tokens: float, depth: float) -> float:
        """Seconds to compute `tokens` whose first one stands at position `depth`."""
        pairs = tokens * (depth + tokens / 2)
        return tokens * self.prefill_s_per_token + pairs * self.prefill_s_per_token_pair


@dataclass(slots=True)
class _Speed:
    """Bytes and seconds of one window."""

    nbytes: float = 0.0
    seconds: float = 0.0

    def rate(self, smallest: int) -> float | None:
        enough = self.nbytes >= smallest and self.seconds > 0
        return self.nbytes / self.seconds if enough else None


@dataclass(slots=True)
class RateMeter:
    """Gathers observations and turns them into `Rates`, one window after the other.

    `current` changes in `freeze` alone, so that decisions within a window use equal prices. With
    several ranks, one of them freezes and the others are given its `current`: seconds differ
    between ranks, decisions must not.
    """

    current: Rates = field(default_factory=Rates)
    smallest_copy: int = 2**20
    """A window that moved fewer bytes says nothing: latency would pass for bandwidth."""
    prefills_kept: int = 256
    least_change: float = 0.2
    """Smaller relative changes are noise, and each change orders everything anew."""
    _h2d: _Speed = field(default_factory=_Speed)
    _disk: _Speed = field(default_factory=_Speed)
    _prefills: deque[tuple[float, float, float]] = field(default_factory=deque)

    def h2d(self, nbytes: int, seconds: float) -> None:
        """A copy from the host to the device took `seconds`."""
        self._add(self._h2d, nbytes, seconds)

    def disk(self, nbytes: int, seconds: float) -> None:
        """A read from the disk took `seconds`."""
        self._add(self._disk, nbytes, seconds)

    def prefill(self, tokens: int, depth: int, seconds: float) -> None:
        """A forward over `tokens` prompt tokens behind `depth` cached ones took `seconds`."""
        self.forward([(tokens, depth)], seconds)

    def forward(self, prompts: Iterable[tuple[int, int]], seconds: float) -> None:
        """A forward over prompts, each (tokens, cached ones before them), took `seconds`."""
        tokens, pairs = 0, 0.0
        for length, depth in prompts:
            if length < 1 or depth < 0:
                raise ValueError(f"prefill: got {length} tokens at depth {depth} in {seconds} s")
            tokens += length
            pairs += length * (depth + length / 2)
        if not tokens or not seconds > 0:
            raise ValueError(f"prefill: got {tokens} tokens in {seconds} s")
        self._prefills.append((float(tokens), pairs, seconds))
        if len(self._prefills) > self.prefills_kept:
            self._prefills.popleft()

    def freeze(self) -> bool:
        """End the window; True if the prices changed (then `UnifiedTree.reprice`).

        They change together, as soon as one of them has moved by `least_change`.
        """
        before = self.current
        token, pair = self._fit()
        now = replace(
            before,
            h2d_bytes_per_s=self._h2d.rate(self.smallest_copy) or before.h2d_bytes_per_s,
            disk_bytes_per_s=self._disk.rate(self.smallest_copy) or before.disk_bytes_per_s,
            prefill_s_per_token=token,
            prefill_s_per_token_pair=pair,
        )
        self._h2d, self._disk = _Speed(), _Speed()
        if not self._moved(before, now):
            return False
        self.current = now
        return True

    def load_seconds(self, nbytes: float) -> float:
        """Of the current window."""
        return self.current.load_seconds(nbytes)

    def prefill_seconds(self, tokens: float, depth: float) -> float:
        """Of the current window."""
        return self.current.prefill_seconds(tokens, depth)

    def _moved(self, before: Rates, now: Rates) -> bool:
        names = (field.name for field in fields(Rates))
        both = [(getattr(before, name), getattr(now, name)) for name in names]
        return any(abs(b - a) > self.least_change * max(a, b) for a, b in both)

    @staticmethod
    def _add(speed: _Speed, nbytes: int, seconds: float) -> None:
        if nbytes < 0 or seconds < 0:
            raise ValueError(f"copy: got {nbytes} bytes in {seconds} s")
        speed.nbytes += nbytes
        speed.seconds += seconds

    def _fit(self) -> tuple[float, float]:
        """Least squares of seconds over (tokens, pairs); a share below 0 is set to 0.

        The fit goes through the origin: what a forward costs without any token is paid once a step
        whatever is cached, so it is no price of a token.
        """
        tokens = sum(t * t for t, _, _ in self._prefills)
        if tokens == 0:
            return self.current.prefill_s_per_token, self.current.prefill_s_per_token_pair
        cross = sum(t * p for t, p, _ in self._prefills)
        pairs = sum(p * p for _, p, _ in self._prefills)
        by_token = sum(t * s for t, _, s in self._prefills)
        by_pair = sum(p * s for _, p, s in self._prefills)
        determinant = tokens * pairs - cross * cross
        if determinant > 1e-9 * tokens * pairs:
            token = (by_token * pairs - by_pair * cross) / determinant
            pair = (by_pair * tokens - by_token * cross) / determinant
            if token > 0 and pair >= 0:
                return token, pair
        return by_token / tokens, 0.0

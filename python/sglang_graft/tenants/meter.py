"""What each tenant has used of its rates."""

from collections.abc import Callable, Mapping

from sglang_graft.tenants.bucket import Bucket
from sglang_graft.tenants.file import Tenant


class Meter:
    """Two buckets a tenant, requests and tokens, on an injected clock (seconds, monotonic)."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}
        self.refused: dict[str, int] = {}
        """Requests answered with 429 since start, by tenant."""

    def configure(self, tenants: Mapping[str, Tenant]) -> None:
        """Take the limits of `tenants`; a tenant that stays keeps its level."""
        for buckets, field in (
            (self._requests, "requests_per_second"),
            (self._tokens, "tokens_per_second"),
        ):
            for name in [name for name in buckets if name not in tenants]:
                del buckets[name]
            for name, tenant in tenants.items():
                self._set(buckets, name, getattr(tenant, field), tenant.burst_seconds)

    def admit(self, tenant: str) -> float:
        """0 and one request counted, or the seconds until one may come."""
        now = self._clock()
        found = (buckets.get(tenant) for buckets in (self._requests, self._tokens))
        wait = max((bucket.wait(now) for bucket in found if bucket is not None), default=0.0)
        if wait > 0:
            self.refused[tenant] = self.refused.get(tenant, 0) + 1
        else:
            self.requests(tenant, 1)
        return wait

    def requests(self, tenant: str, count: int) -> None:
        """Count further requests, such as the prompts of one batch after the first."""
        self._take(self._requests, tenant, count)

    def tokens(self, tenant: str, count: int) -> None:
        """Count tokens of prompts and answers."""
        self._take(self._tokens, tenant, count)

    def _take(self, buckets: dict[str, Bucket], tenant: str, count: int) -> None:
        bucket = buckets.get(tenant)
        if bucket is not None and count:
            bucket.take(count, self._clock())

    def _set(self, buckets: dict[str, Bucket], name: str, rate: float | None, burst: float) -> None:
        if rate is None:
            buckets.pop(name, None)
        elif name in buckets:
            buckets[name].change(rate, burst, self._clock())
        else:
            buckets[name] = Bucket(rate, burst, self._clock())

"""Seeded workloads: which adapter is asked what, when, and how long the answer is.

A workload is a list of conversations. A request's prompt is a list of segments; segments of one
key are the same tokens everywhere, so sharing needs no stored text. Arrivals are open for first
turns; a later turn comes `think_s` after the turn before it has ended, whenever that is.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

# A segment opens with its key in digits of this base, so that two keys never make equal tokens.
_BASE = 2**15 - 1
_DIGITS = 3
FIRST_TOKEN = 256
"""Token ids start here: small ones are control tokens in most vocabularies."""
SMALLEST_VOCABULARY = FIRST_TOKEN + _BASE
_FILLER = array("q")
_FILLER.frombytes(
    (
        np.random.default_rng(20250727).integers(0, _BASE, 2**17, dtype=np.int64) + FIRST_TOKEN
    ).tobytes()
)

_SWING_S = 60.0
_DRIFT_S = 60.0


@dataclass(frozen=True, slots=True)
class Segment:
    """`length` tokens that `key` names. `generated`: a server produces them itself."""

    key: int
    length: int
    generated: bool = False

    def tokens(self) -> array[int]:
        """Its token ids `[length]` int64, in FIRST_TOKEN .. SMALLEST_VOCABULARY - 1."""
        start = self.key * 7919 % (len(_FILLER) // 2)
        found = _FILLER[start : start + self.length]
        while len(found) < self.length:
            found += found[: self.length - len(found)]
        rest = self.key
        for place in range(min(_DIGITS, self.length)):
            rest, digit = divmod(rest, _BASE)
            found[place] = digit + FIRST_TOKEN
        return found


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """An adapter of the workload; all its linear modules have this rank."""

    name: str
    rank: int


@dataclass(frozen=True, slots=True)
class Request:
    """One turn.

    arrival_s: when a first turn comes; a later one comes `think_s` after the end of the turn before
    it (`previous`, an index of the same list).   adapter: index of Workload.adapters.
    prompt: what is sent, earlier answers included.   output: what is generated.
    """

    adapter: int
    prompt: tuple[Segment, ...]
    output: Segment
    arrival_s: float = 0.0
    previous: int | None = None
    think_s: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return sum(segment.length for segment in self.prompt)

    def tokens(self) -> array[int]:
        """The prompt and then the output, as token ids."""
        found = array("q")
        for segment in (*self.prompt, self.output):
            found += segment.tokens()
        return found


@dataclass(frozen=True, slots=True)
class Workload:
    """Adapters and the requests to them; every request stands behind its `previous`."""

    name: str
    seed: int
    adapters: tuple[AdapterSpec, ...]
    requests: tuple[Request, ...]


@dataclass(slots=True)
class _Maker:
    """Draws from one seeded stream and hands out segment keys."""

    seed: int
    requests: list[Request] = field(default_factory=list)
    random: np.random.Generator = field(init=False)
    _keys: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def segment(self, length: int, *, generated: bool = False) -> Segment:
        self._keys += 1
        return Segment(self._keys, length, generated)

    def times(self, rate: float, cv: float = 1.0) -> Iterator[float]:
        """Arrival seconds with gamma gaps of mean 1/rate; cv 1 is a Poisson process."""
        shape, now = cv**-2, 0.0
        while True:
            now += self.random.gamma(shape, 1 / (shape * rate))
            yield now

    def session(
        self,
        adapter: int,
        at: float,
        first: tuple[Segment, ...],
        turns: int,
        lengths: tuple[int, int],
        think_s: tuple[float, float],
    ) -> None:
        """A conversation: `first`, then `lengths` = (asked, answered) tokens a turn."""
        prompt, previous = first, None
        for _ in range(turns):
            prompt = (*prompt, self.segment(lengths[0]))
            output = self.segment(lengths[1], generated=True)
            think = self.random.uniform(*think_s) if previous is not None else 0.0
            self.requests.append(Request(adapter, prompt, output, at, previous, think))
            previous = len(self.requests) - 1
            prompt = (*prompt, output)


def zipf(count: int, exponent: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Cumulative shares `[count]` of ranks 1..count under Zipf's law."""
    weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    shares: np.ndarray[tuple[int], np.dtype[np.float64]] = np.cumsum(weights / weights.sum())
    return shares


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much of a workload; None takes the protocol's figure."""

    requests: int = 3000
    adapters: int | None = None
    rate: float | None = None
    """First turns in a second."""


Generator = Callable[[_Maker, Size], tuple[AdapterSpec, ...]]


def _adapters(count: int, *ranks: int) -> tuple[AdapterSpec, ...]:
    """`count` adapters whose ranks alternate."""
    return tuple(AdapterSpec(f"adapter-{i}", ranks[i % len(ranks)]) for i in range(count))


def _uniform_cold(make: _Maker, size: Size) -> tuple[AdapterSpec, ...]:
    """Every adapter alike, prompts without any sharing."""
    adapters = _adapters(size.adapters or 32, 16)
    for at in make.times(size.rate or 8.0):
        if len(make.requests) >= size.requests:
            break
        make.session(int(make.random.integers(len(adapters))), at, (), 1, (1024, 64), (0, 0))
    return adapters


def _chat(make: _Maker, size: Size) -> tuple[AdapterSpec, ...]:
    """Conversations of four turns below a system prompt that an adapter's users share."""
    adapters = _adapters(size.adapters or 64, 16, 32)
    system = [make.segment(512) for _ in adapters]
    share = zipf(len(adapters), 1.0)
    for at in make.times(size.rate or 2.0):
        if len(make.requests) >= size.requests:
            break
        chosen = int(np.searchsorted(share, make.random.random()))
        make.session(chosen, at, (system[chosen],), 4, (256, 64), (2.0, 5.0))
    return adapters


def _translation(make: _Maker, size: Size) -> tuple[AdapterSpec, ...]:
    """Bursts without sharing; each minute the ranking of adapters turns by a fifth."""
    adapters = _adapters(size.adapters or 50, 32)
    share = zipf(len(adapters), 1.0)
    for at in make.times(size.rate or 4.0, cv=4.0):
        if len(make.requests) >= size.requests:
            break
        place = int(np.searchsorted(share, make.random.random()))
        shift = int(at // _DRIFT_S) * max(1, len(adapters) // 5)
        length = int(make.random.integers(128, 513))
        chosen = (place + shift) % len(adapters)
        make.session(chosen, at, (), 1, (length, length), (0, 0))
    return adapters


def _agents(make: _Maker, size: Size) -> tuple[AdapterSpec, ...]:
    """Eight short turns below a long tool prompt; a turn follows when its tool has answered."""
    adapters = _adapters(size.adapters or 20, 64)
    tools = [make.segment(2048) for _ in adapters]
    for at in make.times(size.rate or 0.5):
        if len(make.requests) >= size.requests:
            break
        chosen = int(make.random.integers(len(adapters)))
        make.session(chosen, at, (tools[chosen],), 8, (128, 32), (0.5, 2.0))
    return adapters


def _swing(make: _Maker, size: Size) -> tuple[AdapterSpec, ...]:
    """A minute of many adapters with short prompts, a minute of one adapter and long documents.

    A document of 16k tokens is asked two questions in a row.
    """
    adapters = _adapters(size.adapters or 64, 16)
    many, one = make.times(size.rate or 8.0), make.times((size.rate or 8.0) / 32)
    at, documents_at = next(many), next(one)
    while len(make.requests) < size.requests:
        if at <= documents_at:
            if int(at // _SWING_S) % 2 == 0:
                chosen = int(make.random.integers(1, len(adapters)))
                make.session(chosen, at, (), 1, (128, 64), (0, 0))
            at = next(many)
        else:
            if int(documents_at // _SWING_S) % 2 == 1:
                document = (make.segment(16384 - 64),)
                make.session(0, documents_at, document, 2, (64, 64), (2.0, 5.0))
            documents_at = next(one)
    return adapters


def _many(make: _Maker, size: Size) -> tuple[AdapterSpec, ...]:
    """A thousand adapters of mixed rank, one turn each time."""
    adapters = _adapters(size.adapters or 1000, 8, 16, 32, 64)
    system = [make.segment(512) for _ in adapters]
    share = zipf(len(adapters), 1.1)
    places = make.random.permutation(len(adapters))  # popularity has nothing to do with rank
    for at in make.times(size.rate or 8.0):
        if len(make.requests) >= size.requests:
            break
        chosen = int(places[np.searchsorted(share, make.random.random())])
        make.session(chosen, at, (system[chosen],), 1, (256, 64), (0, 0))
    return adapters


GENERATORS: dict[str, Generator] = {
    "uniform-cold": _uniform_cold,
    "chat": _chat,
    "translation": _translation,
    "agents": _agents,
    "swing": _swing,
    "many": _many,
}
"""The protocol's workloads by name."""


def generate(name: str, *, seed: int = 0, size: Size | None = None) -> Workload:
    """The workload called `name`, the same for the same seed and size.

    ValueError names the known ones, or says which size is wrong.
    """
    size = size or Size()
    if name not in GENERATORS:
        raise ValueError(f"WORKLOAD: wanted one of {', '.join(GENERATORS)}; got {name!r}")
    for what, value in (("requests", size.requests), ("adapters", size.adapters)):
        if value is not None and value < 2:
            raise ValueError(f"--{what}: wanted 2 or more, got {value}")
    if size.rate is not None and not size.rate > 0:
        raise ValueError(f"--rate: wanted more than 0 first turns in a second, got {size.rate}")
    make = _Maker(seed)
    adapters = GENERATORS[name](make, size)
    return Workload(name, seed, adapters, tuple(make.requests[: size.requests]))


def merge(workloads: Sequence[Workload]) -> Workload:
    """All of them at the same time: requests by arrival, adapters in the order of the workloads.

    An adapter gets its workload's name in front of its own; no segment of one workload is a segment
    of another. ValueError when there is none, or two have the same name.
    """
    names = [workload.name for workload in workloads]
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"--workloads: wanted one or more, each once; got {', '.join(names) or 'none'}"
        )
    adapters: list[AdapterSpec] = []
    requests: list[Request] = []
    begun: list[float] = []  # when the first turn comes: a later one has no time of its own
    for workload in workloads:
        used = (s.key for r in requests for s in (*r.prompt, r.output))
        keys = 1 + max(used, default=-1)
        first, base = len(requests), len(adapters)
        adapters += [AdapterSpec(f"{workload.name}-{a.name}", a.rank) for a in workload.adapters]
        for request in workload.requests:
            before = None if request.previous is None else first + request.previous
            begun.append(request.arrival_s if before is None else begun[before])
            requests.append(_moved(request, base, keys, before))
    order = sorted(range(len(requests)), key=begun.__getitem__)
    place = {old: new for new, old in enumerate(order)}
    arranged = (requests[old] for old in order)
    return Workload(
        "+".join(names),
        workloads[0].seed,
        tuple(adapters),
        tuple(
            r if r.previous is None else replace(r, previous=place[r.previous]) for r in arranged
        ),
    )


def _moved(request: Request, adapters: int, keys: int, previous: int | None) -> Request:
    """With adapters and segment keys counted on from these."""

    def segment(own: Segment) -> Segment:
        return replace(own, key=own.key + keys)

    return replace(
        request,
        adapter=request.adapter + adapters,
        prompt=tuple(segment(own) for own in request.prompt),
        output=segment(request.output),
        previous=previous,
    )

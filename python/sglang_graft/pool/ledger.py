"""Who owns each page of the arena."""

import enum
from collections.abc import Sequence


class Owner(enum.IntEnum):
    """The one owner of a page."""

    FREE = 0
    SINK = 1
    ADAPTER = 2
    KV_CACHED = 3
    KV_RUNNING = 4
    IN_FLIGHT = 5


# Python 3.11 takes longer to look up a member of an enum than to call a function, and these are
# looked up dozens of times a request.
FREE, SINK, IN_FLIGHT, KV_CACHED = Owner.FREE, Owner.SINK, Owner.IN_FLIGHT, Owner.KV_CACHED


class PageLedger:
    """Hands out pages of equal size and remembers whose each is.

    Pages are equal and any page serves any owner, so there is no fragmentation: `take(n)` succeeds
    whenever n pages are free. Page 0 is the sink and never moves. The free pages are a stack: a new
    ledger hands out 1, 2, 3, ..., and pages given back come out again first and in the same order,
    so a run of calls always yields the same numbers (all ranks must agree on them).

    A million small pages cost nine megabytes: an owner of one byte each, and a reference. A call
    for one page takes about 1 us, for 1000 pages about 0.1 ms. Not thread-safe: one scheduler loop
    owns it.

    forwards: forwards launched so far; whoever launches them counts here. A launched forward may be
    reading or writing pages that were given back after its launch (`last_forward`).
    """

    def __init__(self, pages: int, *, reserve: int = 0) -> None:
        """`reserve` free pages are kept from takers that say `use_reserve=False`."""
        if pages < 2:
            raise ValueError(
                f"ledger: wanted at least 2 pages (the sink and one more), got {pages}"
            )
        if reserve < 0:
            raise ValueError(f"reserve: wanted 0 pages or more, got {reserve}")
        self.pages = pages
        self.reserve = reserve
        self.forwards = 0
        self._owners = bytearray()
        self._counts: list[int] = []
        self._stack: list[int] = []
        self._last_forward: list[int] = []
        self.reset()

    @property
    def free(self) -> int:
        """Free pages, the reserve included."""
        return len(self._stack)

    @property
    def total(self) -> int:
        """All pages but the sink."""
        return self.pages - 1

    def count(self, owner: Owner) -> int:
        """Pages of one owner."""
        return self._counts[owner]

    def take(self, n: int, owner: Owner, *, use_reserve: bool = True) -> list[int] | None:
        """Take `n` free pages for `owner`; None means no room now, and nothing was taken.

        With `use_reserve=False` the last `reserve` free pages are not handed out.
        """
        if n < 0:
            raise ValueError(f"take: wanted 0 pages or more, got {n}")
        assert owner > SINK, f"pages cannot be taken for {owner.name}"
        if n == 0:
            return []
        stack = self._stack
        if n > len(stack) - (0 if use_reserve else self.reserve):
            return None
        taken = stack[-n:]
        taken.reverse()
        del stack[-n:]
        owners, value = self._owners, int(owner)
        for page in taken:
            owners[page] = value
        self._counts[FREE] -= n
        self._counts[owner] += n
        return taken

    def give(self, pages: Sequence[int], owner: Owner, *, last_forward: int | None = None) -> None:
        """Return pages of `owner` to the free stack.

        No forward after the first `last_forward` touched them; None: the latest one may have.
        """
        self._hand(pages, owner, FREE)
        self._stack.extend(reversed(pages))
        if self.forwards:  # before the first one, all is 0
            last, touched = self._last_forward, self.forwards
            if last_forward is not None:
                touched = last_forward
            for page in pages:
                last[page] = touched

    def last_forward(self, pages: Sequence[int]) -> int:
        """No forward after the first so many touched these pages before they were given back.

        0 for pages that nobody has given back.
        """
        if not self.forwards:
            return 0
        last = self._last_forward
        return max([last[page] for page in pages], default=0)

    def move(self, pages: Sequence[int], source: Owner, target: Owner) -> None:
        """Hand pages of `source` to `target`; their bytes stay where they are."""
        assert target > SINK, f"pages cannot move to {target.name}"
        self._hand(pages, source, target)

    def owner_of(self, page: int) -> Owner:
        """The owner of one page."""
        assert 0 <= page < self.pages, f"page {page} is outside of 0..{self.pages - 1}"
        return Owner(self._owners[page])

    def holds(self, page: int, owner: Owner) -> bool:
        """Whether `owner` has this page; `owner_of` for hot paths, without its range check."""
        return self._owners[page] == owner

    def pages_of(self, owner: Owner) -> list[int]:
        """All pages of one owner in rising order. Walks every page: not for hot paths."""
        return [page for page, held in enumerate(self._owners) if held == owner]

    def reset(self) -> None:
        """Free every page and forget the order in which earlier ones were used."""
        self._owners = bytearray(self.pages)
        self._owners[0] = Owner.SINK
        self._counts = [0] * len(Owner)
        self._counts[Owner.SINK] = 1
        self._counts[Owner.FREE] = self.pages - 1
        self._stack = list(range(self.pages - 1, 0, -1))
        # Whoever had the pages, the latest forward may still be busy with them.
        self._last_forward = [self.forwards] * self.pages

    def check_invariants(self) -> None:
        """Assert that every page has one owner and that all counts agree with the pages."""
        held = [self._owners.count(owner) for owner in Owner]
        assert held == self._counts, f"owners hold {held} pages, the counts say {self._counts}"
        assert sum(held) == self.pages, f"owners hold {sum(held)} pages of {self.pages}"
        assert self.pages_of(Owner.SINK) == [0], f"the sink is {self.pages_of(Owner.SINK)}, not [0]"
        free, stack = self.pages_of(Owner.FREE), sorted(self._stack)
        assert free == stack, f"pages {free} are free, but {stack} are on the stack"
        assert self.reserve >= 0, f"the reserve is {self.reserve} pages"

    def _hand(self, pages: Sequence[int], source: Owner, target: Owner) -> None:
        """Pages of `source` become pages of `target`, each named once: all of them or none."""
        assert source > SINK, f"pages of {source.name} cannot be given or moved"
        if not pages:
            return
        assert min(pages) > 0, f"page {min(pages)} is no page of {source.name}"
        owners, held, value = self._owners, int(source), int(target)
        walk = iter(pages)
        try:
            for page in walk:
                if owners[page] != held:
                    break
                owners[page] = value
            else:
                self._counts[source] -= len(pages)
                self._counts[target] += len(pages)
                return
        except IndexError:
            pass  # a page beyond the last one
        done = len(pages) - 1 - sum(1 for _ in walk)
        for page in pages[:done]:
            owners[page] = held
        raise AssertionError(self._fault(pages, done, source))

    def _fault(self, pages: Sequence[int], at: int, source: Owner) -> str:
        """Why the page at this place is not for `source` to hand on."""
        page = pages[at]
        if page >= self.pages:
            return f"page {page} is outside of 1..{self.pages - 1}"
        if page in pages[:at]:
            return f"page {page} is named twice in {list(pages)}"
        return f"page {page} is {self.owner_of(page).name}, not {source.name}"

"""Who uses each KV page: references, quarantine holds and the free list. Knows nothing of what the pages contain."""

from __future__ import annotations

import attrs


@attrs.frozen
class PageCounts:
    """Every page is in exactly one state: the four add up to the size of the pool (invariant I5)."""

    free: int
    cached: int
    """In the prefix cache and used by nobody."""
    pinned: int
    quarantined: int
    """A transfer may still touch it, whether or not a sequence uses it as well."""


class PagePool:
    """Counts references and holds; whoever sees a page become unused decides whether it is cached or `put` back.

    Misuse (a release too many, a hold without a reference) raises RuntimeError: always a bug.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool needs at least one page, not {num_pages}")
        self.num_pages = num_pages
        self.pinned = 0
        self.quarantined = 0
        self._refs = [0] * num_pages
        self._holds = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def refs(self, page: int) -> int:
        return self._refs[page]

    def holds(self, page: int) -> int:
        return self._holds[page]

    def take(self) -> int:
        """A free page, with one reference. There has to be one."""
        page = self._free.pop()
        self._refs[page] = 1
        self.pinned += 1
        return page

    def put(self, page: int) -> None:
        """An unused page becomes free."""
        self._free.append(page)

    def pin(self, page: int) -> bool:
        """One more reference; True when it is the first."""
        self._refs[page] += 1
        if self._refs[page] > 1:
            return False
        self.pinned += 1
        return True

    def unpin(self, page: int) -> bool:
        """One reference less; True when the page is now unused."""
        if self._refs[page] < 1:
            raise RuntimeError(f"page {page} is released more often than it was pinned")
        self._refs[page] -= 1
        if self._refs[page] or self._holds[page]:
            return False
        self.pinned -= 1
        return True

    def hold(self, page: int) -> None:
        """Turn one reference into a quarantine hold."""
        if self._refs[page] < 1:
            raise RuntimeError(f"page {page} is quarantined by someone who does not use it")
        self._refs[page] -= 1
        self._holds[page] += 1
        if self._holds[page] == 1:
            self.pinned -= 1
            self.quarantined += 1

    def unhold(self, page: int) -> bool:
        """One hold less; True when the page is now unused."""
        if self._holds[page] < 1:
            raise RuntimeError(f"page {page} is not in quarantine")
        self._holds[page] -= 1
        if self._holds[page]:
            return False
        self.quarantined -= 1
        if self._refs[page]:
            self.pinned += 1
            return False
        return True

    def check_integrity(self, cached: frozenset[int]) -> None:
        """Raises AssertionError unless every page is free, `cached`, pinned or quarantined, and the counters agree."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is in the free list twice"
        for page, (refs, holds) in enumerate(zip(self._refs, self._holds, strict=True)):
            assert refs >= 0, f"page {page} has {refs} references"
            assert holds >= 0, f"page {page} has {holds} holds"
            states = (page in free, page in cached, refs > 0 or holds > 0)
            assert sum(states) == 1, f"page {page}: free, cached, used = {states}"
        quarantined = sum(holds > 0 for holds in self._holds)
        assert self.quarantined == quarantined, f"{self.quarantined} pages counted in quarantine, {quarantined} are"
        pinned = self.num_pages - len(free) - len(cached) - quarantined
        assert self.pinned == pinned, f"{self.pinned} pages counted as pinned, {pinned} are"

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdserve.engine.pages import PageCounts
from pdserve.engine.radix import KvCache


def put(cache, tokens):
    """Compute, cache and leave a sequence; returns its pages."""
    pages = cache.allocate(-(-len(tokens) // cache.page_size))
    cache.insert(tokens, pages)
    cache.release(pages)
    cache.check_integrity()
    return pages


def test_only_full_pages_within_the_limit_match():
    cache = KvCache(8, 4)
    pages = put(cache, range(10))
    assert cache.counts() == PageCounts(free=6, cached=2, pinned=0, quarantined=0)
    for limit, expected in [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (99, 2), (-1, 0)]:
        got = cache.match(range(10), limit)
        assert got == pages[:expected]
        cache.release(got)
    assert cache.match([0, 1, 2], 99) == []
    assert cache.match([0, 1, 2, 9, 4, 5, 6, 7], 99) == []
    assert cache.match([0, 1, 2, 3, 4, 5, 6, 9], 99) == pages[:1]
    cache.check_integrity()


def test_what_is_present_stays_canonical():
    cache = KvCache(8, 2)
    first = put(cache, [1, 2, 3, 4])
    second = cache.allocate(3)
    cache.insert([1, 2, 3, 4, 5, 6], second)
    cache.check_integrity()
    # The parent of a pinned page cannot be evicted, though nobody pins it.
    assert cache.counts() == PageCounts(free=3, cached=2, pinned=3, quarantined=0)
    assert cache.available == 3
    assert cache.allocate(4) is None
    cache.release(second)
    assert cache.counts() == PageCounts(free=5, cached=3, pinned=0, quarantined=0)
    assert cache.available == 8
    assert cache.match([1, 2, 3, 4, 5, 6], 6) == [*first, second[2]]


def test_the_least_recently_used_leaf_goes_first():
    cache = KvCache(4, 1)
    a = put(cache, [1, 2])
    b = put(cache, [7])
    c = put(cache, [8])
    cache.release(cache.match([1, 2], 2))
    assert cache.allocate(1) == b
    assert cache.allocate(1) == c
    assert cache.allocate(1) == a[1:], "the leaf before its parent"
    cache.check_integrity()
    assert cache.match([1], 1) == a[:1]
    assert cache.allocate(1) is None


def test_inserting_again_counts_as_use():
    cache = KvCache(4, 1)
    put(cache, [1])
    old = put(cache, [2])
    put(cache, [1])
    assert cache.allocate(3) is not None
    assert cache.match([1], 1) != []
    assert cache.match([2], 1) == []
    assert old


def test_pinned_pages_survive_and_nothing_changes_when_impossible():
    cache = KvCache(3, 1)
    put(cache, [1, 2, 3])
    pinned = cache.match([1, 2, 3], 2)
    before = cache.counts()
    assert cache.available == 1
    assert cache.allocate(2) is None
    assert cache.counts() == before
    assert cache.allocate(0) == []
    taken = cache.allocate(1)
    assert cache.match([1, 2, 3], 3) == pinned
    cache.release(taken + pinned + pinned)
    cache.check_integrity()
    assert cache.available == 3


def test_claim_gives_all_or_changes_nothing():
    cache = KvCache(4, 2)
    cached = put(cache, [1, 2, 3, 4])
    assert cache.claim([1, 2, 3, 4, 5], 4, 5) is None
    assert cache.counts() == PageCounts(free=2, cached=2, pinned=0, quarantined=0)
    pages, hits = cache.claim([1, 2, 3, 4, 5], 4, 3)
    assert (pages[:2], len(pages), hits) == (cached, 3, 2)
    # One page is free; the two cached ones are shared.
    assert cache.claim([1, 2, 3, 4, 9, 9], 4, 4, max_pinned=4) is None
    shared, hits = cache.claim([1, 2, 3, 4, 9, 9], 4, 3, max_pinned=4)
    assert (shared[:2], hits) == (cached, 2)
    cache.check_integrity()


def test_claim_respects_the_share_unless_nothing_is_pinned():
    cache = KvCache(8, 1)
    first, _ = cache.claim([1, 2, 3, 4], 3, 4, max_pinned=2)
    cache.insert([1, 2, 3, 4], first)
    assert cache.claim([9], 0, 1, max_pinned=4) is None
    assert cache.claim([1, 2, 3, 4], 4, 4, max_pinned=4) == (first, 4), "shared pages are pinned already"
    cache.check_integrity()


def test_quarantine_keeps_a_page_from_reuse():
    cache = KvCache(2, 1)
    pages = cache.allocate(2)
    cache.quarantine(pages)
    assert cache.counts() == PageCounts(free=0, cached=0, pinned=0, quarantined=2)
    assert cache.allocate(1) is None
    with pytest.raises(RuntimeError, match="released more often"):
        cache.release(pages)
    with pytest.raises(RuntimeError, match="nothing that could be pinned"):
        cache.pin(pages)
    cache.unquarantine(pages)
    assert cache.counts() == PageCounts(free=2, cached=0, pinned=0, quarantined=0)
    cache.check_integrity()


def test_quarantine_next_to_another_user():
    cache = KvCache(1, 1)
    pages = cache.allocate(1)
    cache.pin(pages)
    cache.quarantine(pages)
    cache.insert([5], pages)
    assert cache.match([5], 1) == [], "not final, so not findable"
    cache.release(pages)
    assert cache.available == 0
    cache.unquarantine(pages)
    assert cache.available == 1
    cache.check_integrity()


def test_misuse_raises():
    cache = KvCache(4, 1)
    pages = cache.allocate(2)
    cache.insert([1, 2], pages)
    with pytest.raises(RuntimeError, match="in the prefix cache"):
        cache.quarantine(pages)
    with pytest.raises(RuntimeError, match="not the caller's own"):
        cache.insert([3], pages)
    with pytest.raises(RuntimeError, match="do not fit"):
        cache.insert([1, 2, 3], pages)
    cache.release(pages)
    with pytest.raises(RuntimeError, match="released more often"):
        cache.release(pages)
    with pytest.raises(RuntimeError, match="not the caller's own"):
        cache.insert([3], [3])
    with pytest.raises(ValueError, match="cannot allocate"):
        cache.allocate(-1)
    with pytest.raises(ValueError, match="at least one token"):
        KvCache(1, 0)


def test_the_callback_comes_after_the_change_and_only_when_something_came():
    cache = KvCache(3, 1)
    seen = []
    cache.on_available = lambda: seen.append((cache.available, cache.counts().free))
    pages = cache.allocate(3)
    cache.pin(pages)
    cache.release(pages)
    assert seen == []
    cache.insert([1], pages)
    cache.release(pages)
    assert seen == [(0, 0), (3, 2)], "an insert tells too: a claim may now share those pages"
    cache.release([])
    assert len(seen) == 2
    pages = cache.allocate(1)
    cache.quarantine(pages)
    cache.unquarantine(pages)
    assert len(seen) == 3


def test_a_callback_that_tries_and_gives_back_ends():
    cache = KvCache(4, 1)
    calls = []

    def attempt():
        calls.append(cache.available)
        cache.release(cache.match([1], 1))

    put(cache, [1])
    pages = cache.allocate(2)
    cache.on_available = attempt
    cache.release(pages)
    assert calls == [4]


def test_a_callback_that_frees_more_is_called_again():
    cache = KvCache(4, 1)
    first, second = cache.allocate(1), cache.allocate(2)
    calls = []

    def free_once():
        calls.append(cache.available)
        cache.release(second.copy())
        second.clear()

    cache.on_available = free_once
    cache.release(first)
    assert calls == [2, 4]
    cache.check_integrity()


def test_a_failing_callback_does_not_silence_the_next():
    cache = KvCache(1, 1)

    def fail():
        raise KeyError("stop")

    cache.on_available = fail
    for _ in range(2):
        pages = cache.allocate(1)
        with pytest.raises(KeyError):
            cache.release(pages)


def test_the_eviction_order_does_not_grow_without_bound():
    cache = KvCache(4, 1)
    put(cache, [1, 2])
    for _ in range(1000):
        cache.release(cache.match([1, 2], 2))
    assert len(cache._leaves) <= 2 * 4 + 64
    cache.check_integrity()
    assert cache.allocate(4) is not None


def test_broken_books_are_noticed():
    cache = KvCache(4, 1)
    put(cache, [1])
    cache._evictable += 1
    with pytest.raises(AssertionError, match="evictable"):
        cache.check_integrity()
    cache._evictable -= 1
    cache._leaves.clear()
    with pytest.raises(AssertionError, match="cannot be found for eviction"):
        cache.check_integrity()


class CacheMachine(RuleBasedStateMachine):
    """Callers own lists of references; a model of the references and of page contents watches the cache."""

    @initialize(pages=st.integers(1, 12), size=st.integers(1, 3))
    def start(self, pages, size):
        self.cache = KvCache(pages, size)
        self.owned = []
        """(tokens, pages, private): the references of one caller."""
        self.held = []
        self.content = {}
        """What the owner has written to each page: the whole prefix up to its end."""
        self.told = 0
        self.cache.on_available = self.on_available

    def on_available(self):
        self.told += 1
        self.cache.check_integrity()

    tokens = st.lists(st.integers(0, 1), max_size=14)

    @rule(tokens=tokens, limit=st.integers(0, 16))
    def match(self, tokens, limit):
        size = self.cache.page_size
        pages = self.cache.match(tokens, limit)
        assert len(pages) * size <= min(limit, len(tokens))
        for i, page in enumerate(pages):
            assert self.content[page] == tuple(tokens[: (i + 1) * size]), "the page holds another prefix"
        self.owned.append((tokens, pages, False))

    @rule(tokens=tokens)
    def allocate(self, tokens):
        size = self.cache.page_size
        n = -(-len(tokens) // size)
        available, before = self.cache.available, self.cache.counts()
        pages = self.cache.allocate(n)
        assert (pages is not None) == (n <= available)
        if pages is None:
            assert self.cache.counts() == before
            return
        used = {p for _, owned, _ in self.owned for p in owned} | {p for held in self.held for p in held}
        assert used.isdisjoint(pages), "a page in use was given away"
        for i, page in enumerate(pages):
            self.content[page] = tuple(tokens[: (i + 1) * size])
        self.owned.append((tokens, pages, True))

    @rule(tokens=tokens, share=st.none() | st.integers(0, 12))
    def claim(self, tokens, share):
        size = self.cache.page_size
        before, told = self.cache.counts(), self.told
        claim = self.cache.claim(tokens, max(0, len(tokens) - 1), -(-len(tokens) // size), share)
        assert self.told == told
        if claim is None:
            assert self.cache.counts() == before
            return
        pages, hits = claim
        for i in range(hits):
            assert self.content[pages[i]] == tuple(tokens[: (i + 1) * size])
        for i in range(hits, len(pages)):
            self.content[pages[i]] = tuple(tokens[: (i + 1) * size])
        self.owned.append((tokens, pages, True))
        if share is not None and before.pinned:
            assert self.cache.counts().pinned <= max(share, before.pinned)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def insert(self, data):
        tokens, pages, private = data.draw(st.sampled_from(self.owned))
        if private:
            self.cache.insert(tokens, pages)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def pin(self, data):
        tokens, pages, _ = data.draw(st.sampled_from(self.owned))
        self.cache.pin(pages)
        self.owned.append((tokens, pages, False))

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data):
        _, pages, _ = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        available, told = self.cache.available, self.told
        self.cache.release(pages)
        assert self.told - told == (self.cache.available > available)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def quarantine(self, data):
        index = data.draw(st.integers(0, len(self.owned) - 1))
        _, pages, _ = self.owned[index]
        if any(self.cache._nodes[page] is not None for page in pages):
            return
        del self.owned[index]
        self.cache.quarantine(pages)
        self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unquarantine(self, data):
        self.cache.unquarantine(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def books(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        held = {p for pages in self.held for p in pages}
        pinned = {p for _, pages, _ in self.owned for p in pages} - held
        counts = self.cache.counts()
        assert (counts.pinned, counts.quarantined) == (len(pinned), len(held))
        assert counts.free + counts.cached + counts.pinned + counts.quarantined == self.cache.num_pages
        assert counts.free <= self.cache.available <= counts.free + counts.cached

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for _, pages, _ in self.owned:
            self.cache.release(pages)
        for pages in self.held:
            self.cache.unquarantine(pages)
        assert self.cache.available == self.cache.num_pages
        assert self.cache.allocate(self.cache.num_pages) is not None
        self.cache.check_integrity()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)

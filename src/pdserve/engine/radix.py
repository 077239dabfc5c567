"""The KV page pool with its prefix cache: a radix tree with one node per page, evicted leaf by leaf in LRU order."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from pdserve.engine.pages import PageCounts, PagePool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class _Node:
    __slots__ = ("blockers", "children", "key", "last_used", "page", "parent")

    def __init__(self, page: int, key: tuple[int, ...], parent: _Node | None, last_used: int) -> None:
        self.page = page
        self.key = key
        self.parent = parent
        self.last_used = last_used
        self.children: dict[tuple[int, ...], _Node] = {}
        self.blockers = 0
        """1 if the page itself is pinned, plus the number of children that are blocked: evictable while 0."""


class KvCache:
    """Gives pages to sequences and remembers the KV of finished ones for as long as nobody needs the space.

    Misuse raises RuntimeError. Nothing blocks; costs are O(1) per page, O(log n) where eviction order is concerned.
    """

    on_available: Callable[[], None] | None
    """Called after a `release` or `unquarantine` has made pages available, and after an `insert`, which may let a claim
    fit that shares the new pages. The callback may use the cache freely; what
    it releases itself calls it again only if more is then available than when it was called, so that an attempt that
    pins, fails and releases cannot go round for ever."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if page_size < 1:
            raise ValueError(f"a page holds at least one token, not {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.on_available = None
        self._pool = PagePool(num_pages)
        self._root = _Node(-1, (), None, 0)
        self._nodes: list[_Node | None] = [None] * num_pages
        self._evictable = 0
        self._leaves: list[tuple[int, int]] = []
        """Heap of (last_used, page) over evictable leaves; entries that have become wrong are skipped when popped."""
        self._tick = 0
        self._announcing = False

    @property
    def available(self) -> int:
        """How many pages `allocate` could give: free ones and those that can be evicted."""
        return self._pool.free + self._evictable

    def counts(self) -> PageCounts:
        pool = self._pool
        cached = self.num_pages - pool.free - pool.pinned - pool.quarantined
        return PageCounts(free=pool.free, cached=cached, pinned=pool.pinned, quarantined=pool.quarantined)

    def match(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Pages of the longest cached prefix of full pages within `limit` tokens, each pinned for the caller."""
        path = self._walk(tokens, limit)
        self._tick += 1
        for node in path:
            node.last_used = self._tick
            self._pin(node.page)
        return [node.page for node in path]

    def allocate(self, n: int) -> list[int] | None:
        """`n` private pages, each with one reference; evicts as needed. None, with nothing changed, if impossible."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages")
        if n > self.available:
            return None
        while self._pool.free < n:
            self._evict()
        return [self._pool.take() for _ in range(n)]

    def claim(
        self, tokens: Sequence[int], limit: int, total: int, max_pinned: int | None = None
    ) -> tuple[list[int], int] | None:
        """`match` and `allocate` up to `total` pages in one go: (page table, how many of them hold cached KV).

        None, and nothing has changed and nobody is told, if that is impossible, or if more than `max_pinned` pages
        would then be pinned; the latter is allowed while none is, so that any claim that fits the pool can succeed.
        """
        path = self._walk(tokens, min(limit, total * self.page_size))
        pinned = self._pool.pinned
        newly_pinned = total - sum(self._pool.refs(node.page) > 0 for node in path)
        if max_pinned is not None and pinned > 0 and pinned + newly_pinned > max_pinned:
            return None
        if total - len(path) > self.available - sum(not node.blockers for node in path):
            return None
        cached = self.match(tokens, len(path) * self.page_size)
        fresh = self.allocate(total - len(cached))
        assert fresh is not None
        return cached + fresh, len(cached)

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Make the full pages of a sequence, which the caller has pinned, findable as a prefix.

        Where the prefix is cached already, that page stays the canonical one and the caller's stays private. Ends at
        the first page that is in quarantine: its content is not final.
        """
        full = len(tokens) // self.page_size
        if full > len(pages):
            raise RuntimeError(f"{len(tokens)} tokens do not fit on {len(pages)} pages")
        self._tick += 1
        node = self._root
        grown = False
        for key, page in zip(self._keys(tokens, full), pages, strict=False):
            child = node.children.get(key)
            if child is None:
                if self._pool.holds(page):
                    break
                child = self._grow(node, key, page)
                grown = True
            else:
                self._touch(child)
            node = child
        if grown:
            self._announce(-1)

    def pin(self, pages: Iterable[int]) -> None:
        """One more reference on each page, which is pinned or cached already."""
        for page in pages:
            if not self._pool.refs(page) and self._nodes[page] is None:
                raise RuntimeError(f"page {page} holds nothing that could be pinned")
            self._pin(page)

    def release(self, pages: Iterable[int]) -> None:
        """One reference less on each page; unused pages become cached if they are in the tree, else free."""
        before = self.available
        self._tick += 1
        for page in pages:
            if not self._pool.unpin(page):
                continue
            node = self._nodes[page]
            if node is None:
                self._pool.put(page)
            else:
                node.last_used = self._tick
                self._unblock(node)
        self._announce(before)

    def quarantine(self, pages: Iterable[int]) -> None:
        """Turn the caller's reference on each page into a hold: the page is not reused before `unquarantine`."""
        for page in pages:
            if self._nodes[page] is not None:
                raise RuntimeError(f"page {page} is in the prefix cache: no transfer may write to it")
            self._pool.hold(page)

    def unquarantine(self, pages: Iterable[int]) -> None:
        """End one hold on each page; pages that nobody uses become free."""
        before = self.available
        for page in pages:
            if self._pool.unhold(page):
                self._pool.put(page)
        self._announce(before)

    def check_integrity(self) -> None:
        """Raises AssertionError, saying what, when counters, references and the tree disagree."""
        nodes = []
        leaves = set(self._leaves)
        stack = [self._root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            pinned = node is not self._root and self._pool.refs(node.page) > 0
            blockers = pinned + sum(child.blockers > 0 for child in node.children.values())
            assert node.blockers == blockers, f"page {node.page}: {node.blockers} blockers counted, {blockers} found"
            if node is self._root:
                continue
            nodes.append(node)
            assert self._nodes[node.page] is node, f"page {node.page} is twice in the tree"
            assert self._pool.holds(node.page) == 0, f"page {node.page} is in the tree and in quarantine"
            assert node.parent is not None, f"page {node.page} hangs nowhere"
            assert node.parent.children.get(node.key) is node, f"page {node.page} hangs under another key"
            if not node.blockers and not node.children:
                assert (node.last_used, node.page) in leaves, f"page {node.page} cannot be found for eviction"
        known = sum(node is not None for node in self._nodes)
        assert known == len(nodes), f"{known} pages are marked as cached, the tree has {len(nodes)}"
        evictable = sum(not node.blockers for node in nodes)
        assert self._evictable == evictable, f"{self._evictable} pages counted as evictable, {evictable} are"
        self._pool.check_integrity(frozenset(node.page for node in nodes if not self._pool.refs(node.page)))

    def _keys(self, tokens: Sequence[int], full: int) -> Iterable[tuple[int, ...]]:
        size = self.page_size
        return (tuple(tokens[i * size : (i + 1) * size]) for i in range(full))

    def _walk(self, tokens: Sequence[int], limit: int) -> list[_Node]:
        path = []
        node: _Node | None = self._root
        for key in self._keys(tokens, max(0, min(limit, len(tokens))) // self.page_size):
            assert node is not None
            node = node.children.get(key)
            if node is None:
                break
            path.append(node)
        return path

    def _grow(self, parent: _Node, key: tuple[int, ...], page: int) -> _Node:
        if not self._pool.refs(page) or self._nodes[page] is not None:
            raise RuntimeError(f"page {page} is not the caller's own, it cannot hold this prefix")
        node = _Node(page, key, parent, self._tick)
        parent.children[key] = self._nodes[page] = node
        self._evictable += 1
        self._block(node)
        return node

    def _pin(self, page: int) -> None:
        node = self._nodes[page]
        if self._pool.pin(page) and node is not None:
            self._block(node)

    def _touch(self, node: _Node) -> None:
        node.last_used = self._tick
        self._offer(node)

    def _block(self, node: _Node) -> None:
        node.blockers += 1
        while node.blockers == 1 and node.parent is not None:
            self._evictable -= 1
            node = node.parent
            node.blockers += 1

    def _unblock(self, node: _Node) -> None:
        node.blockers -= 1
        while node.blockers == 0 and node.parent is not None:
            self._evictable += 1
            self._offer(node)
            node = node.parent
            node.blockers -= 1

    def _offer(self, node: _Node) -> None:
        """Enter a node into the eviction order if it is its turn to be there: an unpinned leaf."""
        if node.blockers or node.children or node.parent is None:
            return
        heappush(self._leaves, (node.last_used, node.page))
        # Entries of leaves that were used again stay behind; this bounds them at an amortised O(1).
        if len(self._leaves) > 2 * self.num_pages + 64:
            self._leaves = list({entry for entry in self._leaves if self._evictable_leaf(entry) is not None})
            heapify(self._leaves)

    def _evictable_leaf(self, entry: tuple[int, int]) -> _Node | None:
        last_used, page = entry
        node = self._nodes[page]
        if node is None or node.last_used != last_used or node.blockers or node.children:
            return None
        return node

    def _evict(self) -> None:
        while (node := self._evictable_leaf(heappop(self._leaves))) is None:
            pass
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        self._nodes[node.page] = None
        self._evictable -= 1
        self._pool.put(node.page)
        self._offer(parent)

    def _announce(self, before: int) -> None:
        if self._announcing or self.available <= before:
            return
        self._announcing = True
        try:
            level = -1
            while self.on_available is not None and self.available > level:
                level = self.available
                self.on_available()
        finally:
            self._announcing = False

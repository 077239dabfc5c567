import pytest

from pdserve.engine.pages import PagePool


def test_a_page_is_unused_when_the_last_reference_ends():
    pool = PagePool(2)
    page = pool.take()
    assert (page, pool.free, pool.pinned) == (0, 1, 1)
    assert not pool.pin(page)
    assert not pool.unpin(page)
    assert pool.unpin(page)
    assert pool.pin(page)
    assert pool.unpin(page)
    pool.put(page)
    assert (pool.free, pool.pinned) == (2, 0)
    pool.check_integrity(frozenset())


def test_one_release_too_many_is_a_bug():
    pool = PagePool(1)
    page = pool.take()
    pool.unpin(page)
    with pytest.raises(RuntimeError, match="page 0 is released more often"):
        pool.unpin(page)


def test_quarantine_outlives_references_and_references_outlive_quarantine():
    pool = PagePool(1)
    page = pool.take()
    pool.pin(page)
    pool.hold(page)
    assert (pool.pinned, pool.quarantined) == (0, 1)
    assert not pool.unhold(page), "one reference is left"
    assert (pool.pinned, pool.quarantined) == (1, 0)
    pool.pin(page)
    pool.hold(page)
    assert not pool.unpin(page), "the hold is left"
    assert pool.unhold(page)
    assert (pool.pinned, pool.quarantined) == (0, 0)


def test_a_page_can_be_held_twice():
    pool = PagePool(1)
    page = pool.take()
    pool.pin(page)
    pool.hold(page)
    pool.hold(page)
    assert not pool.unhold(page)
    assert pool.quarantined == 1
    assert pool.unhold(page)
    with pytest.raises(RuntimeError, match="not in quarantine"):
        pool.unhold(page)


def test_only_a_user_can_quarantine():
    pool = PagePool(1)
    with pytest.raises(RuntimeError, match="does not use it"):
        pool.hold(0)


def test_a_pool_has_pages():
    with pytest.raises(ValueError, match="at least one page"):
        PagePool(0)


def test_a_lost_page_is_noticed():
    pool = PagePool(1)
    pool.unpin(pool.take())
    with pytest.raises(AssertionError, match="page 0: free, cached, used"):
        pool.check_integrity(frozenset())

"""Frames of a Master at a Decode node, straight to the role: claims early, late, single, doubled, malformed."""

from __future__ import annotations

import math

import pytest
import trio

from pdserve.wire.messages import (
    GROUP,
    Admitted,
    Busy,
    Cancel,
    Decode,
    Delta,
    Failed,
    FirstToken,
    Reserve,
    Reserved,
    SamplingParams,
)

pytestmark = pytest.mark.trio


class Link:
    """The frames that a node answers with, and what the Master would send."""

    def __init__(self, node) -> None:
        self.role, self.requests = node.role, node.links[0]._requests
        self._eos = min(node.loop.engine.eos_token_ids)
        self.answers: list[object] = []
        for name in ("send", "emit", "_end"):
            self._spy(name)

    def _spy(self, name: str) -> None:
        original = getattr(self.requests, name)
        setattr(self.requests, name, lambda frame: (self.answers.append(frame), original(frame)))

    def reserve(self, id_="r", n=2, ttl=5.0, timeout=4.0) -> None:
        self.role.accept_reserve(Reserve(id_, 1, n, 1, 1, ttl, timeout), self.requests)

    def decode(self, choice=0, id_="r", n=2, *, reserved=True, prompt=(65,)) -> None:
        """A choice that ends with its first token."""
        params = SamplingParams(max_tokens=1, temperature=0.0)
        first = FirstToken(self._eos)
        frame = Decode(id_, 1, prompt, params, b"", first, choice, n=n, reserved=reserved)
        self.role.accept_decode(frame, self.requests)

    def cancel(self, choice=GROUP) -> None:
        self.role.accept_cancel(Cancel("r", 1, choice), self.requests)

    def of(self, kind: type) -> list:
        return [frame for frame in self.answers if isinstance(frame, kind)]


async def test_claims_before_the_grant_are_admitted_at_the_grant(cluster, autojump_clock):
    async with cluster(decode={"max_running_requests": 2}) as it:
        link = Link(it.node("d0"))
        held = link.role.pool.request(2)
        link.reserve()
        link.decode(0)
        link.decode(1)
        await trio.sleep(1)
        assert link.answers == []
        link.role.pool.close(held)
        await trio.sleep(1)
        assert len(link.of(Admitted)) == 1
        assert sorted(delta.choice for delta in link.of(Delta)) == [0, 1]


async def test_reservations_claimed_after_their_admission_deadline_are_admitted_where_there_is_room(
    cluster, autojump_clock
):
    async with cluster(decode={"max_running_requests": 8}) as it:
        link = Link(it.node("d0"))
        for i in range(20):
            for name in "ab":
                link.reserve(f"{name}{i}", timeout=1.0)
            await trio.sleep(2)
            for name in "ab":
                link.decode(0, f"{name}{i}")
                link.decode(1, f"{name}{i}")
            await trio.sleep(2)
        assert link.of(Busy) == []
        assert len(link.of(Admitted)) == 40


async def test_two_requests_that_must_not_wait_are_both_admitted_in_one_instant(cluster, autojump_clock):
    async with cluster(decode={"max_running_requests": 8, "admission_timeout": 0.0}) as it:
        link = Link(it.node("d0"))
        for i in range(40):
            link.decode(0, f"a{i}", 1, reserved=False)
            link.decode(0, f"b{i}", 1, reserved=False)
            await trio.sleep(1)
        assert link.of(Busy) == []
        assert len(link.of(Admitted)) == 80


async def test_one_choice_cancelled_while_its_group_waits_does_not_run(cluster, autojump_clock):
    async with cluster(decode={"max_running_requests": 2}) as it:
        link = Link(it.node("d0"))
        held = link.role.pool.request(2)
        link.decode(0, reserved=False)
        link.decode(1, reserved=False)
        await trio.sleep(1)
        link.cancel(1)
        link.role.pool.close(held)
        await trio.sleep(1)
        assert [delta.choice for delta in link.of(Delta)] == [0]
        assert link.role.idle


async def test_a_choice_that_is_cancelled_instead_of_claimed_ends_like_any_other(cluster, autojump_clock):
    async with cluster(decode={"max_running_requests": 2}) as it:
        link = Link(it.node("d0"))
        link.reserve()
        link.decode(0)
        await trio.sleep(20)  # committed: nothing expires any more
        assert link.role.stats().active == 1
        link.cancel(1)
        link.decode(1)
        await trio.sleep(1)
        assert [delta.choice for delta in link.of(Delta)] == [0]
        assert link.role.idle


async def test_repeated_frames_change_nothing(cluster, autojump_clock):
    async with cluster(decode={"max_running_requests": 4}) as it:
        link = Link(it.node("d0"))
        for _ in range(3):
            link.reserve()
        await trio.sleep(1)
        assert link.role.stats().active == 2
        for choice in (0, 0, 1, 1, 0):
            link.decode(choice)
        await trio.sleep(1)
        assert sorted(delta.choice for delta in link.of(Delta)) == [0, 1]
        assert (len(link.of(Reserved)), len(link.of(Admitted))) == (1, 1)


async def test_a_claim_without_a_reservation_is_expired(cluster, autojump_clock):
    async with cluster() as it:
        link = Link(it.node("d0"))
        link.decode(0)
        assert [frame.reason for frame in link.of(Busy)] == ["expired"]


@pytest.mark.parametrize("ttl", [math.nan, math.inf, 0.0, -1.0])
async def test_a_reservation_needs_an_end(ttl, cluster, autojump_clock):
    async with cluster() as it:
        link = Link(it.node("d0"))
        link.reserve(ttl=ttl)
        assert [(frame.code, frame.param) for frame in link.of(Failed)] == [("invalid_request", "reservation_ttl")]
        assert link.role.stats().active == 0


@pytest.mark.parametrize(("choice", "n"), [(1, 1), (-1, 1), (2, 2), (-1, 2), (0, 0), (0, 5)])
async def test_a_choice_that_cannot_be_is_refused(choice, n, cluster, autojump_clock):
    async with cluster(decode={"max_running_requests": 4}) as it:
        link = Link(it.node("d0"))
        link.decode(choice, n=n, reserved=False)
        assert [frame.param for frame in link.of(Failed)] == ["n"]
        assert link.role.stats().active == 0


@pytest.mark.parametrize("claim", [{"n": 3}, {"prompt": (65, 66)}])
async def test_a_claim_that_does_not_fit_its_reservation_ends_the_group(claim, cluster, autojump_clock):
    async with cluster(decode={"max_running_requests": 4}) as it:
        link = Link(it.node("d0"))
        link.reserve()
        await trio.sleep(1)
        link.decode(0)
        link.decode(1, **claim)
        await trio.sleep(1)
        assert [(frame.choice, frame.param) for frame in link.of(Failed)] == [(GROUP, "n")]
        assert link.role.idle


async def test_a_slow_master_stops_nobody_but_itself(cluster, autojump_clock):
    async with cluster(decode={"max_running_requests": 4}) as it:
        link = Link(it.node("d0"))
        link.reserve(ttl=1000.0)
        await trio.sleep(1)
        for i in range(5):
            link.decode(0, f"x{i}", 1, reserved=False)
        await trio.sleep(1)
        assert len(link.of(Admitted)) == 5
        link.cancel()
        await trio.sleep(1)
        assert link.role.idle

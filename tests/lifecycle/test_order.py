"""Admission in the order in which the frames arrive, also where pages are scarce."""

from __future__ import annotations

import pytest
import trio

from lifecycle.cluster import note_grants
from pdserve.wire.messages import Decode, FirstToken, SamplingParams

COUNT = 200


@pytest.mark.trio
@pytest.mark.parametrize("kv_tokens", [4096, 160])
async def test_a_burst_is_admitted_in_frame_order(kv_tokens, cluster, autojump_clock):
    limits = {"max_running_requests": 4, "admission_queue_size": COUNT, "admission_timeout": 600.0}
    async with cluster(decode={**limits, "kv_tokens": kv_tokens}) as it:
        node = it.nodes[1]
        link = node.links[0]._requests
        granted = note_grants(node.role)
        for i in range(COUNT):  # the first token ends each: slots and pages come free many at a time
            params = SamplingParams(max_tokens=100 if i % 2 else 20, temperature=0.0)
            frame = Decode(str(i), 1, (65,), params, b"", FirstToken(min(node.loop.engine.eos_token_ids)))
            node.role.accept_decode(frame, link)
        with trio.fail_after(600):
            while len(granted) < COUNT:
                await trio.sleep(0.1)
        assert granted == [str(i) for i in range(COUNT)]

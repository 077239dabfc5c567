"""Which nodes serve a request. Decisions over what nodes report; no Decode capacity is counted or guessed here."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pdserve.master.registry import Node

_BLOCK_TOKENS = 64
_MAX_BLOCKS = 65536
"""Remembered prefix blocks per Master, least recently used forgotten first."""


class Selector:
    """Cache-aware choice of P (expected tokens to compute), least loaded of two for D."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[str, int], None] = OrderedDict()

    def prefill(
        self,
        nodes: Sequence[Node],
        token_ids: Sequence[int],
        exclude: Collection[str] = (),
        full: Collection[str] = (),
    ) -> Node | None:
        """The P node that has the least to compute before this prompt's first token. Remembers the prompt as its.

        Nodes to `exclude` are taken where there are no others, `full` ones never.
        """
        candidates = [node for node in nodes if not node.stats.draining and node.node_id not in full]
        candidates = [node for node in candidates if node.node_id not in exclude] or candidates
        if not candidates:
            return None
        hashes = _block_hashes(token_ids)
        best = min(candidates, key=lambda node: (self._cost(node, hashes), random.random()))
        for block in hashes:
            key = (best.hello.incarnation, block)
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > _MAX_BLOCKS:
            self._blocks.popitem(last=False)
        return best

    def decode(
        self, nodes: Sequence[Node], prefill: Node, exclude: Collection[str] = (), full: Collection[str] = ()
    ) -> Node | None:
        """The less loaded of two random D nodes that can pull from `prefill`.

        Nodes to `exclude` are taken where there are no others, `full` ones never.
        """
        candidates = [node for node in nodes if can_pull(node, prefill) and node.node_id not in full]
        candidates = [node for node in candidates if node.node_id not in exclude] or candidates
        if not candidates:
            return None
        pair = random.sample(candidates, min(2, len(candidates)))
        return min(pair, key=lambda node: (node.stats.active + node.stats.queued) / max(1, node.hello.capacity))

    def _cost(self, node: Node, hashes: Sequence[int]) -> int:
        matched = 0
        for block in hashes:
            if (node.hello.incarnation, block) not in self._blocks:
                break
            matched += _BLOCK_TOKENS
        return node.stats.queued + node.assigned_tokens - matched


def can_pull(decode: Node, prefill: Node) -> bool:
    """Whether a D node takes requests whose prompt `prefill` computes."""
    return not decode.stats.draining and decode.hello.layout == prefill.hello.layout


def _block_hashes(token_ids: Sequence[int]) -> list[int]:
    """A hash per full block that covers the whole prefix up to its end."""
    hashes, chain = [], 0
    for start in range(0, len(token_ids) - _BLOCK_TOKENS + 1, _BLOCK_TOKENS):
        chain = hash((chain, tuple(token_ids[start : start + _BLOCK_TOKENS])))
        hashes.append(chain)
    return hashes

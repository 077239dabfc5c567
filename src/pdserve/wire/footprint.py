"""What a request takes of a Decode node: the same sum at the node, which decides, and at the Master, which chooses."""

from __future__ import annotations

import attrs


@attrs.frozen
class Footprint:
    """`n` slots, and pages for a prompt and `n` outputs. Lengths in tokens."""

    prompt_tokens: int
    max_tokens: int
    n: int

    def pages(self, page_size: int, computed: int | None = None) -> int:
        """The worst case. The full pages of the `computed` first positions are shared by all choices."""
        if computed is None:
            computed = self.prompt_tokens - 1
        # The KV of the last token of an output is never computed.
        each = -(-(self.prompt_tokens + self.max_tokens - 1) // page_size)
        shared = computed // page_size
        return shared + self.n * (each - shared)

    @staticmethod
    def longest_output(prompt_tokens: int, n: int, *, pages: int, page_size: int) -> int:
        """The largest `max_tokens` that takes no more than `pages`; less than 1 where nothing fits."""
        shared = (prompt_tokens - 1) // page_size
        return ((pages - shared) // n + shared) * page_size - prompt_tokens + 1

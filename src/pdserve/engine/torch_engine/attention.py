"""Paged attention for a ragged batch: decode items padded together, every prefill chunk by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from pdserve.engine.base import Work

    Ints = npt.NDArray[np.int64]

_SMALL_TABLE = 16
"""Pages up to which padding a shorter sequence costs less than another group of decode items."""


@attrs.frozen
class Group:
    """Consecutive rows of the batch that attend in one call: B one-token items, or the n rows of one chunk."""

    first: int
    last: int
    """Rows first .. last - 1."""
    blocks: torch.Tensor
    """Where the group's pages begin in `KvPool.blocks`, flat; a decode group has its B tables one after the other."""
    width: int
    """Positions to attend over."""
    mask: torch.Tensor | None
    """Added to the scores: [B, 1, 1, width] of a decode group, [n, width] of a chunk; None: causal, from position 0."""
    decode: bool


@attrs.frozen
class Batch:
    """A step's tokens on the device: decode items first, by length, then prefill chunks. T tokens, [T] each."""

    tokens: torch.Tensor
    positions: torch.Tensor
    pages: torch.Tensor
    """The page that each token's KV goes to."""
    offsets: torch.Tensor
    """The place within that page."""
    groups: tuple[Group, ...]
    last_rows: tuple[int, ...]
    """Row of each work item's last token, in the order of the plan."""


class KvPool:
    """All KV pages, one contiguous tensor [pages, layers, 2 (k, v), page_size, kv_heads, head_dim]."""

    def __init__(self, pages: torch.Tensor) -> None:
        self.pages = pages
        _, self.layers, _, self.page_size, self.kv_heads, self.head_dim = pages.shape
        self.blocks = pages.view(-1, self.page_size * self.kv_heads * self.head_dim)
        """One row per (page, layer, k or v): what a gather copies in one piece."""
        self._both = torch.arange(2, device=pages.device)[:, None]

    def copy(self, source: int, target: int) -> None:
        self.pages[target].copy_(self.pages[source])

    def write(self, layer: int, batch: Batch, kv: torch.Tensor) -> None:
        """Store keys and values [T, 2, kv_heads, head_dim] of the batch's tokens."""
        self.pages[:, layer].index_put_((batch.pages, self._both, batch.offsets), kv.transpose(0, 1))

    def read(self, layer: int, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a group, [B, kv_heads, width, head_dim] each."""
        blocks = group.blocks + 2 * layer
        tables = group.last - group.first if group.decode else 1
        return self._gather(blocks, tables, group.width), self._gather(blocks + 1, tables, group.width)

    def _gather(self, blocks: torch.Tensor, tables: int, width: int) -> torch.Tensor:
        gathered = self.blocks.index_select(0, blocks).view(tables, -1, self.kv_heads, self.head_dim)
        return gathered[:, :width].transpose(1, 2)


def attend(query: torch.Tensor, layer: int, batch: Batch, pool: KvPool) -> torch.Tensor:
    """Attention of every row over its sequence so far, its own KV included. [T, heads, head_dim] in and out.

    The query heads that share a KV head take the place of the query length in decode and of the heads in a chunk, so
    that no KV is repeated in memory.
    """
    out = torch.empty_like(query)
    _, heads, size = query.shape
    shared = heads // pool.kv_heads
    for group in batch.groups:
        rows = slice(group.first, group.last)
        keys, values = pool.read(layer, group)
        if group.decode:
            q = query[rows].view(-1, pool.kv_heads, shared, size)
            out[rows] = F.scaled_dot_product_attention(q, keys, values, attn_mask=group.mask).reshape(-1, heads, size)
        else:
            q = query[rows].view(-1, pool.kv_heads, shared, size).permute(1, 2, 0, 3)
            shape = (-1, shared, -1, -1)
            attended = F.scaled_dot_product_attention(
                q,
                keys.transpose(0, 1).expand(shape),
                values.transpose(0, 1).expand(shape),
                attn_mask=group.mask,
                is_causal=group.mask is None,
            )
            out[rows] = attended.permute(2, 0, 1, 3).reshape(-1, heads, size)
    return out


class BatchBuilder:
    """Lays out the batch of a plan. Masks are in `dtype`, everything on the pool's device."""

    def __init__(self, pool: KvPool, dtype: torch.dtype) -> None:
        self._page_size = pool.page_size
        self._blocks_per_page = 2 * pool.layers
        self._device = pool.pages.device
        self._dtype = dtype

    def build(self, work: Sequence[Work]) -> Batch:
        """Raises ValueError for an item without tokens or with too short a page table."""
        tables = [self._table(item) for item in work]
        decode = sorted((i for i in range(len(work)) if len(work[i].tokens) == 1), key=lambda i: len(tables[i]))
        chunks = [i for i in range(len(work)) if len(work[i].tokens) > 1]
        order = decode + chunks
        positions = [np.arange(work[i].start, work[i].start + len(work[i].tokens), dtype=np.int64) for i in order]
        ends = np.cumsum([len(at) for at in positions])
        last_rows = [0] * len(work)
        for i, end in zip(order, ends, strict=True):
            last_rows[i] = int(end) - 1
        groups = [
            self._decode_group(first, [work[i] for i in members], [tables[i] for i in members])
            for first, members in _by_length(decode, tables)
        ]
        groups += [
            self._chunk(int(end) - len(work[i].tokens), work[i], tables[i])
            for i, end in zip(chunks, ends[len(decode) :], strict=True)
        ]
        flat = np.concatenate(positions)
        return Batch(
            tokens=self._put(np.concatenate([np.asarray(work[i].tokens, dtype=np.int64) for i in order])),
            positions=self._put(flat),
            pages=self._put(
                np.concatenate([tables[i][at // self._page_size] for i, at in zip(order, positions, strict=True)])
            ),
            offsets=self._put(flat % self._page_size),
            groups=tuple(groups),
            last_rows=tuple(last_rows),
        )

    def _table(self, item: Work) -> Ints:
        """The pages up to the item's last position; the sequence may have more, for later."""
        count = -(-(item.start + len(item.tokens)) // self._page_size)
        if not item.tokens or len(item.pages) < count:
            raise ValueError(f"{len(item.tokens)} tokens from {item.start} do not fit {len(item.pages)} pages")
        return np.asarray(item.pages[:count], dtype=np.int64)

    def _decode_group(self, first: int, work: Sequence[Work], tables: Sequence[Ints]) -> Group:
        # A shorter table is padded with its own first page: valid memory, finite numbers, masked out.
        padded = np.stack(
            [np.pad(table, (0, len(tables[-1]) - len(table)), constant_values=table[0]) for table in tables]
        )
        lengths = np.array([item.start + 1 for item in work])
        width = int(lengths.max())
        mask = self._mask(np.arange(width) < lengths[:, None])[:, None, None, :]
        return Group(first, first + len(work), self._blocks(padded.ravel()), width, mask, decode=True)

    def _chunk(self, first: int, item: Work, table: Ints) -> Group:
        n, width = len(item.tokens), item.start + len(item.tokens)
        mask = None
        if item.start > 0:
            mask = self._mask(np.arange(width) <= np.arange(item.start, width)[:, None])
        return Group(first, first + n, self._blocks(table), width, mask, decode=False)

    def _blocks(self, pages: Ints) -> torch.Tensor:
        return self._put(pages * self._blocks_per_page)

    def _mask(self, visible: npt.NDArray[np.bool_]) -> torch.Tensor:
        return self._put(np.where(visible, np.float32(0), np.float32(-np.inf))).to(self._dtype)

    def _put(self, array: npt.NDArray[np.int64] | npt.NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _by_length(items: Sequence[int], tables: Sequence[Ints]) -> Iterator[tuple[int, list[int]]]:
    """Split items, ordered by length, so that padding at most doubles a table. Yields (index of the first, items)."""
    first = 0
    for at in range(1, len(items) + 1):
        shortest = len(tables[items[first]])
        if at == len(items) or len(tables[items[at]]) > max(2 * shortest, _SMALL_TABLE):
            yield first, list(items[first:at])
            first = at

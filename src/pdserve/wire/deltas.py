"""Merging output that waits, on either side of a link."""

from __future__ import annotations

from pdserve.wire.messages import Delta


def merge_deltas(old: Delta, new: Delta) -> Delta:
    """Two contiguous deltas as one. Raises ValueError on a gap, which is a bug of the emitter."""
    if new.start_index != old.start_index + len(old.token_ids):
        raise ValueError(f"output of {new.id} jumps from {old.start_index + len(old.token_ids)} to {new.start_index}")
    return Delta(
        old.id,
        old.epoch,
        old.start_index,
        old.token_ids + new.token_ids,
        old.text + new.text,
        old.logprobs + new.logprobs,
        new.finish,
        new.stop_reason,
        old.choice,
    )

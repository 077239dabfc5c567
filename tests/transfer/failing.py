"""A pull that has to fail."""

from __future__ import annotations

import pytest
import trio


async def fails(pull, error: type[Exception], match: str) -> bool:
    """Wait for the failure; what abandoning the pull then says."""
    with pytest.raises(error, match=match), trio.fail_after(60):
        await pull.wait()
    return pull.abandon()

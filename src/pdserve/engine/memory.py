"""How an engine refuses a KV pool that the machine has no memory for."""

from __future__ import annotations

from pdserve.errors import ConfigError


def no_room(kv_tokens: int, nbytes: int, reason: object) -> ConfigError:
    """The error for `kv_tokens` positions that take `nbytes` bytes in all."""
    return ConfigError(f"--kv-tokens {kv_tokens} needs {-(-nbytes // 2**30)} GiB of KV memory: {reason}")

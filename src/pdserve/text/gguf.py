"""Reading GGUF files: metadata and tensor directory, without torch and without copying the weights.

Own code because the public reader makes a numpy array per string: 3 s for a vocabulary of 49k entries, on every
start of every process; this one takes a few tens of milliseconds. Format: the GGUF specification of ggml, versions 2
and 3.
"""

from __future__ import annotations

import mmap
import struct
from typing import TYPE_CHECKING, Any

import attrs

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@attrs.frozen
class GgufTensor:
    """One entry of the tensor directory."""

    name: str
    shape: tuple[int, ...]
    """Row-major (outermost first), the reverse of the file's order."""
    ggml_type: int
    """ggml quantisation type number, as `gguf.GGMLQuantizationType` names it."""
    offset: int
    """Absolute position of the data in the file, in bytes."""


@attrs.frozen
class GgufFile:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    header_bytes: int
    """Length of everything before the tensor data: what identifies the file's shape and vocabulary."""


def read_gguf(path: Path) -> GgufFile:
    """Read metadata and tensor directory. Raises ConfigError naming the file when it is not a usable GGUF."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(path, data).read()
    except (OSError, ValueError, TypeError, struct.error, LookupError, ArithmeticError, RecursionError) as error:
        raise ConfigError(f"--model: {path} is not a readable GGUF file: {error}") from error


class _Cursor:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def read(self) -> GgufFile:
        if self._data[:4] != b"GGUF":
            raise ValueError("the magic number is missing")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported")
        tensor_count, field_count = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(field_count):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        directory = [self._tensor() for _ in range(tensor_count)]
        alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        header = self._at
        start = -(-header // alignment) * alignment
        tensors = {t.name: attrs.evolve(t, offset=start + t.offset) for t in directory}
        return GgufFile(self._path, metadata, tensors, header)

    def _scalar(self, code: str) -> Any:  # noqa: ANN401 - the type is in the file
        fmt = "<" + code
        (value,) = struct.unpack_from(fmt, self._data, self._at)
        self._at += struct.calcsize(fmt)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        raw = self._data[self._at : self._at + length]
        if len(raw) != length:
            raise ValueError("truncated string")
        self._at += length
        return raw.decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:  # noqa: ANN401
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        item, count = self._scalar("I"), self._scalar("Q")
        if item == _STRING:
            return self._strings(count)
        if item == _ARRAY:
            return [self._value(item) for _ in range(count)]
        fmt = f"<{count}{_SCALARS[item]}"
        values = struct.unpack_from(fmt, self._data, self._at)
        self._at += struct.calcsize(fmt)
        return list(values)

    def _strings(self, count: int) -> list[str]:
        """As `count` times `_string`, several times faster: vocabularies are most of a header."""
        data, at, end = self._data, self._at, len(self._data)
        unpack = struct.Struct("<Q").unpack_from
        values: list[str] = []
        for _ in range(count):
            start = at + 8
            at = start + unpack(data, at)[0]
            if at > end:
                raise ValueError("truncated string")
            values.append(data[start:at].decode("utf-8", errors="replace"))
        self._at = at
        return values

    def _tensor(self) -> GgufTensor:
        name = self._string()
        dims = [self._scalar("Q") for _ in range(self._scalar("I"))]
        ggml_type, offset = self._scalar("I"), self._scalar("Q")
        return GgufTensor(name, tuple(reversed(dims)), ggml_type, offset)

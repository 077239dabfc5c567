"""Typed access to the fields of a JSON request: every error names the parameter. Unknown fields are never looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping


class Fields:
    """A JSON object under validation. A field that is `null` counts as absent, as the clients of OpenAI mean it."""

    def __init__(self, data: Mapping[str, Any], prefix: str = "") -> None:
        self._data = data
        self._prefix = prefix

    @classmethod
    def parse(cls, body: bytes) -> Fields:
        """Raises InvalidRequestError for anything but a JSON object."""
        try:
            data = msgspec.json.decode(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
        if not isinstance(data, dict):
            raise InvalidRequestError("the body must be a JSON object")
        return cls(data)

    def invalid(self, name: str, problem: str) -> InvalidRequestError:
        """The error to raise about a field of this object."""
        param = self._prefix + name
        return InvalidRequestError(f"{param}: {problem}", param=param)

    def get(self, name: str) -> Any:  # noqa: ANN401 - JSON
        return self._data.get(name)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self._data.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.invalid(name, "must be true or false")
        return value

    def integer(self, name: str, *, low: int, high: int | None = None) -> int | None:
        """None if absent; else within low..high, both included."""
        value = self._data.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.invalid(name, "must be an integer")
        if value < low or (high is not None and value > high):
            raise self.invalid(name, f"must be at least {low}" if high is None else f"must be {low} to {high}")
        return value

    def number(self, name: str, default: float, *, low: float, high: float, above_low: bool = False) -> float:
        """Within low..high; `above_low` excludes `low` itself. JSON has neither NaN nor infinities."""
        value = self._data.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.invalid(name, "must be a number")
        if not low <= value <= high or (above_low and value == low):
            bound = f"above {low:g}" if above_low else f"at least {low:g}"
            raise self.invalid(name, f"must be {bound} and at most {high:g}")
        return float(value)

    def text(self, name: str) -> str | None:
        value = self._data.get(name)
        if value is not None and not isinstance(value, str):
            raise self.invalid(name, "must be a string")
        return value

    def nested(self, name: str) -> Fields | None:
        """An object, whose own errors are named `name.field`."""
        value = self._data.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.invalid(name, "must be an object")
        return Fields(value, f"{self._prefix}{name}.")

    def strings(self, name: str, *, most: int, longest: int) -> tuple[str, ...]:
        """A string, or a list of up to `most`; none empty, none over `longest` characters."""
        value = self._data.get(name)
        if value is None:
            return ()
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise self.invalid(name, "must be a string or a list of strings")
        if len(items) > most:
            raise self.invalid(name, f"at most {most} strings are possible")
        if any(not 0 < len(item) <= longest for item in items):
            raise self.invalid(name, f"each string must have 1 to {longest} characters")
        return tuple(items)

    def token_ids(self, name: str, *, vocab_size: int, most: int | None = None) -> tuple[int, ...]:
        """A list of ids, each within the vocabulary; empty if absent."""
        value = self._data.get(name)
        return () if value is None else self.as_token_ids(name, value, vocab_size=vocab_size, most=most)

    def as_token_ids(
        self,
        name: str,
        value: Any,  # noqa: ANN401 - JSON
        *,
        vocab_size: int,
        most: int | None = None,
    ) -> tuple[int, ...]:
        try:
            ids = msgspec.convert(value, tuple[int, ...])
        except msgspec.ValidationError as error:
            raise self.invalid(name, "must be a list of integer token ids") from error
        if most is not None and len(ids) > most:
            raise self.invalid(name, f"at most {most} ids are possible")
        if ids and (min(ids) < 0 or max(ids) >= vocab_size):
            wrong = next(i for i in ids if not 0 <= i < vocab_size)
            raise self.invalid(name, f"token id {wrong} is not in the vocabulary of {vocab_size}")
        return ids

"""ConfigReader.

The keys of a model's config file, read by type, so that a damaged value is refused where it is
read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from photon_ext.errors import ModelError, shown

MAX_SIZE = (
    2**24
)  # of a dimension; nothing published comes near, and the bytes of two still count in 64 bits
MAX_LAYERS = 4096
MAX_POSITIONS = 2**31 - 1  # positions are int32 on the device
# Constants reach the kernels in float32: what is smaller becomes 0 there, and what is larger
# infinite.
MIN_NUMBER, MAX_NUMBER = 1.2e-38, 3.0e38


class ConfigReader:
    """Typed access to a mapping from a file.

    A key that is absent or null has its default, where there is one. Every error is a
    ModelError that names the file, the key, the value and what was expected.
    """

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        """`source`: the file; `prefix`.

        What stands before each key in it, such as "rope_parameters.".
        """
        self._values = values
        self._source = source
        self._prefix = prefix

    def get(self, key: str) -> Any:
        """The value as it stands, None where there is none."""
        return self._values.get(key)

    def has(self, key: str) -> bool:
        """Whether the key is there, null or not."""
        return key in self._values

    def positive(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """An integer from 1 to `most`."""
        value = self._or_default(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            self.refuse(key, f"an integer from 1 to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0 that float32 can hold."""
        value = self._or_default(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not MIN_NUMBER <= value <= MAX_NUMBER
        ):
            self.refuse(key, "a finite number above 0 that float32 holds, from 1.2e-38 to 3.0e38")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self._or_default(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def text(self, key: str) -> str | None:
        """A string, or None where the key is absent."""
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            self.refuse(key, "a text")
        return value

    def items(self, key: str) -> list[Any]:
        """A list; empty where the key is absent."""
        value = self._or_default(key, [])
        if not isinstance(value, (list, tuple)):
            self.refuse(key, "a list")
        return list(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of `count` numbers as `number` takes them."""
        values = self.items(key)
        if len(values) != count:
            self.refuse(key, f"a list of {count} numbers")
        each = ConfigReader(
            {str(at): value for at, value in enumerate(values)},
            self._source,
            f"{self._prefix}{key}.",
        )
        return tuple(each.number(str(at)) for at in range(count))

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them, as a tuple without duplicates.

        Empty where the key is absent.
        """
        value = self._or_default(key, [])
        ids = value if isinstance(value, (list, tuple)) else (value,)
        if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
            self.refuse(key, "a token id or a list of them, integers from 0 on")
        return tuple(dict.fromkeys(ids))

    def object(self, key: str) -> ConfigReader | None:
        """The fields of an object inside this one.

        None where the key is absent or the object is empty.
        """
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            self.refuse(key, "an object")
        return ConfigReader(value, self._source, f"{self._prefix}{key}.") if value else None

    def keys(self, key: str) -> list[str]:
        """The keys of an object inside this one, as `object` takes it."""
        return [] if self.object(key) is None else list(self.get(key))

    def refuse(self, key: str, expected: str) -> NoReturn:
        """Raises the error for a key whose value is not what it should be."""
        raise ModelError(
            f"{self._source}: {self._prefix}{key} is {shown(self.get(key))}, expected {expected}; "
            "the file is damaged or does not describe a model"
        )

    def _or_default(self, key: str, default: Any) -> Any:
        value = self.get(key)
        return default if value is None else value

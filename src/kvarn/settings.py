"""A model's settings by name, read with the type and range that they must have.

A GGUF header, a config.json and the files of a tokenizer are dictionaries from outside. A setting may be
missing, null, of the wrong type, out of range, or a list with one value per layer. A setting that does
not fit raises `BadModel`, which names the file and the setting.
Non-goals: opening a file; knowing any setting (the family files, loading/, text/).
"""

import math
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvarn.errors import BadModel

_LARGEST = 1 << 40  # no count, size or context of a model comes near it
_QUOTE = reprlib.Repr()  # quotes the beginning of a value, however large it is
_QUOTE.maxstring = _QUOTE.maxother = 100


class Settings:
    def __init__(self, where: str, values: Mapping[str, Any], prefix: str = "") -> None:
        self.where = where
        self.prefix = prefix
        self.values = values

    def get(self, key: str) -> Any:
        """None when missing or null. A list of equal values counts as that value."""
        value = self.values.get(self.prefix + key)
        if isinstance(value, np.ndarray):
            several = value.size == 0 or (value != value[0]).any()
            return value.tolist() if several else value[0].item()
        return value

    def bad(self, key: str, wanted: str) -> BadModel:
        value = _QUOTE.repr(self.values.get(self.prefix + key))
        return BadModel(f"{self.where}: {self.prefix}{key} is {value}, not {wanted}; fetch or convert the model again")

    def missing(self, key: str) -> BadModel:
        return BadModel(f"{self.where} does not say {self.prefix}{key}; fetch or convert the model again")

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.missing(key)
            return default
        if isinstance(value, list):
            remedy = "which kvarn does not run; use another model"
            raise BadModel(f"{self.where}: {self.prefix}{key} differs from layer to layer, {remedy}")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not least <= value <= _LARGEST:
            raise self.bad(key, f"a whole number from {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number: no setting of a model may be zero or negative."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.missing(key)
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.bad(key, "a number")
        if not (math.isfinite(value) and 0 < value <= _LARGEST):
            raise self.bad(key, "a positive number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(key, "true or false")
        return value

    def optional_text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.bad(key, "text")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.optional_text(key)
        if value is None:
            if default is None:
                raise self.missing(key)
            return default
        return value

    def texts(self, key: str) -> list[str]:
        value = self.values.get(self.prefix + key)
        if value is None:
            raise self.missing(key)
        found = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise self.bad(key, "a list of texts")
        return found

    def optional_numbers(self, key: str, count: int, kinds: str = "iuf") -> NDArray[Any] | None:
        """`count` numbers. `kinds` are NumPy's letters of the allowed types."""
        value = self.values.get(self.prefix + key)
        if value is None:
            return None
        try:
            array = np.asarray(value)
        except ValueError:  # lists of different lengths
            raise self.bad(key, "a list of numbers") from None
        if array.size and array.dtype.kind not in kinds:
            raise self.bad(key, "a list of whole numbers" if "f" not in kinds else "a list of numbers")
        if array.shape != (count,):
            raise BadModel(
                f"{self.where}: {self.prefix}{key} has the shape {array.shape}, not ({count},); convert the model again"
            )
        return array

    def inside(self, key: str) -> "Settings":
        """The settings of a nested dictionary. A missing dictionary has no settings."""
        value = self.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.bad(key, "a dictionary")
        return Settings(f"{self.where}: {key}", value)

    def refuse(self, key: str, neutral: tuple[Any, ...], what: str) -> None:
        """Raise unless the setting is missing or neutral: kvarn does not have what it asks for."""
        value = self.get(key)
        if value is not None and value not in neutral:
            shown = _QUOTE.repr(value)
            raise BadModel(f"{self.where}: {self.prefix}{key} is {shown}: kvarn has no {what}; use another model")

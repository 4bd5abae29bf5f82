"""The range of the grey values of pictures that have more than 8 bits, but do not use all of them."""

from __future__ import annotations

import math
from typing import Final, NamedTuple, Self

VALUE_RANGE: Final = "value_range"  # among the options of a source in a manifest
HOW_TO_GIVE: Final = f"name it: `--source-option {VALUE_RANGE}=LOW..HIGH` of build, `--value-range LOW..HIGH` of index"


class ValueRange(NamedTuple):
    """The stored values that become 0 and 255; values outside of them become 0 or 255 too."""

    low: float
    high: float

    @classmethod
    def parse(cls, text: str | float) -> Self:
        """Return the range of a text such as "0..4095"; a number alone is the highest value, and 0 the lowest.

        Raises `ValueError` if the text is no range.

        Examples:
            >>> ValueRange.parse(4095), str(ValueRange.parse("-1.5..2"))
            (ValueRange(low=0.0, high=4095.0), '-1.5..2')
        """
        low, _, high = str(text).rpartition("..")
        try:
            found = cls(float(low or 0), float(high))
        except ValueError:
            raise ValueError(f"{text} is not a range of values; write it as 0..4095") from None
        if not (math.isfinite(found.low) and math.isfinite(found.high) and found.low < found.high):
            raise ValueError(f"{text} is not a range from a lower to a higher value; write it as 0..4095")
        return found

    def __str__(self) -> str:
        return f"{self.low:.17g}..{self.high:.17g}"

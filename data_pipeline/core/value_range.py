"""The range of the grey values of pictures that have more than 8 bits, but do not use all of them."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Final, NamedTuple, Self

from data_pipeline.core.errors import UserError

VALUE_RANGE: Final = "value_range"  # among the options of a source in a manifest
HOW_TO_GIVE: Final = f"name it: `--source-option {VALUE_RANGE}=LOW..HIGH` of build, `--value-range LOW..HIGH` of index"


class ValueRange(NamedTuple):
    """The stored values that become 0 and 255; values outside of them become 0 or 255 too."""

    low: float
    high: float

    @classmethod
    def parse(cls, text: str | float | None) -> Self | None:
        """Return the range of a text such as "0..4095"; a number alone is the highest value, and 0 the lowest.

        None gives None. Raises `UserError` if the text is no range.

        Examples:
            >>> ValueRange.parse(4095), str(ValueRange.parse("-1.5..2"))
            (ValueRange(low=0.0, high=4095.0), '-1.5..2')
        """
        if text is None:
            return None
        low, _, high = str(text).rpartition("..")
        with suppress(ValueError):
            found = cls(float(low or 0), float(high))
            if -math.inf < found.low < found.high < math.inf:
                return found
        raise UserError(f"{text} is not a range from a lower to a higher value; write it as 0..4095")

    def __str__(self) -> str:
        return "..".join(str(int(each) if float(each).is_integer() else each) for each in self)

"""The base class of all configs and of files that pass between stages, and the types of their numbers and texts.

Each number of a config has bounds, so that a value which cannot work (an overflow, more memory than any machine has) is
refused at once. The bounds are wide and accept unwise values.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from data_pipeline.core.errors import UserError
from data_pipeline.core.overrides import apply_settings, by_path
from data_pipeline.core.validation import KIND, PRINTABLE, describe

MAX_SEED = 2**63 - 1  # an int64

# Whole numbers.
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
Count = Annotated[int, Field(ge=1, le=10**9)]  # of samples, steps, epochs: the product of two of them is an int64
CountOrZero = Annotated[int, Field(ge=0, le=10**9)]
BatchSize = Annotated[int, Field(ge=1, le=2**24)]  # rows that are in memory at once: a batch, a queue, a tile
LayerSize = Annotated[int, Field(ge=1, le=2**15)]  # outputs of one layer; with as many inputs, its weights take 4 GB
ImageSize = Annotated[int, Field(ge=1, le=2**15)]  # rows or columns of a picture
NumProcesses = Annotated[int, Field(ge=1, le=10**6)]  # ranks, nodes, processors
NumWorkers = Annotated[int, Field(ge=0, le=1_024)]  # data workers of a rank
# Shares.
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]
# Other numbers. float32 reaches from 1e-38 to 3e38, and some of these are multiplied by each other.
PositiveFactor = Annotated[float, Field(ge=1e-12, le=1e12)]  # the weight of a loss
LearningRate = Annotated[float, Field(ge=1e-30, le=1e30)]  # training shows if it is too high
Factor = Annotated[float, Field(ge=0, le=1e12)]
Decay = Factor  # of weights
Epsilon = Annotated[float, Field(ge=1e-30, le=1e12)]  # added to a denominator
Temperature = Annotated[float, Field(ge=1e-4, le=1e4)]  # logits are cosines divided by it
Deviation = Annotated[float, Field(ge=0, le=1e3)]  # of noise on inputs with a scale of 1
InputMean = Annotated[float, Field(ge=-1e6, le=1e6)]
InputStd = Annotated[float, Field(ge=1e-6, le=1e6)]
Seconds = Annotated[float, Field(ge=1e-3, le=10**6)]  # up to 11 days: poll() counts milliseconds in 31 bits
Gigabytes = Annotated[float, Field(gt=0, le=10**9)]  # 10^9 bytes; the bytes are an int64


def _check_ascent(limits: tuple[float, float]) -> tuple[float, float]:
    if limits[0] > limits[1]:
        raise ValueError("it must be two ascending numbers")
    return limits


Ascending = AfterValidator(_check_ascent)  # of the type of a range: the lowest and the highest value

_MAX_WHOLE = 1e15  # a float that is written without an exponent
MAX_CHARACTERS = 4_096  # of a `Line`, as of a path on Linux


_LABEL_NAME = r"[A-Za-z][A-Za-z0-9_]{0,31}"

# Text that is safe in a line of a terminal or a script.
Line = Annotated[str, StringConstraints(min_length=1, max_length=MAX_CHARACTERS, pattern=PRINTABLE)]
# Text that can be the name of a file. With the seed, it names a directory (at most 255 bytes) and a group in W&B (128).
Name = Annotated[str, StringConstraints(max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._+=-]*$")]
# Part of file names, metrics and fields of JSON.
LabelName = Annotated[str, StringConstraints(pattern=f"^{_LABEL_NAME}$")]


def is_label_name(text: str) -> bool:
    """Return whether a text can be the name of a label: a plain word, which is safe as part of a file name.

    Examples:
        >>> is_label_name("site_2"), is_label_name("Finding Labels"), is_label_name("../x")
        (True, False, False)
    """
    return re.fullmatch(_LABEL_NAME, text) is not None


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# A number in a results file. JSON has no inf and no nan, so a number that is not finite is None, and null in the file.
Measured = Annotated[float | None, BeforeValidator(_finite_or_none)]


def shown(number: Measured, form: str) -> str:
    """Return a measured number in a format such as ".3f", or a dash if it is None.

    Examples:
        >>> shown(0.25, ".1%"), shown(None, ".1%")
        ('25.0%', '–')
    """
    return "–" if number is None else format(number, form)


def drawn(numbers: Sequence[Measured]) -> list[float]:
    """Return numbers for a figure, with nan, which a figure leaves out, for None."""
    return [math.nan if number is None else number for number in numbers]


class Schema(BaseModel):
    """A frozen model that refuses unknown keys, so that a misspelt setting is never silently ignored.

    A section of which some settings are given has the others, and its kind, from the default of its field.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _know_the_keys(cls, values: Any) -> Any:
        """Refuse unknown keys by a custom error, whose context has the valid ones for `describe`."""
        if not isinstance(values, dict):
            return values
        fields = cls.model_fields  # once, because each look at this property takes longer than the rest
        for key in values:
            if key not in fields:
                raise PydanticCustomError("unknown_key", "unknown key {key}", {"key": key, "valid": list(fields)})
        return {name: _with_defaults(value, fields[name].default) for name, value in values.items()}

    def __hash__(self) -> int:
        """Return a hash of the values. Pydantic's own refuses a model with a mapping in it."""
        values = (getattr(self, name) for name in type(self).model_fields)
        return hash((type(self), *(frozenset(each.items()) if isinstance(each, dict) else each for each in values)))

    @classmethod
    def parse(cls, value: dict[str, Any], *, where: str) -> Self:
        """Return the model of `value`. Raises `UserError` that names `where`, the key and the valid values."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise UserError(f"{where}: {describe(error, value)}") from None

    def override(self, overrides: Sequence[str], *, where: str) -> Self:
        """Return a copy with `overrides` applied: each is "a.b=c" with the value in YAML, as on a command line.

        If a setting is given twice, the last value counts; otherwise the order does not matter. Outer settings are
        applied first: `a` before `a.b`, and `a.kind` before the other settings of `a`. A mapping replaces its whole
        section. A new `kind` starts its section from the defaults of that kind; the present kind changes nothing.

        Raises `UserError` if a setting is unknown; the error names the nearest valid setting.
        """
        values = apply_settings(self.model_dump(mode="json"), overrides)
        given = "".join(f" --set {override}" for override in overrides)
        return self.parse(values, where=f"{where} with{given}" if given else where)


def _with_defaults(value: Any, default: Any) -> Any:
    """Return the settings of a section that are given, and the others from its default if it has the same kind."""
    if not isinstance(value, dict) or not isinstance(default, BaseModel):
        return value
    settings = dict(default)
    kind = settings.get(KIND)
    return settings | value if value.get(KIND, kind) == kind else value


def flatten(config: Schema) -> dict[str, Any]:
    """Return every setting by its dotted path, e.g. "optimizer.learning_rate"."""
    values = by_path((), config.model_dump(mode="json"))
    return {".".join(path): value for path, value in values.items() if not isinstance(value, dict)}


def given_settings(model: BaseModel, path: str = "") -> set[str]:
    """Return the dotted names of the settings that are not the defaults of their fields."""
    found: set[str] = set()
    for name, field in type(model).model_fields.items():
        value, default = getattr(model, name), field.get_default(call_default_factory=True)
        if isinstance(value, BaseModel):
            found |= given_settings(value, f"{path}{name}.")
            if type(value) is not type(default):
                found.add(f"{path}{name}.{KIND}")
        elif value != default:
            found.add(f"{path}{name}")
    return found


def value_at(config: Schema, path: str) -> Any:
    """Return a setting or a section as values of JSON, by its dotted path; None if the config has no such one."""
    return by_path((), config.model_dump(mode="json")).get(tuple(path.split(".")))


def as_typed(value: Any) -> str:
    """Return a value of JSON as a user would type it, in YAML.

    Examples:
        >>> as_typed(1.0), as_typed([0.5, None, True]), as_typed({"kind": "nt_xent"})
        ('1', '[0.5, null, true]', '{kind: nt_xent}')
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < _MAX_WHOLE:
        return str(int(value))
    if isinstance(value, list):
        return f"[{', '.join(map(as_typed, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {as_typed(inner)}' for key, inner in value.items())}}}"
    return value if isinstance(value, str) else json.dumps(value)


def difference(a: Schema, b: Schema) -> list[str]:
    """Return the dotted paths of the settings in which two configs differ."""
    return differing_keys(flatten(a), flatten(b))


def differing_keys(a: Mapping[str, object], b: Mapping[str, object]) -> list[str]:
    """Return the keys that only one of the mappings has, or whose values differ."""
    missing = object()
    return [key for key in {**a, **b} if a.get(key, missing) != b.get(key, missing)]

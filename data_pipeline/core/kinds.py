"""Find the config of a section by its `kind`, a plain name.

A room with several classes to choose from (objectives, views, encoders, engines) has a base class of configs, with one
`Kinds`. A config class declares its kind, as in `kind: Literal["triplet"] = "triplet"`, and is known from then on.

The classes of this project are in a table, and those of an installed package in its entry points. They are imported
when their kind is first asked for. Other code is imported by `--code`, see `data_pipeline.core.imports.import_code`.

Invariant: a config is data. Reading one imports nothing that only the config names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Final, TypeVar, get_args

from pydantic import BaseModel
from pydantic_core import PydanticCustomError

from data_pipeline.core.errors import UserError
from data_pipeline.core.imports import import_object
from data_pipeline.core.schema import Line, Schema
from data_pipeline.core.validation import KIND

GROUP_PREFIX: Final = "overlay."  # of the groups of entry points
OF_THIS_PROJECT: Final = frozenset({"data_pipeline", "trainer", "configs", "launch"})
_OTHER_KINDS: Final = "; others are registered by --code FILE or an installed package"

Class = TypeVar("Class", bound=type)


class Names:
    """The names of the classes of one room: of this project, of installed packages, and of code that was imported.

    Args:
        section: what a class of this room is, in a sentence, such as "objective".
        group: the ending of the group of entry points, such as "objectives".
        built_in: the import path of each name of this project.
    """

    def __init__(self, section: str, *, group: str, built_in: Mapping[str, str]) -> None:
        self.section = section
        self.group = f"{GROUP_PREFIX}{group}"
        self.built_in = built_in
        self._registered: dict[str, type] = {}

    @property
    def _installed(self) -> Sequence[EntryPoint]:
        return _entry_points().get(self.group, ())

    def names(self) -> list[str]:
        """Return every name of this project, of installed packages and of registered classes."""
        installed = sorted(each.name for each in self._installed)
        return list(dict.fromkeys([*self.built_in, *installed, *self._registered]))

    def register(self, name: str) -> Callable[[Class], Class]:
        """Return a decorator that makes a class known by a name."""

        def add(found: Class) -> Class:
            self._registered[name] = found
            return found

        return add

    def find_object(self, name: str) -> Any:
        """Return the class of a name.

        Raises:
            KeyError: if there is no such name.
            UserError: if two classes claim it.
        """
        registered = self._registered.get(name)
        paths = {each.value for each in self._installed if each.name == name}
        if name in self.built_in:
            paths.add(self.built_in[name])
        if registered is not None:
            paths.add(path_of(registered))
        if not paths:
            raise KeyError(name)
        if len(paths) > 1:
            raise UserError(
                f'{" and ".join(sorted(paths))} both claim the name "{name}" of an {self.section}; give one of them '
                "another name, or uninstall its package"
            )
        return import_object(*paths) if registered is None else registered


class Kinds(Names):
    """The kinds of one section of a config: `built_in` has the import path of the config class of each."""

    def parse(self, value: Any) -> Any:
        """Return the config of a section's values: a pydantic validator, before the check for the base class."""
        if not isinstance(value, dict):
            return value
        kind = str(value.get(KIND))
        try:
            config = self.find_object(kind)
        except KeyError:
            expected = ", ".join(map(repr, self.names()))
            context = {"tag": kind, "expected_tags": expected, "others": _OTHER_KINDS}
            raise PydanticCustomError("union_tag_invalid", "unknown kind {tag}", context) from None
        return config.model_validate(value)


class KindConfig(Schema):
    """The base of a config that is chosen by its `kind`. Defining a subclass that declares kinds registers it.

    Attributes:
        kinds: where the configs of this room are found.
    """

    kinds: ClassVar[Kinds]

    kind: Line = ""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if KIND in cls.__annotations__:
            for kind in get_args(cls.model_fields[KIND].annotation):
                cls.kinds.register(kind)(cls)

    def check(self, run: Any) -> None:
        """Raise `UserError` if this section does not fit the other settings of `run`, a `trainer.config.RunConfig`."""


def path_of(found: Any) -> str:
    """Return the import path of a class."""
    return f"{found.__module__}:{found.__qualname__}"


def package_of(found: type) -> str:
    """Return the package of a class: the first part of its import path."""
    return found.__module__.partition(".")[0]


def is_own(section: KindConfig) -> bool:
    """Return whether the class of a section is of the user's own code, or of another package."""
    return package_of(type(section)) not in OF_THIS_PROJECT


def sections(config: BaseModel) -> Iterator[KindConfig]:
    """Yield every section of a config that is chosen by its kind."""
    if isinstance(config, KindConfig):
        yield config
    for _, value in config:
        if isinstance(value, BaseModel):
            yield from sections(value)


@cache
def _entry_points() -> dict[str, tuple[EntryPoint, ...]]:
    """Return our entry points of all installed packages by group. The packages are searched once, in 20 ms."""
    found: Any = entry_points()
    return {group: tuple(found.select(group=group)) for group in found.groups if group.startswith(GROUP_PREFIX)}

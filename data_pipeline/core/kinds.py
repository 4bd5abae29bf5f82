"""Find the config of a section by its `kind`: a name of this project, of an installed package, or an import path.

A room with several classes to choose from (objectives, views, encoders, engines) has a base class of configs, with one
`Kinds`. The kinds of this project are in its table. Another package adds a name by an entry point of the same group.
Any other class is named by its import path, such as `my_package.losses:TripletConfig`.

Guarantees: a config class is imported when its kind is first asked for. Reading values imports no module for an import
path in them; see `import_paths`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Final, Generic, Self, TypeVar, cast, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError, PydanticKnownError
from pydantic_core.core_schema import ErrorType

from data_pipeline.core.errors import UserError
from data_pipeline.core.imports import find_in_working_directory, import_object
from data_pipeline.core.overrides import parse_setting
from data_pipeline.core.schema import Line, Schema, types_in
from data_pipeline.core.sections import CONFIG, KIND, has_path, import_path, kinds_of

KEEP_UNKNOWN: Final = "keep unknown kinds"  # a context of `Schema.parse`, for the config of a run
GROUP_PREFIX: Final = "overlay."  # of the groups of entry points

Config = TypeVar("Config", bound="KindConfig")


class Names:
    """The names of the classes of one room: of this project, of installed packages, and import paths.

    Args:
        section: what a class of this room is, in a sentence, such as "objective".
        group: the ending of the group of entry points, such as "objectives".
        built_in: the import path of each name of this project.
    """

    def __init__(self, section: str, *, group: str, built_in: Mapping[str, str]) -> None:
        self.section = section
        self.group = f"{GROUP_PREFIX}{group}"
        self.built_in = built_in

    def names(self) -> list[str]:
        """Return every name of this project and of installed packages."""
        return [*self.built_in, *(name for name in _entry_points(self.group) if name not in self.built_in)]

    def find_object(self, name: str) -> Any | None:
        """Return what a name or an import path names; None for an import path whose module is not imported.

        Raises `KeyError` if there is no such name, and `UserError` if two packages claim it.
        """
        if ":" not in name:
            return import_object(self.path_of(name))
        return import_object(name) if name.partition(":")[0] in sys.modules else None

    def path_of(self, name: str) -> str:
        """Return the import path of a name. Raises `KeyError`, or `UserError` if two packages claim it."""
        claims = _entry_points(self.group).get(name, ())
        packages = [_package(each) for each in claims]
        if claims and name in self.built_in:
            raise UserError(
                f'the package {packages[0]} has an entry point "{name}" in the group {self.group}, but this '
                f"{self.section} is built in; give that entry point another name"
            )
        if len(claims) > 1:
            raise UserError(
                f'the packages {" and ".join(packages)} both have an entry point "{name}" in the group {self.group}; '
                f"uninstall one of them, or name the class by its import path, such as {claims[0].value}"
            )
        return claims[0].value if claims else self.built_in[name]


class Kinds(Names, Generic[Config]):
    """The kinds of one section of a config: `built_in` has the import path of the config class of each."""

    base: type[Config]

    def __init__(self, section: str, *, group: str, built_in: Mapping[str, str]) -> None:
        super().__init__(section, group=group, built_in=built_in)
        self._found: dict[str, type[Config]] = {}

    def __set_name__(self, owner: type[Config], name: str) -> None:
        self.base = owner

    def configs(self) -> list[type[Config]]:
        """Return the config classes of this project, and those of other packages that were found already."""
        return list(dict.fromkeys([*map(self.find, self.built_in), *self._found.values()]))

    def find(self, kind: str) -> type[Config]:
        """Return the config class of a kind; for an import path whose module is not imported, a class of bare values.

        Raises:
            KeyError: if there is no such kind.
            UserError: if two packages claim the name, or if the class has no config that can be used.
        """
        if kind not in self._found:
            found = self.find_object(kind)
            if found is None:
                return self._not_imported
            self._found[kind] = self._config_of(found, kind)
        return self._found[kind]

    def parse(self, value: Any, info: ValidationInfo) -> Any:
        """Return the config of a section's values: a pydantic validator, before the check for the base class.

        In the context `KEEP_UNKNOWN`, an unknown kind gives a class of bare values.
        """
        if isinstance(value, self.base):
            check_usable(type(value))
        if not isinstance(value, dict):
            return value
        if KIND not in value:
            raise PydanticKnownError("union_tag_not_found", {"discriminator": "'kind'"})
        kind = value[KIND]
        try:
            config = self.find(kind if isinstance(kind, str) else repr(kind))
        except KeyError:
            if info.context == KEEP_UNKNOWN:
                return self._not_imported.model_validate(value)
            expected = ", ".join(map(repr, self.names()))
            tag = {"discriminator": "'kind'", "tag": str(kind), "expected_tags": expected}
            raise PydanticKnownError("union_tag_invalid", tag) from None
        if config.is_imported and has_path(config):
            value = value | {KIND: import_path(config)}  # a class has one name in the configs of all runs
        try:
            return config.model_validate(value)
        except ValidationError as error:
            raise _inside(kind, error) from None

    def check_named(self, config: KindConfig) -> None:
        """Raise `UserError` if the kind of a config names another class than its own.

        A command builds what the kind names. So a class that has inherited the kind of another one would be replaced.
        """
        own = type(config)
        if not config.is_imported or config.kind == import_path(own):
            return
        try:
            named = import_path(self.find(config.kind))
        except KeyError:
            named = f"no class of an entry point in the group {self.group}"
        if named != import_path(own):
            base = f"{self.base.__module__}:{self.base.__qualname__}"
            raise UserError(
                f'the class {import_path(own)} has the kind "{config.kind}", which names {named}, so it would not be '
                f'used; derive it from {base}, or add the line `kind: str = ""`, which makes its import path its kind'
            )

    def _config_of(self, found: object, kind: str) -> type[Config]:
        """Return the config class of what a kind names. Raises `UserError` if there is none."""
        config = found if self._is_config(found) else getattr(found, CONFIG, None)
        if not self._is_config(config):
            base = f"{self.base.__module__}:{self.base.__qualname__}"
            raise UserError(
                f"{kind} has no config, so it is no {self.section}; name a subclass of {base}, or set its "
                f"attribute {CONFIG} to one"
            )
        config = cast(type[Config], config)
        check_usable(config)
        if not has_path(config) and kind not in kinds_of(config):
            declared = " or ".join(kinds_of(config))
            raise UserError(
                f"the class {import_path(config)} declares the kind {declared}, so it cannot be named {kind}; leave "
                f"the field `kind` out of that class, or register it as {declared} by an entry point in the group "
                f"{self.group}"
            )
        return config

    def _is_config(self, found: object) -> bool:
        return isinstance(found, type) and issubclass(found, self.base) and found is not self.base

    @cached_property
    def _not_imported(self) -> type[Config]:
        """Return a class that keeps any values, for a config that is only read, compared and shown."""
        name = f"NotImported{self.base.__name__}"
        members = {"model_config": ConfigDict(extra="allow"), "is_imported": False, "__module__": __name__}
        metaclass: Any = type(self.base)
        return cast(type[Config], metaclass(name, (self.base,), members))


class KindConfig(Schema):
    """The base of a config that is chosen by its `kind`. A subclass beside its class may leave `kind` out.

    The kind of such a subclass is its import path.

    Attributes:
        kinds: where the configs of this room are found.
        is_imported: False for the values of a class whose module was not imported.
    """

    kinds: ClassVar[Kinds[Any]]
    is_imported: ClassVar[bool] = True

    kind: Line = ""

    @model_validator(mode="before")
    @classmethod
    def _is_named_by_its_path(cls, values: Any) -> Any:
        if isinstance(values, dict) and has_path(cls):
            return {KIND: import_path(cls)} | values
        return values

    def check(self, run: Any) -> None:
        """Raise `UserError` if this section does not fit the other settings of `run`, a `trainer.config.RunConfig`."""

    def require_import(self) -> Self:
        """Return this config. Raises `UserError` if it only holds the values of a class that was not imported."""
        if not self.is_imported and ":" not in self.kind:
            raise UserError(
                f"the {self.kinds.section} {self.kind} is of a package that is not installed here; install the package "
                "with which the run was trained"
            )
        if not self.is_imported:
            raise UserError(
                f"the {self.kinds.section} {self.kind} is code that a file names, and reading a file imports no code; "
                "if you trust the writer of that file, pass --allow-code, or import the module first"
            )
        return self


def check_usable(config: type[KindConfig]) -> None:
    """Raise `UserError` if a config class is not frozen, or if it accepts unknown keys."""
    for option, wanted in (("frozen", True), ("extra", "forbid")):
        if config.is_imported and (found := config.model_config.get(option)) != wanted:
            raise UserError(
                f"the config {config.__module__}:{config.__qualname__} has {option}={found!r}, but the config of a run "
                f"must be frozen and refuse unknown keys; leave {option} out of its model_config"
            )


def import_paths(values: Any) -> Iterator[str]:
    """Yield the import paths among the kinds in the values of a config.

    Only its user may decide that these are imported; a file may come from a stranger.
    """
    if isinstance(values, Mapping):
        kind = values.get(KIND)
        if isinstance(kind, str) and ":" in kind:
            yield kind
        for inner in values.values():
            yield from import_paths(inner)


def import_typed(overrides: Sequence[str]) -> None:
    """Import the modules of the import paths that the user has typed in overrides such as "objective.kind=a.b:C".

    Raises `UserError` like `import_object`.
    """
    for text in overrides:
        setting = parse_setting(text)
        import_code({setting.path[-1]: setting.value})


def unimported(config: BaseModel) -> list[KindConfig]:
    """Return the sections of a config whose classes were not imported."""
    return [section for section in sections(config) if not section.is_imported]


def sections(config: BaseModel) -> Iterator[KindConfig]:
    """Yield every section of a config that is chosen by its kind."""
    if isinstance(config, KindConfig):
        yield config
    for _, value in config:
        if isinstance(value, BaseModel):
            yield from sections(value)


def check_kinds(config: BaseModel) -> None:
    """Raise `UserError` if a run would build another class than that of a section.

    The config of a run holds the kind of a section, or the values of one that has a class of this project.
    """
    for section in sections(config):
        section.kinds.check_named(section)
    for name, other in _of_other_classes(config):
        own = type(other)
        raise UserError(
            f"the section {name} has the class {import_path(own)}, which is derived from {own.mro()[1].__name__}, and "
            "a run would use that in its place; this section takes no class of your own"
        )


def _of_other_classes(config: BaseModel) -> Iterator[tuple[str, BaseModel]]:
    """Yield the name and the value of each section without a kind whose class is not one of its field's annotation."""
    for name, value in config:
        field = type(config).model_fields.get(name)
        if isinstance(value, BaseModel) and field is not None:
            if not isinstance(value, KindConfig) and type(value) not in types_in(field.annotation):
                yield name, value
            yield from _of_other_classes(value)


def import_code(values: Any) -> None:
    """Import the modules of the import paths among the kinds in `values`. Raises `UserError` like `import_object`."""
    find_in_working_directory()
    for path in import_paths(values):
        import_object(path)


@cache
def _entry_points(group: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Return the entry points of a group by their names."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for each in entry_points(group=group):
        found[each.name] = (*found.get(each.name, ()), each)
    return found


def _package(entry_point: EntryPoint) -> str:
    return entry_point.value.partition(":")[0] if entry_point.dist is None else entry_point.dist.name


_KNOWN_ERRORS: Final = frozenset(get_args(ErrorType))


def _inside(kind: str, error: ValidationError) -> ValidationError:
    """Return the same error with the kind in front of its places, as pydantic has it for a union."""
    details = []
    for each in error.errors(include_url=False):
        context = each.get("ctx", {})
        known = each["type"] in _KNOWN_ERRORS
        told = each["type"] if known else PydanticCustomError(each["type"], each["msg"].replace("{", "{{"))
        details.append(InitErrorDetails(type=told, loc=(kind, *each["loc"]), input=each["input"], ctx=context))
    return ValidationError.from_exception_data(error.title, details)

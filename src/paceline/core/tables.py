"""Tables of settings, such as parsed TOML or JSON → frozen dataclasses, strictly. Pure."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

from paceline.core.errors import ConfigError


def from_table(cls: type[Any], table: object, source: str) -> Any:
    """Returns the dataclass `cls` whose fields a table names; tables in it become the dataclasses of its fields.

    Args:
        cls: fields of the types str, bool, int, float, dataclasses, tuples of one type, mappings of plain values, and
            any of these or `None`.
        table: keys and values.
        source: what errors call all of it; keys follow with dots.

    Raises:
        ConfigError: an unknown key, one that is missing, or a value of another type; key and expectation are named.
    """
    return _build(cls, table, source, "")


def _build(cls: type[Any], table: object, source: str, path: str) -> Any:
    where = f"{source}: {path}" if path else source
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: expected a table, got {table!r}")
    hints = get_type_hints(cls)
    unknown = sorted(set(table) - set(hints))
    if unknown:
        raise ConfigError(f"{where}: unknown keys {unknown}; expected some of {sorted(hints)}")
    needed = [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
        and f.name not in table
    ]
    if needed:
        raise ConfigError(f"{where}: missing {needed}")
    values = {
        key: _value(hints[key], value, source, f"{path}.{key}".lstrip(".")) for key, value in table.items()
    }
    return cls(**values)


def _value(hint: Any, value: object, source: str, path: str) -> Any:
    where = f"{source}: {path}"
    if get_origin(hint) in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None  # JSON has null, TOML leaves the key out
        hint = next(a for a in get_args(hint) if a is not type(None))
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, source, path)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where}: expected a list, got {value!r}")
        return tuple(_value(get_args(hint)[0], item, source, f"{path}[{i}]") for i, item in enumerate(value))
    if get_origin(hint) is Mapping:
        if not isinstance(value, Mapping) or not all(
            isinstance(entry, (str, int, float)) for entry in value.values()
        ):
            raise ConfigError(f"{where}: expected a table of texts and numbers, got {value!r}")
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where}: expected {hint.__name__}, got {value!r}")
    return value

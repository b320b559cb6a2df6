"""Which JSON schemas are read in full. A keyword that would not be enforced is refused, not ignored.

The grammar library reports what it knows and does not implement, but it skips what it does not know, what another draft
of the standard does not know, and settings that only count at the top. So every schema is walked first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from paceline.core.errors import RequestError

DRAFTS = ("draft/2020-12", "draft/2019-09", "draft-07", "draft-06", "draft-04")
"""Dialects by the middle of their names, `https://json-schema.org/…/schema`."""

OF_ANY = ("type", "enum", "const", "$ref")
OF_STRINGS = ("format", "minLength", "maxLength", "pattern")
OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
OF_OBJECTS_AND_ARRAYS = ("required", "minProperties", "maxProperties", "minItems", "maxItems")
ANNOTATIONS = (
    "$id",
    "$comment",
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "discriminator",
)
ANNOTATIONS_OF_USE = ("readOnly", "writeOnly", "contentEncoding", "contentMediaType")
SCHEMAS = ("items", "additionalItems", "additionalProperties")
LISTS_OF_SCHEMAS = ("items", "prefixItems", "allOf", "anyOf", "oneOf")
MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
CONSTRAINTS = (*OF_ANY, *OF_STRINGS, *OF_NUMBERS, *OF_OBJECTS_AND_ARRAYS)
CONTAINERS = (*SCHEMAS, *LISTS_OF_SCHEMAS, *MAPS_OF_SCHEMAS)
KNOWN = frozenset((*CONSTRAINTS, *CONTAINERS, *ANNOTATIONS, *ANNOTATIONS_OF_USE))

MAX_REFERENCES = 1000
"""Most different references; the grammar library follows them recursively and overflows its stack at a few thousand."""

SETTINGS = {"whitespace_pattern": r" |\n{1,2}[ \t]{0,20}"}
"""White space between the parts of a JSON text: none, one space, or one or two line breaks with up to 20 columns of
indentation. It is bounded, since small models happily write nothing else for ever; a schema's own `x-guidance` wins."""


def prepare(schema: Any) -> dict[str, Any]:
    """Returns a schema as the grammar library must get it: checked, without its dialect, white space bounded.

    Whatever draft of the standard it names, it is read as 2020-12, where every keyword counts.

    Raises:
        RequestError: not a schema, or one of which something would be ignored.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RequestError(
            f"grammar: expected a JSON schema that is an object, got {json.dumps(schema)[:60]}"
        )
    prepared = dict(schema)
    dialect = str(prepared.pop("$schema", DRAFTS[0]))
    if re.sub(r"https?://json-schema\.org/(.+)/schema#?", r"\1", dialect) not in DRAFTS:
        raise RequestError(
            f"grammar: $schema: expected https://json-schema.org/…/schema of {', '.join(DRAFTS)}; got {dialect!r}"
        )
    settings = prepared.pop("x-guidance", {})
    _check_keywords(prepared)
    return {**prepared, "x-guidance": {**SETTINGS, **settings} if isinstance(settings, dict) else settings}


def parse(text: str) -> Any:
    """Returns the value of a JSON text.

    Raises:
        ValueError: not JSON, or an object with a key twice, of which one would be ignored.
    """
    return json.loads(text, object_pairs_hook=unique_keys, parse_constant=_refuse_constant)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object of these pairs; raises `RequestError` where a key comes twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RequestError(f"grammar: the JSON schema has the key {twice!r} twice in one object")
    return value


def _refuse_constant(name: str) -> None:
    raise RequestError(f"grammar: the JSON schema is not JSON ({name} is no number there)")


def _check_keywords(root: dict[str, Any]) -> None:
    """Raises `RequestError` for keywords and references that would not be enforced, wherever they stand."""
    pending: list[tuple[str, Any]] = [("", root)]
    seen, references = {""}, set()
    while pending:
        where, schema = pending.pop()
        if not isinstance(schema, dict):
            continue  # true, false, or a mistake that the library names
        for keyword in schema:
            if keyword == "x-guidance" or not (keyword in KNOWN or keyword.startswith("x-")):
                raise RequestError(
                    f"grammar: the keyword {keyword!r} at {where or 'the top'} of the JSON schema is not supported; "
                    "hint: leave it out, and check the finished text for what it says"
                )
        if "format" in schema and "type" in schema and "string" not in str(schema["type"]):
            raise RequestError(
                f"grammar: format {schema['format']!r} at {where or 'the top'} of the JSON schema is enforced for "
                f"strings only, and the type is {schema['type']!r}; hint: leave it out"
            )
        if "$ref" in schema:
            references.add(str(schema["$ref"]))
        below = list(_subschemas(where, schema))
        seen.update(pointer for pointer, _ in below)
        pending += below
    _check_references(references, seen)


def _check_references(references: set[str], seen: set[str]) -> None:
    for reference in references:
        if not reference.startswith("#") or unquote(reference[1:]) not in seen:
            raise RequestError(
                f"grammar: $ref: expected a pointer into the schema such as '#/$defs/name', got {reference!r}"
            )
    if len(references) > MAX_REFERENCES:
        raise RequestError(
            f"grammar: expected at most {MAX_REFERENCES} different references, got {len(references)}"
        )


def _subschemas(where: str, schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the JSON pointer and value of each schema directly below one."""
    for keyword, value in schema.items():
        if keyword in MAPS_OF_SCHEMAS and isinstance(value, dict):
            for name, child in value.items():
                yield f"{where}/{keyword}/{name.replace('~', '~0').replace('/', '~1')}", child
        elif keyword in LISTS_OF_SCHEMAS and isinstance(value, list):
            for i, child in enumerate(value):
                yield f"{where}/{keyword}/{i}", child
        elif keyword in SCHEMAS:
            yield f"{where}/{keyword}", value

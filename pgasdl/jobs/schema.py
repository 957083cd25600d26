"""The part of JSON Schema that requests need; /openapi.json shows the schemas that are checked."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from pgasdl.errors import JobError

Schema = Mapping[str, Any]

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_MOST_SHOWN = 100  # characters of a wrong value


def record(required: dict[str, Schema], **optional: Schema) -> Schema:
    """Describe an object that has these fields and no others."""
    return {
        "type": "object",
        "required": list(required),
        "additionalProperties": False,
        "properties": {**required, **optional},
    }


def check(value: object, schema: Schema, field: str = "") -> None:
    """Compare a value with a schema; JobError with status 422 names the field that is wrong."""
    kind = schema["type"]
    kinds = [kind] if isinstance(kind, str) else kind
    if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:  # as 1e999
        raise refused(field, f"no JSON for all who read it: {_shown(value)}")
    if not any(_is(value, each) for each in kinds):
        raise refused(field, f"{_shown(value)} is no {' or '.join(kinds)}")
    if kinds is kind:  # a schema of several types says nothing else
        return
    if isinstance(value, dict):
        _check_object(value, schema, field)
    elif isinstance(value, list):
        _check_length(value, schema, "Items", field)
        for index, item in enumerate(value):
            check(item, schema["items"], f"{field}[{index}]")
    elif isinstance(value, str):
        _check_length(value, schema, "Length", field)
        if "enum" in schema and value not in schema["enum"]:
            raise refused(field, f"{_shown(value)} is none of {', '.join(schema['enum'])}")
        if "pattern" in schema and not re.fullmatch(schema["pattern"], value):
            raise refused(field, f"{_shown(value)} does not match {schema['pattern']}")
    elif kind == "integer" and not schema["minimum"] <= value <= schema["maximum"]:
        limits = f"{schema['minimum']} to {schema['maximum']}"
        raise refused(field, f"{_shown(value)} is not within {limits}")


def _is(value: object, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _check_object(value: dict[str, object], schema: Schema, field: str) -> None:
    known: Mapping[str, Schema] = schema.get("properties", {})
    others = schema["additionalProperties"]  # False, or the schema of all other fields
    inside = f"{field}." if field else ""
    for name in schema.get("required", ()):
        if name not in value:
            raise refused(inside + name, "missing")
    if len(value) > schema.get("maxProperties", len(value)):
        raise refused(field, f"more than {schema['maxProperties']} entries")
    for name, entry in value.items():
        if "propertyNames" in schema:
            check(name, schema["propertyNames"], inside + name[:_MOST_SHOWN])
        if name in known:
            check(entry, known[name], inside + name)
        elif others is False:
            raise refused(inside + name[:_MOST_SHOWN], f"unknown; there are {', '.join(known)}")
        else:
            check(entry, others, inside + name)


def _check_length(value: str | list[object], schema: Schema, what: str, field: str) -> None:
    least, most = schema.get("min" + what, 0), schema["max" + what]
    if not least <= len(value) <= most:
        raise refused(field, f"{len(value)} {what.lower()}: {least} to {most} are accepted")


def refused(field: str, why: str) -> JobError:
    """Make the error of a wrong field."""
    return JobError(f"{field}: {why}" if field else why, 422, field)


def _shown(value: object) -> str:
    try:
        return repr(value)[:_MOST_SHOWN]
    except ValueError:  # an integer of thousands of digits
        return "a number"

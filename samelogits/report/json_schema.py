"""The JSON Schema of a report, made from the result object's own types; `schema.json` beside it is this one as text.

`python -m samelogits.report.json_schema > schema.json` writes it anew.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from importlib import resources
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from samelogits.checking.report import SCHEMA_VERSION, Report, Verdict
from samelogits.config import DecoderConfig

_ADDED = {  # what Report.to_dict() puts beside the fields
    "schema": {"const": SCHEMA_VERSION},
    "verdict": {"enum": list(get_args(Verdict))},
    "passed": {"type": "boolean"},
    "coverage": {"type": "string"},
}
_NUMBER = {
    "description": "A number; one that JSON hasn't got is a string.",
    "anyOf": [{"type": "number"}, {"enum": ["inf", "-inf", "nan"]}],
}


def schema_text() -> str:
    """The schema that the package ships, as JSON text."""
    return resources.files("samelogits.report").joinpath("schema.json").read_text("utf-8")


def schema() -> dict[str, Any]:
    """The schema that the package ships."""
    found: dict[str, Any] = json.loads(schema_text())
    return found


def build() -> dict[str, Any]:
    """The schema that the result object's types make."""
    definitions: dict[str, Any] = {"number": _NUMBER}
    root = _record(Report, definitions)
    root["properties"] = _ADDED | root["properties"] | {"config": _reference(DecoderConfig, definitions)}
    root["required"] = [*_ADDED, *root["required"]]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:samelogits:report:{SCHEMA_VERSION}",
        "title": f"samelogits report, version {SCHEMA_VERSION}",
        **root,
        "$defs": definitions,
    }


def _record(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    return {
        "description": " ".join((inspect.getdoc(kind) or "").split()),
        "type": "object",
        "properties": {name: _type(hints[name], definitions) for name in names},
        "required": names,
        "additionalProperties": False,
    }


def _reference(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}
        definitions[kind.__name__] = _record(kind, definitions)
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _type(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _reference(hint, definitions)
    if hint is Any:
        return {}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, UnionType):
        return {"anyOf": [_type(argument, definitions) for argument in arguments]}
    if hint is NoneType:
        return {"type": "null"}
    if origin is list or (origin is tuple and arguments[1:] == (...,)):
        return {"type": "array", "items": _type(arguments[0], definitions)}
    if origin is tuple:
        items = [_type(argument, definitions) for argument in arguments]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type(arguments[1], definitions)}
    if hint is float:
        return {"$ref": "#/$defs/number"}
    return {"type": {str: "string", int: "integer", bool: "boolean"}[hint]}


if __name__ == "__main__":
    print(json.dumps(build(), indent=2))

"""The JSON Schemas of a report and of a card, made from their own types; `schema.json` and `card_schema.json` beside
it are these as text.

`python -m samelogits.report.json_schema > schema.json` writes the first anew, and
`python -m samelogits.report.json_schema card > card_schema.json` the second.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from importlib import resources
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from samelogits import cards
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


def schema_text(file: str = "schema.json") -> str:
    """A schema that the package ships, as JSON text."""
    return resources.files("samelogits.report").joinpath(file).read_text("utf-8")


def schema(file: str = "schema.json") -> dict[str, Any]:
    """A schema that the package ships."""
    found: dict[str, Any] = json.loads(schema_text(file))
    return found


def build() -> dict[str, Any]:
    """The schema that the result object's types make."""
    definitions: dict[str, Any] = {"number": _NUMBER}
    root = _record(Report, definitions)
    root["properties"] |= {"config": _reference(DecoderConfig, definitions)}
    return _schema("report", SCHEMA_VERSION, root, _ADDED, definitions)


def build_card() -> dict[str, Any]:
    """The schema that a card's types make."""
    definitions: dict[str, Any] = {"number": _NUMBER}
    added = {"schema": {"const": cards.SCHEMA_VERSION}, "verdict": {"enum": list(get_args(cards.Verdict))}}
    return _schema("card", cards.SCHEMA_VERSION, _record(cards.Card, definitions), added, definitions)


def _schema(
    name: str, version: int, root: dict[str, Any], added: dict[str, Any], definitions: dict[str, Any]
) -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:samelogits:{name}:{version}",
        "title": f"samelogits {name}, version {version}",
        **root,
        "properties": added | root["properties"],
        "required": [*added, *root["required"]],
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
    print(json.dumps((build_card if "card" in sys.argv[1:] else build)(), indent=2))

"""A report as SARIF 2.1.0, which code scanning reads."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import samelogits
from samelogits.checking.catalogue import CATALOGUE
from samelogits.checking.report import Report
from samelogits.report.view import View, view
from samelogits.report.words import number, one_line

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
DIVERGENCE, NOT_PROVEN = "divergence", "not-proven"
_OTHERS = {
    DIVERGENCE: (
        "different function",
        "An activation or a stage differs by more than rounding, and no known mistake explains all of it.",
    ),
    NOT_PROVEN: (
        "not proven",
        "Nothing differs by more than rounding, but something makes the run unable to prove it.",
    ),
}


def sarif_text(report: Report, root: Path | None = None) -> str:
    """SARIF as JSON text: a result for each mistake that explains the difference, or one for the difference itself.

    Fingerprints depend on rule, checkpoint, candidate and activation, not on numbers. root: the folder that source
    files are named from. GitHub shows only results whose source file is known.
    """
    v = view(report, root)
    results = _results(v)
    rules = [_rule(name) for name in dict.fromkeys(result["ruleId"] for result in results)]
    for result in results:
        result["ruleIndex"] = [rule["id"] for rule in rules].index(result["ruleId"])
    run = {
        "tool": {"driver": {"name": "samelogits", "semanticVersion": samelogits.__version__, "rules": rules}},
        "automationDetails": {"id": f"samelogits/{v.source}/"},
        "columnKind": "unicodeCodePoints",
        "results": results,
        "properties": {"verdict": v.verdict, "coverage": v.coverage},
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, allow_nan=False) + "\n"


def _results(v: View) -> list[dict[str, Any]]:
    if v.passed:
        return []
    if v.verdict == "not proven":
        text = f"{v.headline}: {'; '.join(v.reasons)}. {v.coverage}"
        return [_result(v, NOT_PROVEN, "warning", text, "")]
    if v.has_candidate:
        explained = v.causes and v.causes[0].explains
        rules = (v.codes if explained else []) or [DIVERGENCE]
        tap = v.first.name if v.first else ""
        return [_result(v, rule, "error", f"It first parts at {v.where}. {v.cause} {v.blame}", tap) for rule in rules]
    results = []
    for stage in v.stages:
        if stage.verdict == "different":
            text = f"{stage.backend} in {stage.dtype}, {stage.stage}: {number(stage.error)} off at {stage.where}"
            results.append(_result(v, DIVERGENCE, "error", text, f"{stage.backend}/{stage.dtype}/{stage.stage}"))
    return results


def _result(v: View, rule: str, level: str, text: str, at: str) -> dict[str, Any]:
    seed = "\0".join((rule, v.source, v.name, at))
    location: dict[str, Any] = {}
    if v.place:
        path, line = v.place
        artifact = {"uri": _uri(path)} | ({} if _uri(path).startswith("file:") else {"uriBaseId": "%SRCROOT%"})
        location["physicalLocation"] = {"artifactLocation": artifact, "region": {"startLine": line}}
    if at:
        location["logicalLocations"] = [{"fullyQualifiedName": one_line(at), "kind": "member"}]
    result = {
        "ruleId": rule,
        "level": level,
        "message": {"text": _plain(text)},
        "partialFingerprints": {"samelogits/v1": hashlib.sha256(seed.encode("utf-8", "replace")).hexdigest()},
    }
    return result | ({"locations": [location]} if location else {})


def _rule(name: str) -> dict[str, Any]:
    if name in CATALOGUE:
        entry = CATALOGUE[name]
        title, text = entry.title, entry.explanation
    else:
        title, text = _OTHERS.get(name, (name, name))
    more = f"\n\nMore: samelogits explain {name}" if name in CATALOGUE else ""
    return {
        "id": name,
        "shortDescription": {"text": title[:1].upper() + title[1:]},
        "fullDescription": {"text": text[:1000]},
        "help": {"text": text + more},
        "defaultConfiguration": {"level": "warning" if name == NOT_PROVEN else "error"},
        "properties": {"tags": ["correctness"], "precision": "very-high"},
    }


def _plain(text: str) -> str:
    """A message without what SARIF would read as a link or a placeholder."""
    safe = one_line(text, 4000).replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]")
    return safe.replace("{", "{{").replace("}", "}}")


def _uri(path: str) -> str:
    """A path as a URI: relative, or file: where it is absolute."""
    written = quote(path.replace("\\", "/").encode("utf-8", "surrogateescape"), safe="/-._~")
    if path.startswith("/"):
        return f"file://{written}"
    return f"file:///{written.replace('%3A', ':', 1)}" if path[1:2] == ":" else written

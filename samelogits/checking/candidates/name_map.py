"""From the modules of a person's model to taps: ordered rules in a YAML file, and the files that come with the package.

rules:
  - pattern: model\\.layers\\.(\\d+)\\.self_attn\\.q_proj
    tap: layers.\\1.self_attn.q
  - pattern: model\\.layers\\.(\\d+)\\.self_attn\\.o_proj
    part: input
    tap: layers.\\1.self_attn.mixed
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn

from samelogits.checkpoints.json_file import open_regular
from samelogits.config import DecoderConfig
from samelogits.errors import CandidateError, InputError, SamelogitsError
from samelogits.presets import PRESETS
from samelogits.taps import tap_names

MAPS = Path(__file__).parent / "maps"
ORDER = ("llama", "gpt2", "nanogpt", "meta", "llms-from-scratch", "samelogits")  # among equals, guess takes the first
FILE_LIMIT = 2**16  # bytes
RULE_LIMIT = 500
TEXT_LIMIT = 200  # characters of a pattern, a template or a module path
# What a pattern may hold: its worst case is then some million steps on a path of TEXT_LIMIT characters.
REPEAT_LIMIT, CHOICE_LIMIT = 3, 8
LAYOUTS = ("BTNH", "BNTH", "BTE")
KEYS = ("pattern", "tap", "part", "index", "split", "layout")
SIZES = ("q", "kv", "d_model", "d_ff")

Part = Literal["input", "output"]


@dataclass(frozen=True)
class Split:
    """How one array is several taps. axis: counted from the end if negative. parts: so many equal ones. sizes: widths,
    as numbers or as names: q (n_heads x d_head), kv (n_kv_heads x d_head), d_model, d_ff. groups: the axis is so many
    stacks of a share of each."""

    axis: int
    parts: int | None = None
    sizes: tuple[int | str, ...] = ()
    groups: int = 1

    def widths(self, config: DecoderConfig | None) -> list[int] | None:
        """The sizes as numbers; None for equal parts, or where a name needs a config and there is none."""
        if self.parts is not None or (config is None and any(isinstance(size, str) for size in self.sizes)):
            return None
        c = config
        known = {} if c is None else {
            "q": c.n_heads * c.d_head, "kv": c.n_kv_heads * c.d_head, "d_model": c.d_model, "d_ff": c.d_ff
        }  # fmt: skip
        return [size if isinstance(size, int) else known[size] for size in self.sizes]


@dataclass(frozen=True)
class Rule:
    """pattern: of a whole module path. taps: templates, one for each part of the split; none: the module is known and
    gives no tap. part: what of the module. index: element of a tuple, or name of an argument or field."""

    where: str
    pattern: re.Pattern[str]
    taps: tuple[str, ...]
    part: Part = "output"
    index: int | str | None = None
    split: Split | None = None
    layout: str | None = None


@dataclass(frozen=True)
class Use:
    """A rule on one module. taps: names, None for those that an earlier rule gives."""

    rule: Rule
    taps: tuple[str | None, ...]


@dataclass
class Plan:
    """uses: by module path and part. places: tap to (path, part). known: paths that some rule matches."""

    uses: dict[tuple[str, Part], list[Use]] = field(default_factory=dict)
    places: dict[str, tuple[str, Part]] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class NameMap:
    """Rules in order: where several give one tap, the first of them that matches a module does."""

    name: str
    rules: tuple[Rule, ...] = ()

    @classmethod
    def builtin(cls, name: str) -> NameMap:
        """The map that comes with the package: llama (Qwen2 and Mistral too), gpt2, nanogpt or samelogits."""
        if name not in ORDER:
            raise InputError(f"name map: expected a file or one of {', '.join(ORDER)}, found {name!r}")
        return replace(_builtin(name), name=name)

    @classmethod
    def read(cls, path: str | Path) -> NameMap:
        """The map in this YAML file; any fault is an InputError of one line that names the file and the rule."""
        try:
            with open_regular(Path(path)) as file:
                data = file.read(FILE_LIMIT + 1)
        except SamelogitsError as error:
            raise InputError(str(error)) from error
        except (OSError, ValueError) as error:
            raise InputError(f"{str(path)!r}: expected a readable name map, found: {error}") from error
        if len(data) > FILE_LIMIT:
            raise InputError(f"{path}: name map: expected at most {FILE_LIMIT} bytes, found more")
        return cls.parse(data, str(path))

    @classmethod
    def parse(cls, data: bytes, where: str) -> NameMap:
        """The map in this text. where: what messages call it."""
        values = _load_yaml(data, where)
        if not isinstance(values, dict) or values.keys() != {"rules"} or not isinstance(values["rules"], list):
            raise InputError(f"{where}: expected one key, rules, with a list, found something else")
        if len(values["rules"]) > RULE_LIMIT:
            raise InputError(f"{where}: expected at most {RULE_LIMIT} rules, found {len(values['rules'])}")
        rules = (_rule(value, f"{where}: rule {i}") for i, value in enumerate(values["rules"], 1))
        return cls(where, tuple(rules))

    @classmethod
    def guess(cls, module_paths: Iterable[str], config: DecoderConfig | None = None) -> NameMap:
        """The built-in map that gives most taps (of the config); an empty one, called "none", where none gives any.

        Among equals, the one that knows most modules.
        """
        paths, found = list(module_paths), [cls.builtin(name) for name in ORDER]
        plans = [each.plan(paths) for each in found]
        wanted = [set(plan.places) if config is None else plan.places.keys() & set(tap_names(config)) for plan in plans]
        counts = [(len(taps), len(plan.known)) for taps, plan in zip(wanted, plans, strict=True)]
        best = max(counts)
        return found[counts.index(best)] if best[0] else cls("none")

    def plan(self, module_paths: Iterable[str]) -> Plan:
        """Which module gives which tap. A path is its parts joined by dots."""
        paths = [path for path in module_paths if len(path) <= TEXT_LIMIT]
        plan = Plan()
        for rule in self.rules:
            for path in paths:
                match = rule.pattern.fullmatch(path)
                if match is None:
                    continue
                plan.known.add(path)
                names = [_expand(template, match) for template in rule.taps]
                for name in names:
                    if not _is_tap(name):
                        raise InputError(f"{rule.where}: tap: module {path} would be {name!r}, which is no tap")
                taps = tuple(None if name in plan.places else name for name in names)
                if any(taps):
                    plan.uses.setdefault((path, rule.part), []).append(Use(rule, taps))
                    plan.places |= {tap: (path, rule.part) for tap in taps if tap is not None}
        return plan


@cache
def _builtin(name: str) -> NameMap:
    return NameMap.read(MAPS / f"{name}.yaml")


@cache
def _universe() -> frozenset[str]:
    """Every tap that some config has, with 0 for the layer."""
    base = replace(PRESETS["llama-tiny"], n_layers=1)
    learned = replace(base, position="learned", rope_theta=None)
    configs = [
        base,
        learned,
        replace(learned, norm_placement="post"),
        replace(learned, norm_placement="sandwich", qk_norm="head"),
        replace(base, n_experts=2, n_active_experts=1, expert_width=2),
    ]
    return frozenset(name for config in configs for name in tap_names(config))


def _is_tap(name: str) -> bool:
    return re.sub(r"^layers\.\d{1,5}\.", "layers.0.", name) in _universe()


def _expand(template: str, match: re.Match[str]) -> str:
    return re.sub(r"\\(\d)", lambda group: match[int(group[1])] or "", template)


def _load_yaml(data: bytes, where: str) -> Any:
    """Plain values; an alias, a key that stands twice or deep nesting is an InputError, as is what is no YAML."""
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise CandidateError(f"{where}: expected PyYAML, to read name maps: install samelogits[yaml]") from error
    try:
        text = data.decode("utf-8")
        seen: set[int] = set()
        level = [yaml.compose(text, Loader=yaml.SafeLoader)]
        while level:
            below = []
            for node in level:
                if id(node) in seen:
                    raise InputError(f"{where}: expected no aliases, found one")
                seen.add(id(node))
                if isinstance(node, yaml.MappingNode):
                    keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
                    if len(set(keys)) < len(node.value):
                        raise InputError(f"{where}: line {node.start_mark.line + 1}: expected each key once, and plain")
                    below += [value for _, value in node.value]
                elif isinstance(node, yaml.SequenceNode):
                    below += node.value
            level = below
        return yaml.safe_load(text)
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: expected UTF-8, found byte {data[error.start]:#04x}") from error
    except RecursionError as error:
        raise InputError(f"{where}: expected little nesting, found too much") from error
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, SamelogitsError):
            raise
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark is not None else ""
        raise InputError(f"{where}: expected YAML, found a mistake{line}: {reason[:120]}") from error


def _rule(value: Any, where: str) -> Rule:
    """The rule in a mapping; any fault is an InputError."""

    def fault(key: str, expected: str, found: Any) -> NoReturn:
        text = repr(found) if isinstance(found, str | bool | None) else type(found).__name__
        text = str(found) if type(found) is int and abs(found) < 10**9 else text
        raise InputError(f"{where}: {key}: expected {expected}, found {text[:80]}")

    if not isinstance(value, dict):
        fault("rule", "a mapping", value)
    for key in value:
        if key not in KEYS:
            raise InputError(f"{where}: expected the keys {', '.join(KEYS)}, found {str(key)[:80]!r}")
    pattern, tap, part = value.get("pattern"), value.get("tap"), value.get("part", "output")
    index, split, layout = value.get("index"), value.get("split"), value.get("layout")
    if not isinstance(pattern, str) or not 0 < len(pattern) <= TEXT_LIMIT:
        fault("pattern", f"a regular expression of at most {TEXT_LIMIT} characters", pattern)
    if reason := _ambiguity(pattern):
        fault("pattern", f"one that is matched in little time, without {reason}", pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what Python doubts, as a nested set
            compiled = re.compile(pattern, re.ASCII)
    except (re.error, RecursionError, OverflowError, Warning) as error:
        fault("pattern", f"a regular expression ({error})", pattern)
    taps = [tap] if isinstance(tap, str) else tap
    if "tap" not in value or not isinstance(taps, list) or len(taps) > 16:
        fault("tap", "a template, or a list of at most 16 (none: no tap)", tap)
    for template in taps:
        _check_template(template, compiled, fault)
    if part not in ("input", "output"):
        fault("part", "input or output", part)
    if not (index is None or isinstance(index, str) or (type(index) is int and 0 <= index < 64)):
        fault("index", "a place below 64 or a name", index)
    if layout is not None and layout not in LAYOUTS:
        fault("layout", f"one of {', '.join(LAYOUTS)}", layout)
    cut = None if split is None else _split(split, len(taps), fault)
    return Rule(where, compiled, tuple(taps), part, index, cut, layout)


def _check_template(template: Any, pattern: re.Pattern[str], fault: Any) -> None:
    if not isinstance(template, str) or not 0 < len(template) <= TEXT_LIMIT:
        fault("tap", f"a template of at most {TEXT_LIMIT} characters", template)
    pieces = re.split(r"\\(\d)", template)
    if any("\\" in piece for piece in pieces[::2]):
        fault("tap", r"a template with groups \1 to \9 alone", template)
    if any(not 1 <= int(group) <= pattern.groups for group in pieces[1::2]):
        fault("tap", f"groups that the pattern has ({pattern.groups})", template)
    first = re.sub(r"^layers\.\d{1,5}\.", "layers.0.", template)
    shape = "(.*)".join(map(re.escape, re.split(r"\\\d", first)))
    if not any(re.fullmatch(shape, name) for name in _universe()):
        fault("tap", "the name of a tap", template)


def _split(value: Any, count: int, fault: Any) -> Split:
    if not isinstance(value, dict) or not value.keys() <= {"parts", "sizes", "axis"}:
        fault("split", "a mapping of parts or sizes, and axis", value)
    axis, parts, sizes = value.get("axis", -1), value.get("parts"), value.get("sizes")
    if type(axis) is not int or not -4 <= axis < 4:
        fault("split: axis", "a whole number from -4 to 3", axis)
    if (parts is None) == (sizes is None):
        fault("split", "either parts or sizes", value)
    if parts is not None:
        if type(parts) is not int or parts != count:
            fault("split: parts", f"{count}, as many as taps", parts)
        return Split(axis, parts)
    if not isinstance(sizes, list) or len(sizes) != count:
        fault("split: sizes", f"{count} of them, as many as taps", sizes)
    for size in sizes:
        if not (size in SIZES if isinstance(size, str) else type(size) is int and 0 < size <= 2**24):
            fault("split: sizes", f"whole numbers or {', '.join(SIZES)}", size)
    return Split(axis, None, tuple(sizes))


def _ambiguity(pattern: str) -> str | None:
    """Why matching might take very long, or None: repeated groups, or many ways to read one text."""
    bare = re.sub(r"\[\^?\]?(?:\\.|[^\]\\])*\]", "x", re.sub(r"\\[^dDwWsSbBAZ]", "x", pattern))
    bare = re.sub(r"\(\?(?=[:=!<P#])", "(", bare)
    if re.search(r"\)(?:[*+]|\{)", bare):
        return "a repeated group"
    repeats = len(re.findall(r"[*+]|\{\d*,?\d*\}", bare))
    choices = len(re.findall(r"\||(?<![*+?}])\?", bare))
    if repeats > REPEAT_LIMIT:
        return f"more than {REPEAT_LIMIT} repetitions"
    return f"more than {CHOICE_LIMIT} choices" if choices > CHOICE_LIMIT else None

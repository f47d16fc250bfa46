"""Mutations of valid files: trees of JSON, tokens of a text, fields of a header, and bytes.

Each takes a file and a random.Random, atheris's or hypothesis's own, and gives another file.
"""

from __future__ import annotations

import io
import json
import pickletools
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

import by_hand

Mutation = Callable[[bytes, Random], bytes]


class Pairs(list[tuple[Any, Any]]):
    """An object of JSON, in which a key may stand twice."""


class Text(str):
    """A piece of JSON as it is to stand there."""


INTEGERS = (
    0, 1, -1, 2, 3, 4, 7, 8, 16, 31, 32, 64, 100, 127, 128, 255, 256, 1024, 1025, 65535, 65536, 2**24, 2**24 + 1,
    2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 10**12, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**31,
)  # fmt: skip
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-9, 5e-324, 1e-45, 1e30, 3.4e38, 1e300, 1.7e308, 0.1, 2.5, 1e-5, -10.0)
WORDS = (
    "", " ", "a", "\0", "\n", "é", "\ud800", "\U0001f600", "\u2028", "..", "../a", "/", "a/b", "a\\b", "none", "null",
    "true", "0", "1.0", "nan", "a" * 300, "F32", "BF16", "F16", "F64", "I64", "U8", "BOOL", "F4",
)  # fmt: skip
TEXTS = tuple(
    Text(text) for text in (
        "NaN", "-Infinity", "1e999", "-1e999", "1E5", "00", "-", "1.", "9" * 40, "1" + "0" * 5000, "'a'", "",
        '"\\ud800"', '"\\u0061"', '"\\x"', '"a', "[" * 40 + "]" * 40, "[" * 3000, '{"a":' * 200, "// ",
    )
)  # fmt: skip
OTHERS = (None, True, False, *map(Text, ("[]", "{}", "[0]", "[null]", "[1,1]", "[[]]", '{"a":1}')))
ODD: tuple[Sequence[Any], ...] = (INTEGERS, FLOATS, WORDS, TEXTS, OTHERS)
NPY_WORDS = (b"'<f4'", b"'<i8'", b"'|b1'", b"'|O'", b"True", b"False", b"1", b"2", b"0", b"-1", b"9" * 18, b",", b"(")
TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[-+.\w]+|\s+|.', re.DOTALL)


def shifted(data: bytes, random: Random) -> bytes:
    """Bytes replaced, cut out, put in, doubled or exchanged, one to three times."""
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 3))):
        at = random.randrange(len(found) + 1)
        end = min(len(found), at + random.choice((1, 1, 2, 4, 8, random.randrange(64))))
        match random.randrange(7):
            case 0:
                found[at : at + 1] = bytes([random.randrange(256)])
            case 1:
                del found[at:end]
            case 2:
                found[at:at] = bytes(random.randrange(256) for _ in range(random.choice((1, 2, 4, 8))))
            case 3:
                found[at:at] = found[at:end]
            case 4:
                size = random.choice((1, 2, 4, 8))
                number = random.choice(INTEGERS) % 256**size
                found[at : at + size] = number.to_bytes(size, "little")
            case 5 if at < len(found):
                found[at] ^= 1 << random.randrange(8)
            case _:
                other = random.randrange(len(found) + 1)
                found[at:end] = found[other : other + end - at]
    return bytes(found)


def shuffled(data: bytes, random: Random, words: Sequence[bytes]) -> bytes:
    """Tokens of a text replaced by others of it or by words, cut out, doubled or exchanged."""
    tokens = TOKEN.findall(data)
    for _ in range(random.choice((1, 1, 2, 3))):
        at = random.randrange(len(tokens) + 1)
        end = min(len(tokens), at + random.choice((1, 1, 2, 4, 8)))
        match random.randrange(4):
            case 0:
                tokens[at:end] = [random.choice(words)]
            case 1:
                del tokens[at:end]
            case 2:
                tokens[at:at] = tokens[at:end]
            case _:
                other = random.randrange(len(tokens) + 1)
                tokens[at:end] = tokens[other : other + end - at]
    return b"".join(tokens)


class JsonMutation:
    """Values, keys and pieces of a JSON text exchanged for odd ones, or for those of other files."""

    def __init__(self, examples: Iterable[bytes], odd: Sequence[Any] = ()):
        self.odd = (*ODD, *[odd or OTHERS] * 3)
        self.keys: list[str] = []
        self.values: list[Text] = []
        self.of_key: dict[str, list[Text]] = {}
        for example in examples:
            for container, i in places(tree(example)):
                if type(container) is Pairs:
                    key, value = container[i][0], Text(written(container[i][1]))
                    self.of_key.setdefault(key, []).append(value)
                    self.values.append(value)
        self.keys = sorted(self.of_key)
        self.words = [b"NaN", b"1e999", b"-0", b"{", b"}", b"[", b"]", b",", b":", b'"', b"null", b"\xff", b"\\ud800"]
        self.words += [json.dumps(key).encode() for key in self.keys]

    def __call__(self, data: bytes, random: Random) -> bytes:
        """One to three changes; where the text is no JSON, of its tokens."""
        try:
            root = [tree(data)]
        except (ValueError, RecursionError):
            return shuffled(data, random, self.words)
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            self._change(root, random)
        text = written(root[0]).encode("utf-8", "surrogatepass")
        return shuffled(text, random, self.words) if random.random() < 0.05 else text

    def _change(self, root: list[Any], random: Random) -> None:
        found = list(places(root))
        if not found:
            return
        container, i = random.choice(found)
        pairs = type(container) is Pairs
        key, value = container[i] if pairs else (None, container[i])
        match random.randrange(10):
            case 0 | 1:
                value = random.choice(random.choice(self.odd))
            case 2:
                value = random.choice(self.of_key.get(key, self.values))
            case 3:
                value = random.choice(self.values)
            case 4 | 5:
                value = tweaked(value, random)
            case 6 if container is not root:
                del container[i]
                return
            case 7:
                container.insert(random.randrange(len(container) + 1), container[i])
                return
            case 8 if pairs:
                key = random.choice(self.keys) if random.random() < 0.7 else random.choice(WORDS)
            case _:
                inner = container if pairs else value
                if type(inner) is Pairs:
                    name = random.choice(self.keys)
                    inner.append((name, random.choice(self.of_key[name] if random.random() < 0.7 else OTHERS)))
                    return
                value = [value] * random.choice((1, 2, 3))
        container[i] = (key, value) if pairs else value


def tweaked(value: Any, random: Random) -> Any:
    """A value near this one, of its kind."""
    if type(value) is bool:
        return not value
    if type(value) is int:
        return random.choice((value + 1, value - 1, 2 * value, value // 2, -value, float(value) if value < 1e9 else 0))
    if type(value) is float:
        return random.choice((value + 1, -value, 2 * value, value * 1e10, value * 1e-10, 0.0))
    if type(value) is str:
        return shifted(value.encode("utf-8", "surrogatepass"), random).decode("utf-8", "replace")
    if isinstance(value, list) and value:
        i, j = random.randrange(len(value)), random.randrange(len(value))
        kept = list(value)
        kept[i], kept[j] = kept[j], kept[i]
        kept = random.choice((kept[:-1], kept[1:], [*kept, kept[i]], kept, kept * 2))
        return Pairs(kept) if type(value) is Pairs else kept
    return random.choice(OTHERS)


def tree(data: bytes) -> Any:
    """The value of a JSON text, its objects as Pairs."""
    return json.loads(data, object_pairs_hook=Pairs)


def places(value: Any) -> Iterable[tuple[list[Any], int]]:
    """Every container and index in a value."""
    below = [value]
    while below:
        container = below.pop()
        if isinstance(container, list):
            for i, item in enumerate(container):
                yield container, i
                below.append(item[1] if type(container) is Pairs else item)


def written(value: Any) -> str:
    """The JSON text of a value."""
    if type(value) is Text:
        return str(value)
    if type(value) is Pairs:
        return "{" + ",".join(f"{json.dumps(key)}:{written(item)}" for key, item in value) + "}"
    if type(value) is list:
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


def safetensors_mutation(headers: JsonMutation) -> Mutation:
    """Of the header as JSON, its length being right again, of the data, or of bytes anywhere."""

    def mutate(data: bytes, random: Random) -> bytes:
        length = int.from_bytes(data[:8], "little")
        header, body = data[8 : 8 + length], data[8 + length :]
        match random.randrange(12):
            case 0 | 1:
                return shifted(data, random)
            case 2:
                body = random.choice((body[:-1], body + b"\0", body * 2, body[: len(body) // 2], b""))
            case 3:
                header += b" " * random.randrange(1, 9)
            case 4:
                header = shuffled(header, random, headers.words)
            case _:
                header = headers(header, random)
        return len(header).to_bytes(8, "little") + header + body

    return mutate


def folder_mutation(mutations: dict[str, Mutation]) -> Mutation:
    """Of one of the files, by the end of its name; a file may also go, come twice or take another's place."""

    def mutate(data: bytes, random: Random) -> bytes:
        files = by_hand.unpacked(data)
        if not files:
            return shifted(data, random)
        name, other = random.choice(sorted(files)), random.choice(sorted(files))
        if random.random() < 0.03:
            match random.randrange(3):
                case 0:
                    del files[name]
                case 1:
                    files[name] = files[other]
                case _:
                    files[other], files[name] = files[name], files[other]
        else:
            ending = next((ending for ending in mutations if name.endswith(ending)), None)
            files[name] = (mutations[ending] if ending else shifted)(files[name], random)
        return by_hand.packed(files)

    return mutate


def archive_mutation(change: Callable[[str, bytes, Random], bytes], compressed: bool) -> Mutation:
    """Of the members of a ZIP archive and their names, its sums being right again, or of its bytes.

    change: what becomes of one member's content. compressed: whether the members may become so.
    """
    ways = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) if compressed else (zipfile.ZIP_STORED,)

    def mutate(data: bytes, random: Random) -> bytes:
        try:
            if random.random() < 0.3:
                return shifted(data, random)
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                members = [(info.filename, archive.read(info)) for info in archive.infolist()]
            i, j = random.randrange(len(members)), random.randrange(len(members))
            name, content = members[i]
            match random.randrange(8):
                case 0:
                    del members[i]
                case 1:
                    members.insert(j, members[i])
                case 2:
                    members[i] = members[j][0], content
                case 3:
                    members[i] = shifted(name.encode(), random).decode("latin-1"), content
                case _:
                    members[i] = name, change(name, content, random)
            out = io.BytesIO()
            with zipfile.ZipFile(out, "w", random.choice(ways)) as archive, warnings.catch_warnings(action="ignore"):
                for name, content in members:
                    archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content)
            return out.getvalue()
        except (ValueError, KeyError, zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError):
            return shifted(data, random)

    return mutate


def npz_mutation(metadata: JsonMutation) -> Mutation:
    """Of an archive of NumPy's arrays: their headers as text, one of them JSON, and their bytes."""

    def change(name: str, content: bytes, random: Random) -> bytes:
        head, body = content[:128], content[128:]
        match random.randrange(4):
            case 0 if name == "metadata.npy":
                text = metadata(body, random)
                return head.replace(b"(%d,)" % len(body), b"(%d,)" % len(text)) + text
            case 1:
                return shuffled(head, random, NPY_WORDS) + body
            case _:
                return shifted(content, random)

    return archive_mutation(change, compressed=True)


def pickle_mutation() -> Mutation:
    """Of an archive of torch.save: the steps of its pickle, its other members, and their bytes."""

    def change(name: str, content: bytes, random: Random) -> bytes:
        if name.endswith("data.pkl") and random.random() < 0.9:
            return _other_steps(content, random)
        return shifted(content, random)

    mutate = archive_mutation(change, compressed=False)

    def of_pickle(data: bytes, random: Random) -> bytes:
        """Mostly of the pickle, which is one of many members."""
        if random.random() < 0.4:
            return mutate(data, random)
        try:
            members = by_hand.members(data)
            [name] = [name for name in members if name.endswith("data.pkl")]
            return by_hand.with_member(data, name, change(name, members[name], random))
        except (ValueError, zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, struct.error):
            return mutate(data, random)

    return of_pickle


def _other_steps(content: bytes, random: Random) -> bytes:
    """Steps of a pickle replaced by others of it, cut out, doubled or exchanged; its numbers by odd ones."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of what is escaped
            steps = list(pickletools.genops(content))
    except (ValueError, IndexError, UnicodeDecodeError):
        return shifted(content, random)
    ends = [at for _, _, at in steps[1:]] + [len(content)]
    parts = [content[at:end] for (_, _, at), end in zip(steps, ends, strict=True)]
    numbers = [i for i, (_, value, _) in enumerate(steps) if type(value) is int and parts[i][0] in b"KMJ"]
    for _ in range(random.choice((1, 1, 2, 3))):
        at = random.randrange(len(parts))
        end = at + random.choice((1, 1, 1, 2, 5))
        match random.randrange(6):
            case 0 | 1 | 2 if numbers:
                i = random.choice(numbers)
                near = (steps[i][1] + random.choice((1, -1)), steps[random.choice(numbers)][1])
                if i < len(parts):
                    parts[i] = _pickled_number(random.choice(near if random.random() < 0.6 else INTEGERS))
            case 3:
                parts[at:end] = [random.choice(parts)]
            case 4:
                del parts[at:end]
            case _:
                parts[at:at] = parts[at:end]
        parts = parts or [b"."]
    return b"".join(parts)


def _pickled_number(value: int) -> bytes:
    """The step that puts a whole number on the stack."""
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)

"""Mutations of a GGUF file's header."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from random import Random
from typing import Any

import by_hand
from by_hand import ARRAY, BOOL, NUMBERS, STRING, Gguf, Info, Value
from fuzz_mutations import FLOATS, INTEGERS, shifted


class GgufMutation:
    """Of the keys, values, tensors and counts of a header, or of its bytes."""

    def __init__(self, examples: Iterable[bytes], of_metadata: float = 0.6):
        self.of_metadata = of_metadata  # the share of changes that leave the tensors alone
        headers = [by_hand.gguf(example) for example in examples]
        self.entries = [entry for header in headers for entry in header.metadata]
        self.tensors = [info for header in headers for info in header.tensors] or [Info(b"a", [1], 0, 0)]
        self.texts = [b"", b"\xff", b"a" * 70, b"a b", *{key for key, _ in self.entries}]
        self.texts += [value.value for _, value in self.entries if value.kind == STRING]
        self.texts += [info.name for info in self.tensors]

    def __call__(self, data: bytes, random: Random) -> bytes:
        """One to three changes; where the file is no GGUF, of its bytes."""
        try:
            header = by_hand.gguf(data)
            if random.random() < 0.15:
                return shifted(data, random)
            for _ in range(random.choice((1, 1, 1, 2, 3))):
                of_metadata = random.random() < self.of_metadata or not header.tensors
                (self._entry if of_metadata else self._tensor)(header, random)
            changed = by_hand.gguf_bytes(header) + data[header.end :]
        except (ValueError, KeyError, OverflowError, struct.error):
            return shifted(data, random)
        if random.random() < 0.05:
            at = random.choice((4, 8, 16))
            return changed[:at] + struct.pack("<Q", random.choice(INTEGERS) % 2**64) + changed[at + 8 :]
        return changed

    def _entry(self, header: Gguf, random: Random) -> None:
        found = header.metadata
        if not found:
            found.append(random.choice(self.entries))
            return
        i = random.randrange(len(found))
        key, value = found[i]
        match random.randrange(8):
            case 0:
                del found[i]
            case 1:
                found.insert(i, random.choice((found[i], random.choice(self.entries))))
            case 2:
                found[i] = random.choice(self.texts), value
            case 3:
                found[i] = key, random.choice(self.entries)[1]
            case 4:
                found[i] = key, Value(*self._number(random))
            case 5:
                kind, number = self._number(random)
                found[i] = key, Value(ARRAY, [number] * random.randrange(5), kind)
            case _:
                found[i] = key, self._tweaked(value, random)

    def _number(self, random: Random) -> tuple[int, Any]:
        kind = random.choice([*NUMBERS, BOOL, STRING])
        return kind, self._of(kind, random)

    def _of(self, kind: int, random: Random) -> Any:
        """An odd value of this kind."""
        if kind == STRING:
            return random.choice(self.texts)
        if kind == BOOL:
            return random.choice((0, 1, 2))
        code = NUMBERS[kind]
        if code == "f":
            return random.choice((0.0, -1.0, 1e30, 1e-45, float("nan"), float("inf"), 2.5))
        if code == "d":
            return random.choice((*FLOATS, float("nan")))
        size = struct.calcsize(code)
        return int.from_bytes((random.choice(INTEGERS) % 256**size).to_bytes(size, "little"), "little",
                              signed=code.islower())  # fmt: skip

    def _tweaked(self, value: Value, random: Random) -> Value:
        if value.kind in NUMBERS and random.random() < 0.5:
            near = random.choice((value.value + 1, value.value - 1, 2 * value.value, value.value // 2))
            return Value(value.kind, near)  # a header that can't hold it is no file, and its bytes are changed instead
        if value.kind != ARRAY:
            return Value(value.kind, self._of(value.kind, random))
        items = list(value.value)
        if items:
            i, j = random.randrange(len(items)), random.randrange(len(items))
            match random.randrange(5):
                case 0:
                    items[i], items[j] = items[j], items[i]
                case 1:
                    del items[i]
                case 2:
                    items.insert(j, items[i])
                case 3 if value.of == STRING:
                    items[i] = shifted(items[i], random)
                case _:
                    items[i] = self._of(value.of, random)
        return Value(ARRAY, items, value.of)

    def _tensor(self, header: Gguf, random: Random) -> None:
        found = header.tensors
        i, j = random.randrange(len(found)), random.randrange(len(found))
        info = Info(found[i].name, list(found[i].dimensions), found[i].type, found[i].offset)
        match random.randrange(8):
            case 0:
                del found[i]
                return
            case 1:
                found.insert(j, info)
                return
            case 2:
                found[i], found[j] = found[j], found[i]
                return
            case 3:
                info.name = random.choice(self.texts)
            case 4:
                info.type = random.choice((*by_hand.BLOCKS, 4, 99, 2**32 - 1))
            case 5:
                info.offset = random.choice((info.offset + 32, info.offset - 32, *INTEGERS)) % 2**64
            case 6 if info.dimensions:
                info.dimensions[random.randrange(len(info.dimensions))] = random.choice(INTEGERS) % 2**64
            case _:
                info.dimensions = random.choice((info.dimensions[::-1], [*info.dimensions, 1], info.dimensions[1:]))
        found[i] = info

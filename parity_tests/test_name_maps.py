"""Name maps: what they give, and that a faulty one is one line with file and rule."""

import time

import ladder
import numpy as np
import pytest
from candidate_ports import probe_of
from checkpoint_files import GPT2, LLAMA

ladder.skip_module_unless_present("yaml")

from samelogits.checking.candidates.candidate import Output  # noqa: E402
from samelogits.checking.candidates.capture import Capture  # noqa: E402
from samelogits.checking.candidates.name_map import MAPS, ORDER, NameMap  # noqa: E402
from samelogits.errors import CandidateError, InputError  # noqa: E402


def parse(text):
    return NameMap.parse(text.encode() if isinstance(text, str) else text, "my.yaml")


def rule(text):
    return parse("rules:\n  - {" + text + "}\n")


def one(**keys):
    """A rule that is right but for these keys."""
    keys = {"pattern": "'a'", "tap": "embedded"} | keys
    return rule(", ".join(f"{key}: {value}" for key, value in keys.items() if value is not None))


def test_builtin_maps_are_all_files_and_guessed_by_their_names():
    assert sorted(path.stem for path in MAPS.glob("*.yaml")) == sorted(ORDER)
    llama = ["model", "model.embed_tokens", "model.layers.1", "model.layers.1.self_attn.q_proj", "model.norm"]
    assert NameMap.guess(llama, LLAMA).name == "llama"
    gpt2 = ["transformer.wte", "transformer.h.0", "transformer.h.0.attn.c_attn", "transformer.h.0.mlp.act"]
    assert NameMap.guess(gpt2, GPT2).name == "gpt2"
    assert NameMap.guess([*gpt2[:-1], "transformer.h.0.mlp.gelu"]).name == "nanogpt"
    post = ["model.layers.0", "model.layers.0.post_feedforward_layernorm", "model.layers.0.mlp.up_proj"]
    assert NameMap.guess(post).name == "samelogits"
    assert NameMap.guess(["encoder", "what.ever"], LLAMA) == NameMap("none")
    with pytest.raises(
        InputError,
        match="expected a file or one of llama, gpt2, nanogpt, meta, llms-from-scratch, samelogits, found 'bert'",
    ):
        NameMap.builtin("bert")


def test_the_first_rule_wins_and_wrappers_are_seen_through():
    places = NameMap.builtin("samelogits").plan(["m.layers.3", "m.layers.3.post_feedforward_layernorm"]).places
    assert places["layers.3.residual_out"] == ("m.layers.3.post_feedforward_layernorm", "input")
    plan = NameMap.builtin("llama").plan(["net.model.layers.11.self_attn.o_proj", "net.lm_head", "net.other"])
    assert plan.places == {
        f"layers.11.self_attn.{name}": ("net.model.layers.11.self_attn.o_proj", part)
        for name, part in (("mixed", "input"), ("output", "output"))
    }
    assert plan.known == {"net.model.layers.11.self_attn.o_proj", "net.lm_head"}


def test_a_file_is_read(tmp_path):
    path = tmp_path / "map.yaml"
    path.write_text("rules:\n  - pattern: block(\\d)\\.(q|k)\n    tap: layers.\\1.self_attn.\\2\n    layout: BNTH\n")
    found = NameMap.read(path)
    assert found.name == str(path)
    assert sorted(found.plan(["block0.q", "block1.k", "block2.v"]).places) == [
        "layers.0.self_attn.q", "layers.1.self_attn.k"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda: one(pattern="'('"), "rule 1: pattern: expected a regular expression"),
        (lambda: one(pattern="'[[a]'"), "rule 1: pattern"),
        (lambda: one(pattern=3), "rule 1: pattern: expected .* found 3"),
        (lambda: one(pattern=None), "rule 1: pattern: expected .* found None"),
        (lambda: one(pattern="'" + "a" * 201 + "'"), "at most 200 characters"),
        (lambda: one(pattern="'(a+)+b'"), "without a repeated group"),
        (lambda: one(pattern="'(?:a|aa)*b'"), "without a repeated group"),
        (lambda: one(pattern="'(a){2,}b'"), "without a repeated group"),
        (lambda: one(pattern="'.*.*.*.*b'"), "without more than 3 repetitions"),
        (lambda: one(pattern="'" + "a?" * 20 + "a" * 20 + "'"), "without more than 8 choices"),
        (lambda: one(pattern="'" + "(a|a)" * 20 + "'"), "without more than 8 choices"),
        (lambda: one(tap="layers.0.nothing"), "rule 1: tap: expected the name of a tap, found 'layers.0.nothing'"),
        (lambda: one(tap="layers.x.residual_out"), "expected the name of a tap"),
        (lambda: one(tap=r"layers.\1.residual_out"), "expected groups that the pattern has"),
        (lambda: one(tap=r"layers.\g<1>.residual_out"), r"groups \\1 to \\9 alone"),
        (lambda: one(tap=None), "rule 1: tap: expected a template"),
        (lambda: one(tap="[[a]]"), "rule 1: tap: expected a template"),
        (lambda: one(part="outputs"), "rule 1: part: expected input or output, found 'outputs'"),
        (lambda: one(index=-1), "rule 1: index"),
        (lambda: one(index="true"), "rule 1: index"),
        (lambda: one(layout="BHTN"), "rule 1: layout: expected one of BTNH, BNTH, BTE, found 'BHTN'"),
        (lambda: one(split="3"), "rule 1: split: expected a mapping"),
        (lambda: one(split="{parts: 3}"), "rule 1: split: parts: expected 1"),
        (lambda: one(split="{}"), "rule 1: split: expected either parts or sizes"),
        (lambda: one(split="{sizes: [q, k]}"), "split: sizes: expected 1 of them"),
        (lambda: one(split="{sizes: [k]}"), "expected whole numbers or q, kv, d_model, d_ff, found 'k'"),
        (lambda: one(split="{sizes: [true]}"), "expected whole numbers"),
        (lambda: one(split="{parts: 1, axis: 9}"), "split: axis"),
        (lambda: one(when="pre"), "rule 1: expected the keys pattern, tap, .* found 'when'"),
        (lambda: parse("rules:\n- 3\n"), "rule 1: rule: expected a mapping, found 3"),
        (lambda: parse("rules:\n- {pattern: a, tap: embedded}\n- 3\n"), "rule 2: rule"),
        (lambda: parse("rules: {}\n"), "expected one key, rules, with a list"),
        (lambda: parse(""), "expected one key, rules"),
        (lambda: parse("rules: []\nother: 1\n"), "expected one key, rules"),
        (lambda: parse("rules: []\nrules: []\n"), "line 1: expected each key once"),
        (lambda: parse("{[a]: b}"), "expected each key once, and plain"),
        (lambda: parse("rules: [\n"), "expected YAML, found a mistake at line 2"),
        (lambda: parse("a: &x [1]\nb: *x\n"), "expected no aliases"),
        (lambda: parse("- " * 20000), "nesting"),
        (lambda: parse("[" * 60000), "nesting"),
        (lambda: parse(b"rules: \xff"), "expected UTF-8, found byte 0xff"),
        (lambda: parse("rules: \x00"), "expected YAML"),
        (lambda: parse("rules: !!python/object/apply:os.getcwd []"), "expected YAML, found a mistake at line 1"),
        (lambda: parse("rules: " + "1:1" * 9000), "expected"),
        (lambda: parse("rules: [" + "a," * 501 + "]"), "at most 500 rules"),
    ],
)
def test_faults_are_one_line_with_file_and_rule(make, fault):
    start = time.monotonic()
    with pytest.raises(InputError, match=fault) as caught:
        make()
    assert str(caught.value).startswith("my.yaml")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("name", "data"), [("big.yaml", b"#" * 70000), ("folder", None), ("absent.yaml", None), ("a\0b", None)]
)
def test_files_that_cannot_be_read(name, data, tmp_path):
    if data:
        (tmp_path / name).write_bytes(data)
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"at most 65536|regular file|readable"):
        NameMap.read(tmp_path / name)


def test_the_slowest_pattern_allowed_is_fast():
    """Three unbounded repetitions and eight choices, on paths as long as are looked at; longer ones are passed over."""
    found = one(pattern="'" + "a?" * 8 + ".*a.*a.*b'")
    start = time.monotonic()
    assert found.plan(["a" * 200, "a" * 100_000]).places == {}
    assert time.monotonic() - start < 60


def test_a_name_that_only_a_module_makes_wrong():
    found = one(pattern=r"'h\.(\d)\.(\w+)'", tap=r"'layers.\1.self_attn.\2'")
    assert list(found.plan(["h.0.q"]).places) == ["layers.0.self_attn.q"]
    with pytest.raises(
        InputError, match=r"rule 1: tap: module h\.0\.o would be 'layers\.0\.self_attn\.o', which is no"
    ):
        found.plan(["h.0.o"])


def test_pyyaml_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(CandidateError, match=r"my\.yaml: expected PyYAML.* samelogits\[yaml\]"):
        parse("rules: []")


# What a rule does with a value


def captured(keys, value, part="output", config=LLAMA, args=(), kwargs=None):
    """The taps that one rule makes of what a module gives or is given."""
    capture = Capture(one(part=part, **keys).plan(["a"]), config, probe_of(LLAMA))
    if part == "input":
        capture.see_input("a", args, kwargs or {})
    else:
        capture.see_output("a", value)
    return capture.finish(Output(np.zeros((3, 7, 11)))).taps


x = np.arange(3.0 * 7 * 80).reshape(3, 7, 80)
QKV = "['layers.0.self_attn.q', 'layers.0.self_attn.k', 'layers.0.self_attn.v']"


def test_values_become_taps():
    taps = captured({"tap": QKV, "split": "{sizes: [q, kv, kv]}"}, x)
    assert {name[-1]: array.shape[-1] for name, array in taps.items()} == {"q": 40, "k": 20, "v": 20}
    np.testing.assert_array_equal(taps["layers.0.self_attn.v"], x[..., 60:])
    assert captured({"tap": QKV, "split": "{sizes: [1, 2, 77]}"}, x)["layers.0.self_attn.k"].shape == (3, 7, 2)
    taps = captured({"tap": "['layers.0.mlp.gate', 'layers.0.mlp.up']", "split": "{parts: 2, axis: 2}"}, x)
    np.testing.assert_array_equal(taps["layers.0.mlp.up"], x[..., 40:])
    heads = x.reshape(3, 7, 4, 20)
    found = captured({"tap": "layers.0.self_attn.q", "layout": "BNTH"}, heads.swapaxes(1, 2))
    np.testing.assert_array_equal(found["layers.0.self_attn.q"], heads)
    assert captured({"tap": "embed_positions"}, x[0])["embed_positions"].shape == x.shape
    assert list(captured({"tap": "['embed_tokens', 'embedded']"}, x)) == ["embed_tokens", "embedded"]
    for value, keys in (((None, x), {"index": 1}), ({"y": x}, {"index": "y"}), ((x, None), {}), ({"y": x}, {})):
        np.testing.assert_array_equal(captured(keys, value)["embedded"], x)
    for args, kwargs, keys in (((None, x), {}, {"index": 1}), ((), {"h": x}, {}), ((1,), {"h": x}, {"index": "h"})):
        np.testing.assert_array_equal(captured(keys, None, "input", LLAMA, args, kwargs)["embedded"], x)


@pytest.mark.parametrize(
    ("keys", "value", "fault"),
    [
        ({"index": 3}, (x, x), "the output of a: expected an array, found NoneType"),
        ({}, "text", "expected an array, found str"),
        ({"layout": "BNTH"}, x, r"layout: expected 4 axes BNTH, found \[3, 7, 80\]"),
        ({"layout": "BTE"}, x.reshape(3, 7, 4, 20), "layout: expected 3 axes"),
        ({"tap": QKV, "split": "{parts: 3}"}, x, "split: expected a multiple of 3, found a width of 80"),
        ({"tap": QKV, "split": "{sizes: [q, q, q]}"}, x, "split: expected a width of 120, found 80"),
        ({"tap": QKV, "split": "{parts: 3, axis: 3}"}, x, r"split: expected an axis 3, found shape \[3, 7, 80\]"),
    ],
)
def test_values_that_a_rule_does_not_fit(keys, value, fault):
    with pytest.raises(CandidateError, match=r"my\.yaml: rule 1: .*" + fault):
        captured(keys, value)


def test_sizes_by_name_need_a_config():
    with pytest.raises(CandidateError, match="expected sizes as numbers where no config is known"):
        captured({"tap": QKV, "split": "{sizes: [q, kv, kv]}"}, x, config=None)

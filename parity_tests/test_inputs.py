"""The host boundary: one rule and one error, whatever a framework would have done with the input."""

import ladder
import numpy as np
import pytest
from ladder import LLAMA, UNKIND

from samelogits.errors import BackendError, CheckpointError, InputError

# Vocabulary 13, learned table 11. Frameworks clamp, wrap, give NaN or raise (I01, I02).
BAD_TOKENS = {
    "id past the vocabulary": ([[1, 13]], r"found 13 at \[0, 1\]"),
    "negative id": ([[1, 2], [-1, 0]], r"found -1 at \[1, 0\]"),
    "very negative id": ([[-14]], "found -14"),
    "huge id": (np.array([[2**63 + 1]], np.uint64), "63 bits"),
    "floats": ([[1.0, 2.0]], "whole numbers, found dtype float64"),
    "booleans": ([[True, False]], "whole numbers, found dtype bool"),
    "text": (["ab"], "whole numbers"),
    "nothing": (None, "whole numbers"),
    "rows of two lengths": ([[1, 2], [3]], "rows of one length"),
    "three axes": ([[[1]]], r"shape \[batch, time\], found \(1, 1, 1\)"),
    "no axis": (5, r"shape \[batch, time\]"),
    "past the position table": (np.zeros((1, 12), int), "at most max_seq_len 11 positions, found 12"),
}
BAD_MASKS = {
    "wrong shape": ([[1, 1]], r"shape \[1, 3\], found \[1, 2\]"),
    "other numbers": ([[1, 2, 0]], "only 0 and 1"),
    "fractions": ([[0.5, 1, 1]], "only 0 and 1"),
    "nan": ([[np.nan, 1, 1]], "only 0 and 1"),
    "one for each row": ([1, 1, 1, 1], r"shape \[1, 3\]"),
}
BAD_TARGETS = {
    "none to count": ([[-100, -100, -100]], "at least one to count"),
    "another negative": ([[0, -1, 2]], "found -1"),
    "past the vocabulary": ([[0, 13, 2]], r"found 13 at \[0, 1\]"),
    "floats": ([[0.0, 1.0, 2.0]], "whole numbers"),
    "wrong shape": ([[0, 1]], r"shape \[1, 3\]"),
    "logits": (np.zeros((1, 3, 13), int), r"shape \[1, 3\]"),
}


@pytest.mark.parametrize("fault", BAD_TOKENS)
def test_bad_tokens(place, fault):
    tokens, message = BAD_TOKENS[fault]
    model = ladder.load(UNKIND, place)
    for use in (model.logits, model.activations, lambda ids: model.extend(model.new_cache(1, 20), ids)):
        with pytest.raises(InputError, match=message):
            use(tokens)


@pytest.mark.parametrize("fault", BAD_MASKS)
def test_bad_masks(place, fault):
    mask, message = BAD_MASKS[fault]
    model = ladder.load(UNKIND, place)
    for use in (model.logits, model.activations, lambda ids, mask: model.loss(ids, ids, attention_mask=mask)):
        with pytest.raises(InputError, match=message):
            use([[1, 2, 3]], mask)


@pytest.mark.parametrize("fault", BAD_TARGETS)
def test_bad_targets(place, fault):
    targets, message = BAD_TARGETS[fault]
    model = ladder.load(UNKIND, place)
    trainer = model.trainer(ladder.SETTINGS)
    before = model.parameters()
    for use in (model.loss, model.loss_and_gradients, trainer.step):
        with pytest.raises(InputError, match=message):
            use([[1, 2, 3]], targets)
    assert trainer.finished_steps == 0
    for name, array in model.parameters().items():
        assert np.array_equal(array, before[name])


@pytest.mark.slow(when=lambda given: given["place"].backend == "jax")
def test_the_legal_edges(place):
    """The first and the last id, any length with rotary positions, the last position: padding takes none."""
    ids = np.where(np.arange(60).reshape(5, 12) % 2, 12, 0)
    assert np.isfinite(ladder.load(LLAMA, place).logits(ids)).all()
    mask = np.array([[0] + [1] * 11] * 5)
    assert np.isfinite(ladder.load(UNKIND, place).logits(ids, mask)).all()


@pytest.mark.parametrize(
    ("dtype", "device", "message"),
    [("float16", "cpu", "dtype"), ("int8", "cpu", "dtype"), ("float32", "abacus", "device"), ("float32", "", "device")],
)
def test_bad_requests(place, dtype, device, message):
    from samelogits.backend import get_backend

    with pytest.raises(BackendError, match=message):
        get_backend(place.backend).load(UNKIND, ladder.parameters(UNKIND), dtype, device)


def test_numpy_has_no_bfloat16():
    with pytest.raises(BackendError, match="bfloat16"):
        ladder.load(UNKIND, ladder.cpu("numpy"), "bfloat16")


def test_unknown_backend():
    from samelogits.backend import get_backend

    for name, message in (("abacus", "found 'abacus'"), ("no_such_module:backend", "installed"), ("json:x", "'x'")):
        with pytest.raises(BackendError, match=message):
            get_backend(name)


BAD_PARAMETERS = {
    "rows that ids may ask for": ("model.embed_tokens.weight", lambda array: array[:-1], r"expected shape \(13, 10\)"),
    "broadcast by luck": ("model.norm.weight", lambda array: array[:1], r"expected shape \(10,\), found \(1,\)"),
    "absent": ("model.norm.weight", None, "model.norm.weight: expected shape"),
    "unknown": ("model.more.weight", np.ones, "model.more.weight: not a parameter of this config"),
}


@pytest.mark.parametrize("fault", BAD_PARAMETERS)
def test_bad_parameters(place, fault):
    name, change, message = BAD_PARAMETERS[fault]
    arrays = dict(ladder.parameters(UNKIND))
    before = arrays.pop(name, 3)
    if change is not None:
        arrays[name] = change(before)
    with pytest.raises(CheckpointError, match=message):
        ladder.load(UNKIND, place, "float32", arrays)


def test_any_layout_of_parameters(place):
    """Read backwards, by columns, and in the other order of bytes."""
    arrays, ids = ladder.parameters(UNKIND), ladder.tokens(UNKIND)
    expected = ladder.load(UNKIND, place, "float32", arrays).logits(ids)
    for change in (lambda a: a[::-1].copy()[::-1], np.asfortranarray, lambda a: a.astype(a.dtype.newbyteorder())):
        changed = {name: change(array) for name, array in arrays.items()}
        assert ladder.load(UNKIND, place, "float32", changed).logits(ids).tobytes() == expected.tobytes()


def test_arrays_given_are_not_kept(place):
    """What the caller does to its arrays afterwards, and the model to its own, stays apart."""
    arrays = {name: array.copy() for name, array in ladder.parameters(UNKIND).items()}
    model = ladder.load(UNKIND, place, "float32", arrays)
    ids = ladder.tokens(UNKIND)
    before = model.logits(ids)
    for array in arrays.values():
        array[...] = 0
    for array in model.parameters().values():
        array[...] = 0
    assert model.logits(ids).tobytes() == before.tobytes()
    mine = {name: array.copy() for name, array in ladder.parameters(UNKIND).items()}
    ladder.load(UNKIND, place, "float32", mine).trainer(ladder.SETTINGS).step(ids, ladder.targets(UNKIND))
    for name, array in mine.items():
        assert np.array_equal(array, ladder.parameters(UNKIND)[name])

"""SL1xx: the feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from numpy_reference import native
from samelogits.checking.catalogue.mistake import mistake
from samelogits.checking.catalogue.weights import gates_and_ups
from samelogits.checking.variant import Variant
from samelogits.config import DecoderConfig

Array = np.ndarray
ACTIVATIONS = ("relu", "relu_squared", "gelu", "gelu_tanh", "silu")
SMOOTH = ("gelu", "gelu_tanh", "silu")


def _uses(*names: str) -> Callable[[DecoderConfig], bool]:
    return lambda config: config.activation in names


def _gated(config: DecoderConfig) -> bool:
    return config.gated


def _put(v: Variant, activation: Callable[[Array], Array]) -> None:
    v.exchange(ACTIVATIONS, lambda right: activation)


@mistake("SL101", "GELU by tanh, where the error function is meant", _uses("gelu"))
def gelu_by_tanh(v: Variant) -> None:
    """`jax.nn.gelu` and Flax's `nn.gelu` take the tanh form unless told otherwise; torch's `F.gelu` the error function.

    The two differ by at most 4.7e-4, at |x| = 2.7, and by 5e-11 at x = 0.02: small activations hide it.
    Right: `approximate=False` in JAX. The configuration's "gelu" means the error function.
    """
    _put(v, native.gelu_tanh)


@mistake("SL102", "GELU by the error function, where the tanh form is meant", _uses("gelu_tanh"))
def gelu_by_erf(v: Variant) -> None:
    """torch's `F.gelu` takes the error function unless told otherwise, and GPT-2 and Gemma were trained with the
    tanh form.

    Configurations call the tanh form "gelu_new", "gelu_pytorch_tanh" or "gelu_fast".
    Right: `F.gelu(x, approximate="tanh")`.
    """
    _put(v, native.gelu)


@mistake("SL103", "SiLU, where GELU is meant", _uses("gelu", "gelu_tanh"))
def silu_for_gelu(v: Variant) -> None:
    """A feed-forward layer written for Llama is used for a model with GELU, or the configuration's activation isn't
    read.

    Gemma's `hidden_activation` goes before `hidden_act`. Right: map each name that a configuration can hold, and refuse
    one that is not known.
    """
    _put(v, native.silu)


@mistake("SL104", "GELU, where SiLU is meant", _uses("silu"))
def gelu_for_silu(v: Variant) -> None:
    """A feed-forward layer written for GPT-2 is used for a model with SiLU (also called swish).

    Right: read the activation from the configuration.
    """
    _put(v, native.gelu)


@mistake("SL105", "ReLU, where a smooth activation is meant", _uses(*SMOOTH))
def relu_instead(v: Variant) -> None:
    """Many tutorials use ReLU. Right: read the activation from the configuration."""
    _put(v, native.relu)


@mistake("SL106", "GELU, where ReLU is meant", _uses("relu"))
def gelu_for_relu(v: Variant) -> None:
    """The default of many layers is GELU, and older models (OPT) use ReLU. Right: read it from the configuration."""
    _put(v, native.gelu)


@mistake("SL107", "quick GELU, x sigmoid(1.702 x), where another activation is meant", _uses(*SMOOTH))
def quick_gelu(v: Variant) -> None:
    """The approximation that CLIP uses. It differs from GELU by up to 0.02. Right: use it only for "quick_gelu"."""
    _put(v, lambda x: x * (0.5 * (1 + np.tanh(0.851 * x))))


@mistake("SL108", "there is no activation")
def no_activation(v: Variant) -> None:
    """The two products follow each other with nothing between them: the activation was forgotten, or its result
    dropped."""
    _put(v, lambda x: x)


@mistake("SL109", "ReLU is squared", _uses("relu"))
def squared_relu(v: Variant) -> None:
    """ReLU squared (Primer, RWKV) is used where ReLU is meant. Right: "relu" and "relu2" are two activations."""
    _put(v, lambda x: np.square(np.maximum(x, 0)))


@mistake("SL110", "the activation is applied twice", _uses(*SMOOTH, "relu_squared"))
def activation_twice(v: Variant) -> None:
    """Once inside the layer's own module and once around it."""
    v.exchange(ACTIVATIONS, lambda right: lambda x: right(right(x)))


@mistake("SL111", "ReLU, where its square is meant", _uses("relu_squared"))
def relu_for_square(v: Variant) -> None:
    """Nemotron and Arcee square it, and call it "relu2". Right: refuse an activation that is not known."""
    _put(v, native.relu)


@mistake("SL112", "GELU, where the square of ReLU is meant", _uses("relu_squared"))
def gelu_for_square(v: Variant) -> None:
    """The default of many layers is GELU. Right: read the activation from the configuration."""
    _put(v, native.gelu)


@mistake("SL113", "negative numbers are squared too, where the square of ReLU is meant", _uses("relu_squared"))
def square_first(v: Variant) -> None:
    """relu(x^2), which is x^2, instead of relu(x)^2: the two steps are in the wrong order."""
    _put(v, lambda x: native.relu(np.square(x)))


@mistake("SL121", "gate and up are swapped", _gated)
def gate_and_up_swapped(v: Variant) -> None:
    """The activation is put on what should be multiplied, and the other way round.

    In Meta's files `w1` is the gate and `w3` is up, and some fused layouts store [up | gate]. The shapes are equal, so
    nothing complains. Right: down(act(gate(x)) * up(x)).
    """
    for gate, up in gates_and_ups(v):
        v.parameters[gate], v.parameters[up] = v.parameters[up], v.parameters[gate]


@mistake("SL122", "the activation is put on gate times up", _gated)
def activation_on_product(v: Variant) -> None:
    """act(gate(x) * up(x)) instead of act(gate(x)) * up(x)."""
    v.exchange("multiply", lambda right: lambda x, y: getattr(native, v.config.activation)(right(x, y)))
    v.exchange(ACTIVATIONS, lambda right: lambda x: x)


@mistake("SL123", "the gate is dropped", _gated)
def gate_dropped(v: Variant) -> None:
    """down(act(gate(x))): the product with up(x) is missing, as in a plain feed-forward layer."""
    v.exchange("multiply", lambda right: lambda x, y: x)


@mistake("SL124", "gate and up are added, not multiplied", _gated)
def gate_added(v: Variant) -> None:
    """down(act(gate(x)) + up(x))."""
    v.exchange("multiply", lambda right: lambda x, y: x + y)


@mistake("SL125", "gate and up are read as alternate rows of a fused weight", _gated)
def gate_interleaved(v: Variant) -> None:
    """A fused weight [gate | up] is taken for one whose rows alternate. Right: split it in two halves."""
    for gate, up in gates_and_ups(v):
        fused = np.concatenate([v.parameters[gate], v.parameters[up]])
        v.parameters[gate], v.parameters[up] = fused[0::2], fused[1::2]

"""The training loss of a batch."""

from numpy_reference.decoder import Decoder
from numpy_reference.tape import Array
from samelogits.batch import Batch, Targets
from samelogits.taps import no_tap


def language_model_loss(decoder: Decoder, batch: Batch, targets: Targets) -> Array:
    """Mean cross-entropy of the targets given the tokens, a scalar in nats."""
    logits_BTV = decoder(batch, None, no_tap)
    return decoder.ops.cross_entropy(logits_BTV, targets.ids_BT, targets.counted_BT)

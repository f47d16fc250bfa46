"""The training loss of a batch."""

from torch import Tensor

from pytorch_impl.decoder import Decoder
from samelogits.batch import Batch, Targets
from samelogits.taps import no_tap


def language_model_loss(decoder: Decoder, batch: Batch, targets: Targets) -> Tensor:
    """Mean cross-entropy of the targets given the tokens, a scalar in nats."""
    logits_BTV = decoder(batch, None, no_tap)
    return decoder.ops.cross_entropy(logits_BTV, targets.ids_BT, targets.counted_BT)

"""Keys and values of the tokens seen so far, in arrays of fixed size."""

import numpy as np

from numpy_reference.tape import Array
from samelogits.config import DecoderConfig


class Cache:
    """keys, values: one [B, capacity, K, H] a layer, zero and never visible behind the tokens held.

    mask_BS: NumPy bool, which of the tokens held are real; who runs the decoder sets it once a chunk is through.
    """

    def __init__(self, config: DecoderConfig, batch_size: int, capacity: int, dtype: str):
        shape = (batch_size, capacity, config.n_kv_heads, config.d_head)
        self.keys = [np.zeros(shape, dtype) for _ in range(config.n_layers)]
        self.values = [np.zeros(shape, dtype) for _ in range(config.n_layers)]
        self.batch_size = batch_size
        self.capacity = capacity
        self.mask_BS = np.ones((batch_size, 0), bool)

    @property
    def filled(self) -> int:
        """How many tokens are held."""
        return self.mask_BS.shape[1]

    def append(self, layer: int, k_BTKH: Array, v_BTKH: Array) -> tuple[Array, Array]:
        """Write a chunk behind what a layer holds; returns the layer's whole arrays [B, capacity, K, H]."""
        end = self.filled + k_BTKH.shape[1]
        self.keys[layer][:, self.filled : end] = k_BTKH  # differs: in-place
        self.values[layer][:, self.filled : end] = v_BTKH
        return self.keys[layer], self.values[layer]

"""The decoder in JAX with Flax NNX modules."""

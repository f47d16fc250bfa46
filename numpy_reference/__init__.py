"""The decoder in NumPy alone, gradients by hand: the third opinion, and the reference in float64."""

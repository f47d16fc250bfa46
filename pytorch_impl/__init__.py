"""The decoder in PyTorch: the primary implementation, which the other two mirror file by file."""

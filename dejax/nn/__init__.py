"""Layers of the decoder: weights in nnx modules, arithmetic in pure functions."""

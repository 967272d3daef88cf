"""Weights on disk: checkpoints, expert store, draft adapter."""

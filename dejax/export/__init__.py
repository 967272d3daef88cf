"""Targets and draft experts in the formats of other programs."""

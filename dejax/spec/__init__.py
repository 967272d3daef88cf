"""Speculation on plain arrays: choosing tokens, accepting drafts, deciding when a draft stops.

Host code that runs between jitted steps: numpy only, no model and no accelerator. The decode loop
calls `sampling` for every row of logits, `control` after every draft pass, and `accept` once a
round.
"""

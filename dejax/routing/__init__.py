"""Statistics of recorded routing on plain arrays: no model, no accelerator."""

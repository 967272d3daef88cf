"""Draft experts and the draft path (DraftExpert, arXiv 2607.24434)."""

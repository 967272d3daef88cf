"""Where an exported file comes from: training and licence are told, a machine's paths are not."""

import re
from pathlib import Path, PurePosixPath
from typing import Any

_ABSOLUTE = re.compile(r"(?<![\w.~/:-])(?:~\w*)?/(?=\S)(?:[^/\s,;:\"']+/)*")

_ORIGIN = ("_name_or_path", "name_or_path", "tokenizer_file", "_commit_hash")


def without_folders(value: Any) -> Any:
    """JSON values whose absolute paths have lost the folders: they tell of one machine alone."""
    if isinstance(value, dict):
        return {key: without_folders(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(entry) for entry in value]
    if not isinstance(value, str):
        return value
    if value.startswith(("/", "~")) and "," not in value:  # one path, whatever is in its names
        return PurePosixPath(value).name
    return _ABSOLUTE.sub("", value)


def licence(card: Path) -> dict[str, str]:
    """What a model card's head says of the licence: license, license_name, license_link."""
    try:
        head = card.read_text(encoding="utf-8", errors="replace").split("\n---", 1)[0]
    except OSError:
        return {}
    if not head.startswith("---"):
        return {}
    found: dict[str, str] = {}
    for key in ("license", "license_name", "license_link"):
        line = re.search(rf"^{key}:[ \t]*['\"]?([^\n'\"]+)", head, re.MULTILINE)
        if line:
            found[key] = line[1].strip()
    return found


def without_origin(config: dict[str, Any]) -> dict[str, Any]:
    """The content of a model's configuration file without where it was loaded from."""
    return {key: value for key, value in config.items() if key not in _ORIGIN}

"""The shipped evaluation prompts and the shipped training documents have no text in common."""

import gzip
import json
import re
from pathlib import Path

DEMO = Path(__file__).resolve().parent.parent / "dejax" / "assets" / "demo"
RUN = 12  # words
CATEGORIES = {"chat", "math", "code", "summarization", "instruction"}


def rows(name: str) -> list[dict]:
    data = (DEMO / name).read_bytes()
    text = gzip.decompress(data) if name.endswith(".gz") else data
    return [json.loads(line) for line in text.splitlines()]


def runs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    # A text shorter than a run counts as a whole.
    return {tuple(words[i : i + RUN]) for i in range(max(1, len(words) - RUN + 1))}


def contents(document: dict) -> list[str]:
    turns = [turn["content"] for turn in document.get("messages", [])]
    # Joined as well: a run may begin in one turn and end in the next.
    return [" ".join(turns)] if turns else [document["text"]]


def test_no_run_of_a_prompt_is_trained_on():
    prompts = {run: row["id"] for row in rows("prompts.jsonl") for run in runs(row["prompt"])}
    for document in rows("distill.jsonl.gz"):
        for text in contents(document):
            shared = prompts.keys() & runs(text)
            assert not shared, f"{prompts[next(iter(shared))]}: {next(iter(shared))}"


def test_the_check_finds_a_leak():
    row = rows("prompts.jsonl")[0]
    assert runs(row["prompt"]) & runs(f"Some words before it. {row['prompt']} And after.")


def test_prompts_cover_the_categories_evenly():
    prompts = rows("prompts.jsonl")
    assert len(prompts) == len({row["id"] for row in prompts}) == 20
    assert {row["category"] for row in prompts[:6]} == CATEGORIES
    for category in CATEGORIES:
        assert sum(row["category"] == category for row in prompts) == 4
    assert all({"id", "category", "prompt", "source", "license"} == set(row) for row in prompts)


def test_documents_are_whole_and_freely_licensed():
    documents = rows("distill.jsonl.gz")
    assert len(documents) > 1000
    licences = {"MIT", "Apache-2.0", "PSF-2.0", "CC-BY-4.0", "public domain"}
    for document in documents:
        assert ("text" in document) != ("messages" in document)
        assert document["license"] in licences and document["kind"]
        if "messages" in document:
            assert [t["role"] for t in document["messages"]] == ["user", "assistant"]
            assert all(turn["content"].strip() for turn in document["messages"])

"""Prompt files: JSON lines in, one line for what is none."""

import pytest

from dejax.errors import FailedError, UsageError
from infer.prompts import count_prompts, read_prompts


def test_read_prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"id": "a", "prompt": "One", "source": {"x": 1}}\r\n\n'
        + '  {"prompt": "a\u2028b"}'.encode()
    )
    assert read_prompts(path) == [
        {"id": "a", "prompt": "One", "source": {"x": 1}},
        {"id": 3, "prompt": "a\u2028b"},
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no prompts; expected JSON lines"),
        (b"\n \n", "no prompts; expected JSON lines"),
        (b'{"prompt": "\xff"}', "not UTF-8 (byte 12)"),
        (b'{"prompt": "a"}\n{"prompt": ', "line 2 is not JSON"),
        (b"[" * 100_000, "line 1 is not JSON"),
        (b'{"prompt": "a", "x": NaN}', "line 1 is not JSON: NaN"),
        (b'\n{"text": "a"}', "line 2: no prompt"),
        (b'["prompt"]', "line 1: no prompt"),
        (b'{"prompt": 3}', "line 1: prompt is 3; expected a string, or token ids"),
        (b'{"prompt": "\\ud800"}', "line 1: prompt holds half a surrogate pair"),
    ],
)
def test_read_prompts_refuses(tmp_path, content, message):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError) as raised:
        read_prompts(path)
    assert str(raised.value).startswith(f"{path}: ") and message in str(raised.value)


def test_read_prompts_of_no_file(tmp_path):
    with pytest.raises(UsageError, match="nowhere does not exist; expected JSON lines"):
        read_prompts(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="is a folder; expected JSON lines"):
        read_prompts(tmp_path)


def test_lines_that_are_no_prompt_can_be_left_out(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": 3}\n\n{"prompt": "a"}\n{"prompt": \n')
    bad = []
    prompts = read_prompts(path, on_bad=lambda name, error: bad.append((name, str(error))))
    assert prompts == [{"id": 3, "prompt": "a"}]
    assert [name for name, _ in bad] == [1, 4]
    assert "prompt is 3" in bad[0][1] and "line 4 is not JSON" in bad[1][1]


def test_counts_add_up():
    bad = [("a", UsageError("long")), (7, FailedError("broken")), ("b", UsageError("empty"))]
    assert count_prompts(4, bad) == {
        "counts": {"input": 7, "written": 4, "failed": 1, "skipped": 2},
        "failed": [{"id": "7", "reason": "broken"}],
        "skipped": [{"id": "a", "reason": "long"}, {"id": "b", "reason": "empty"}],
    }

"""The same documents in every form that is read, and a chat template that marks what is said."""

import copy
import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
from pyarrow import parquet

from tests.train.small_model import tokenizer_of
from train.token_cache import TokenizedDocuments, features

MARKED = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>' + '\n' }}{% endif %}"
    "{% endfor %}"
)
"""The small tokenizer's template, with what the assistant says marked, its end included."""

TURNS = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
CHAT = {"messages": TURNS}
TEXT = {"text": "plain", "kind": "novel"}
PAIR = {"prompt": "Why?", "completion": "So."}
GENERATION = {"id": "0", "prompt": "x", "prompt_tokens": [5, 6], "tokens": [7, 8], "text": "no"}


def marked_tokenizer(template: str = MARKED):
    """The small tokenizer with another template."""
    tokenizer = copy.deepcopy(tokenizer_of())
    tokenizer.chat_template = template
    return tokenizer


def filled(documents):
    """Rows that all have the same columns, null where a document lacks one."""
    names = dict.fromkeys(name for document in documents for name in document)
    return [dict.fromkeys(names) | document for document in documents]


def write(path: Path, documents) -> Path:
    """Documents in the format that the file's name tells."""
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(filled(documents)), path)
        return path
    if path.name.endswith(".json"):
        data = json.dumps({"generations": documents, "counts": {"input": 9}}, indent=2)
    else:
        data = "\n".join(json.dumps(document) for document in documents)
    path.write_bytes(gzip.compress(data.encode()) if path.suffix == ".gz" else data.encode())
    return path


def tokenized(tokens, counts=None) -> TokenizedDocuments:
    """Documents of these token ids, all of which count unless told."""
    counts = [[True] * len(ids) for ids in tokens] if counts is None else counts
    columns = {
        "tokens": tokens,
        "counts": counts,
        "counted": [sum(each) for each in counts],
        "largest": [max(ids, default=-1) for ids in tokens],
        "digest": [repr(ids).encode() for ids in tokens],
    }
    return TokenizedDocuments(SimpleNamespace(data=pa.table(columns, schema=SCHEMA)))


SCHEMA = features().arrow_schema

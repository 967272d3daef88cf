"""llama.cpp, asked about a GGUF file in a process of its own: a bad key would abort this one.

Weights are as in the file; keys and values are kept in float32.
"""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np


class Refused(Exception):
    """llama.cpp does not load the file; the message is what it said."""


def ask(
    path: Path, *, drafter: Path | None = None, draft_length: int = 6, **requests: Any
) -> dict[str, Any]:
    """Answers by the name of a request, which is a dictionary:

    `{"logprobs": ids}` -> float64 [len(ids), V], after every prefix (with `"from": n` [.. - n, V],
    after those longer than n); `{"greedy": ids, "count": n}` -> n ids (with `"ends": True` up to an
    end token), how many of them `drafter` had drafted, and how many it drafted; `{"tokenize":
    texts}` -> a list of ids a text; `{"chat": messages}` -> the prompt. Drafts are as long as they
    may be, whatever the drafter is sure of.
    """
    given = [] if drafter is None else [str(drafter), str(draft_length)]
    argv = [sys.executable, __file__, str(path), *given]
    done = subprocess.run(argv, input=json.dumps(requests), capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "rror" in line]
        raise Refused("\n".join(errors) or done.stderr[-2000:])
    answers = json.loads(done.stdout.splitlines()[-1])
    for name, request in requests.items():
        if "logprobs" in request:
            answers[name] = np.array(answers[name])
    return answers


def _serve(path: str, drafter: str | None, draft_length: str) -> Any:
    import xllamacpp as llama

    settings = llama.CommonParams()
    settings.model.path = path
    settings.n_ctx, settings.n_parallel, settings.port = 512, 1, 0
    settings.warmup = settings.fit_params = False
    settings.swa_full = True
    settings.cache_type_k = settings.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    if drafter is not None:
        draft = settings.speculative.draft
        draft.mparams.path, draft.n_max, draft.p_min = drafter, int(draft_length), 0.0
        draft.cache_type_k = draft.cache_type_v = llama.ggml_type.GGML_TYPE_F32
        settings.speculative.types = [
            llama.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE
        ]
    return llama.Server(settings)


def _main(
    requests: dict[str, Any], path: str, drafter: str | None = None, draft_length: str = "6"
) -> dict[str, Any]:
    server = _serve(path, drafter, draft_length)

    def post(place: str, **body: Any) -> Any:
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(server.listening_address + place, data, kind)
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())

    def logprobs(ids: list[int], first: int) -> list[list[float]]:
        rows = []
        # The probabilities of a token that is no whole character are held back: it chooses "a",
        # which changes none of them.
        plain = post("/tokenize", content="a")["tokens"][-1]
        for end in range(first + 1, len(ids) + 1):
            body = dict(prompt=ids[:end], n_predict=1, n_probs=100_000, temperature=0)
            body["logit_bias"] = [[plain, 1e6]]
            (step,) = post("/completion", **body)["completion_probabilities"]
            by_id = {entry["id"]: entry["logprob"] for entry in step["top_logprobs"]}
            rows.append([by_id[i] for i in range(len(by_id))])
        return rows

    def answer(request: dict[str, Any]) -> Any:
        if "logprobs" in request:
            return logprobs(request["logprobs"], request.get("from", 0))
        if "greedy" in request:
            body = dict(prompt=request["greedy"], n_predict=request["count"], temperature=0)
            body["ignore_eos"] = not request.get("ends", False)
            done = post("/completion", **body, return_tokens=True)
            counts = (done["timings"].get(key, 0) for key in ("draft_n_accepted", "draft_n"))
            return done["tokens"], *counts
        if "tokenize" in request:
            texts = request["tokenize"]
            options = dict(add_special=True, parse_special=True)
            return [post("/tokenize", content=text, **options)["tokens"] for text in texts]
        return post("/apply-template", messages=request["chat"])["prompt"]

    return {name: answer(request) for name, request in requests.items()}


if __name__ == "__main__":
    print("\n" + json.dumps(_main(json.load(sys.stdin), *sys.argv[1:])))

"""The arguments of `dejax generate`, checked before any weight of the target is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dejax.ckpt.draft_state import resolve_draft
from dejax.config import ModelConfig
from dejax.draft.expert import Draft
from dejax.draft.predictor import ExpertPredictor
from dejax.errors import FailedError, UsageError
from dejax.target import check_dtype, load_tokenizer, model_folder, read_outline
from infer.approx_arguments import ApproxArguments
from infer.argument_types import Bytes, DraftSpec, InputFile, Model, OutputFile, Positional
from infer.buckets import capacity_of
from infer.decode_options import PATH_MODES, Mode, check_options
from infer.decoder import check_budget, check_host_cache
from infer.decoding_arguments import DecodingArguments
from infer.engines import device_cache_bytes
from infer.memory import MemoryPlan, plan_decode
from infer.prompts import encode_prompts, is_text
from infer.resident import check_resident


@dataclass(frozen=True)
class Arguments:
    """Arguments of `dejax generate`."""

    model: Positional[Model]
    """A Hugging Face folder, a converted folder, a GGUF file (dense Llama), or tiny."""
    prompt: str | None = None
    """The text of one prompt; either this or --prompts is needed."""
    prompts: InputFile | None = None
    """Prompts as JSON lines: an object with prompt, and maybe id, a line."""
    skip_bad: bool = False
    """Leave out, and count, prompts that cannot be decoded or that fail, rather than stop."""
    mode: Mode = "ar"
    """How to decode: ar, or by drafts; all but moe-spec give the same tokens."""
    draft: DraftSpec | None = None
    """Draft experts for modes that need them: a folder of `dejax distill`, or untrained ones."""
    governor: bool = True
    """Measure whether drafting pays, say so, and do not draft while it does not."""
    memory: Bytes = None
    """One budget for all of a converted target's decode, such as 6GiB, in place of the caches."""
    decoding: DecodingArguments = DecodingArguments()
    approx: ApproxArguments = ApproxArguments()
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """What weights are held in; computation is in float32 at least."""
    trace: OutputFile | None = None
    """Write what every round did here, as JSON lines."""
    json: OutputFile | None = None
    """Write the generations here as JSON; - is standard output."""

    def __post_init__(self):
        if (self.prompt is None) == (self.prompts is None):
            raise UsageError("give either --prompt TEXT or --prompts FILE")
        if self.skip_bad and self.prompts is None:
            raise UsageError("--skip-bad is for --prompts FILE")
        self.decoding.check_mode(self.mode, drafts=self.draft is not None)
        if (self.mode == "moe-spec") != (self.approx.budget is not None):
            raise UsageError("--mode moe-spec and --approx-verify-budget N: give both or neither")
        check_budget(self.decoding.engine, self.approx.budget, strict=self.decoding.strict)
        if self.memory is not None:
            cached = self.decoding.device_cache, self.decoding.host_cache
            if cached != ("auto", None):
                raise UsageError(
                    "--memory deals out the caches: give no --device-cache, --host-cache"
                )
            if self.decoding.engine == "resident":
                raise UsageError("--memory is for engines that load experts, not resident")
        if self.prompt is not None and not is_text(self.prompt):
            raise UsageError("--prompt is not UTF-8 text")
        if self.trace is not None and str(self.trace) == "-":
            raise UsageError("--trace: expected a file, not standard output")

    def check(self) -> tuple[Draft | None, ExpertPredictor | None]:
        """Draft experts and predictor, once all fits the target, of which no weight is read.

        Raises:
          UsageError: something does not.
        """
        held = check_dtype(self.dtype)
        outline = read_outline(self.model)
        drafts = self.draft is not None
        check_options(self.decoding.options(self.mode), outline.config, drafts=drafts)
        if self.decoding.engine == "resident":
            size = outline.config.routed_params * max(4, held.itemsize)
            cache = device_cache_bytes(self.decoding.device_cache, "resident")
            check_resident(outline.name, size, cache)
        elif not outline.converted:
            size = outline.config.routed_params * (4 if held == "float16" else held.itemsize)
            check_host_cache(outline.name, size, self.decoding.host_cache)
        draft = None if self.draft is None else resolve_draft(self.draft, outline)
        return draft, self.decoding.trained_predictor(outline, draft)

    def plan(
        self, prompts: Sequence[Any], draft: Draft | None, predictor: ExpertPredictor | None
    ) -> MemoryPlan:
        """How `--memory` is dealt out; no weight is read for it.

        Raises:
          UsageError: it does not suffice, or the target is not converted.
        """
        assert self.memory is not None
        outline, folder = read_outline(self.model), model_folder(self.model)
        speaker = _Unloaded(outline.name, outline.config, load_tokenizer(folder))
        encoded = encode_prompts(speaker, prompts, chat=self.decoding.chat, on_bad=_ignore)
        capacity = capacity_of([ids for _, ids in encoded], self.decoding.max_new_tokens)
        return plan_decode(
            outline,
            folder,
            budget=self.memory,
            held=check_dtype(self.dtype),
            capacity=min(capacity, outline.config.context),
            draft=draft,
            predictor=predictor,
            draft_length=self.decoding.options(self.mode).drafted_rows,
            r=self.decoding.r if self.mode in PATH_MODES else 0,
        )


@dataclass(frozen=True)
class _Unloaded:
    """A target of which only the tokenizer is read: a `Speaker`."""

    name: str
    config: ModelConfig
    tokenizer: Any


def _ignore(name: Any, error: UsageError | FailedError) -> None:
    """What is wrong with a prompt is told when it is decoded."""

"""Typed reading of a checkpoint's `config.json`, shared by the families."""

from typing import Any, NoReturn

from dejax.block_scaled import TILE
from dejax.config import GQAConfig, Llama3Config, RopeConfig, YarnConfig
from dejax.errors import UsageError

MOST_LAYERS = 10_000
"""More than any model has; a file that asks for more is mistaken, and would take hours."""


ROPE_KEYS = frozenset(
    "rope_type type rope_theta factor original_max_position_embeddings partial_rotary_factor "
    "beta_fast beta_slow mscale mscale_all_dim attention_factor truncate low_freq_factor "
    "high_freq_factor finetuned".split()
)
"""What rotary settings may hold; another key would ask for arithmetic that is not done here."""


def _short(value: Any) -> str:
    """A value as a message shows it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


class RawConfig:
    """A parsed `config.json` whose values are read with a type and a clear error."""

    def __init__(self, raw: dict[str, Any]):
        self.raw = raw

    def _typed(self, key: str, kind: type | tuple[type, ...], default: Any, expected: str) -> Any:
        if key not in self.raw or (self.raw[key] is None and default is not ...):
            if default is ...:
                raise UsageError(f"config.json: the key {key} is missing; expected {expected}")
            return default
        value = self.raw[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise UsageError(f"config.json: {key} is {_short(value)}; expected {expected}")
        return value

    def integer(self, key: str, default: Any = ...) -> Any:
        """An integer of 32 bits; `default` (if given) where the key is absent or null."""
        value = self._typed(key, int, default, "an integer")
        if value is not None and abs(value) >= 2**31:
            raise UsageError(f"config.json: {key} is {_short(value)}; expected one below 2^31")
        return value

    def layers(self) -> int:
        """The number of decoder layers."""
        count = self.integer("num_hidden_layers")
        if not 1 <= count <= MOST_LAYERS:
            self.refuse(f"num_hidden_layers is {count}; expected 1 to {MOST_LAYERS}")
        return count

    def leading_dense(self) -> tuple[int, ...]:
        """The layers before `first_k_dense_replace`."""
        first = self.integer("first_k_dense_replace", 0)
        if first < 0:
            self.refuse(f"first_k_dense_replace is {first}; expected 0 or more")
        return tuple(range(min(first, self.layers())))

    def number(self, key: str, default: Any = ...) -> Any:
        """A finite float; `default` (if given) where the key is absent or null."""
        value = self._typed(key, (int, float), default, "a number")
        if value is None:
            return None
        # JSON as Python reads it has NaN, Infinity, and integers beyond any float.
        if not abs(value) < 1e300:
            raise UsageError(f"config.json: {key} is {value!r}; expected a number")
        return float(value)

    def flag(self, key: str, default: Any = ...) -> Any:
        """A boolean; `default` (if given) where the key is absent or null."""
        return self._typed(key, bool, default, "true or false")

    def text(self, key: str, default: Any = ...) -> Any:
        """A string; `default` (if given) where the key is absent or null."""
        return self._typed(key, str, default, "a string")

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers; none where the key is absent or null."""
        value = self._typed(key, list, [], "a list of integers")
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
            self.refuse(f"{key} is {value!r}; expected a list of integers")
        return tuple(value)

    def windowed_layers(self) -> tuple[int, ...]:
        """The layers that `layer_types` gives a sliding window."""
        kinds = self._typed("layer_types", list, [], "a list of attention types")
        known = ("full_attention", "sliding_attention")
        layers = self.layers()
        if len(kinds) != layers or any(kind not in known for kind in kinds):
            self.refuse(
                f"layer_types is {_short(kinds)}; expected {layers} of {' or '.join(known)}"
            )
        return tuple(i for i, kind in enumerate(kinds) if kind == known[1])

    def must_be(self, key: str, allowed: tuple[Any, ...], why: str) -> None:
        """Refuses values of an optional key that the arithmetic here does not honour."""
        value = self.raw.get(key)
        if value is not None and value not in allowed:
            shown = " or ".join(repr(item) for item in allowed)
            raise UsageError(f"config.json: {key} is {value!r}; expected {shown} ({why})")

    def must_have(self, *keys: str) -> None:
        """Refuses a config without keys whose absence means something else than null."""
        for key in keys:
            if key not in self.raw:
                raise UsageError(f"config.json: the key {key} is missing; expected it, or null")

    def quantisation(self, *known: str) -> None:
        """Refuses a quantised checkpoint but for these methods: "fp8" in tiles of 128, "mxfp4"."""
        given = self.raw.get("quantization_config")
        if given is None:
            return
        if not isinstance(given, dict):
            self.refuse(f"quantization_config is {given!r}; expected an object")
        method = given.get("quant_method")
        if method not in known:
            self.refuse(
                f"quantization {method!r} is not read for this family; expected none or "
                f"{' or '.join(known)}"
            )
        if method == "fp8":
            wanted = {"fmt": "e4m3", "weight_block_size": [TILE, TILE]}
            for key, value in wanted.items():
                if given.get(key, value) != value:
                    self.refuse(f"quantization_config.{key} is {given[key]!r}; expected {value!r}")

    def refuse(self, problem: str) -> NoReturn:
        """Refuses the file for what several keys say together."""
        raise UsageError(f"config.json: {problem}")

    def eos_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids: an integer, a list, or none."""
        value = self.raw.get("eos_token_id")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        whole = all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
        if not whole or not all(0 <= i < 2**31 for i in ids):
            raise UsageError(
                f"config.json: eos_token_id is {_short(value)}; expected an id, or a list of them"
            )
        return tuple(ids)

    def rope(
        self,
        head_dim: int,
        *,
        interleaved: bool,
        partial: float | None = None,
        theta: float = 10000.0,
    ) -> RopeConfig:
        """Rotary settings: `rope_parameters` (new), or `rope_scaling` and `rope_theta` (old).

        `partial` is the share of a head that is rotated where the file does not say; with None,
        a file that says anything but all is refused. `theta` is the reference's default.
        """
        keys = ("rope_parameters", "rope_scaling")
        given = {key: self.raw[key] for key in keys if self.raw.get(key)}
        rest = (head_dim, interleaved, partial, theta)
        read = {key: self._rope(key, given[key], *rest) for key in given}
        if len(set(read.values())) > 1:
            raise UsageError(
                "config.json: rope_parameters and rope_scaling disagree; expected one of them"
            )
        first = next(iter(read.values()), None)
        return first or self._rope("rope", {}, *rest)

    def _rope(
        self,
        key: str,
        raw: Any,
        dim: int,
        interleaved: bool,
        partial: float | None,
        default_theta: float,
    ) -> RopeConfig:
        if not isinstance(raw, dict):
            raise UsageError(f"config.json: {key} is {raw!r}; expected an object")
        rope = RawConfig(raw)
        unknown = sorted(name for name in raw.keys() - ROPE_KEYS if raw[name] is not None)
        if unknown:
            self.refuse(f"{key} has the key {unknown[0]!r}, which is not computed here")
        if partial is None:
            for part in (self, rope):
                part.must_be("partial_rotary_factor", (1,), "every rotary dimension is rotated")
        else:
            share = self.number("partial_rotary_factor", partial)
            dim = int(dim * rope.number("partial_rotary_factor", share))
        theta = rope.number("rope_theta", None)
        theta = self.number("rope_theta", default_theta) if theta is None else theta
        kind = raw.get("rope_type") or raw.get("type") or "default"
        if kind == "default":
            return RopeConfig(dim=dim, theta=theta, interleaved=interleaved)
        if kind == "llama3":
            llama3 = Llama3Config(
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_context=rope.integer("original_max_position_embeddings"),
            )
            return RopeConfig(dim=dim, theta=theta, interleaved=interleaved, llama3=llama3)
        if kind != "yarn":
            self.refuse(f"rope type {kind!r} is unknown; expected default, yarn or llama3")
        # The reference's order: a length beside the settings wins over one in them.
        original = self.integer("original_max_position_embeddings", None)
        if original is None:
            original = rope.integer("original_max_position_embeddings", None)
        if original is None:
            original = self.integer("max_position_embeddings")
        yarn = YarnConfig(
            factor=rope.number("factor"),
            original_context=original,
            beta_fast=rope.number("beta_fast", 32.0) or 32.0,
            beta_slow=rope.number("beta_slow", 1.0) or 1.0,
            mscale=rope.number("mscale", 0.0),
            mscale_all_dim=rope.number("mscale_all_dim", 0.0),
            attention_factor=rope.number("attention_factor", None),
            truncate=rope.flag("truncate", True),
        )
        return RopeConfig(dim=dim, theta=theta, interleaved=interleaved, yarn=yarn)


def dimensions(c: RawConfig, *, norm_eps: float) -> dict[str, Any]:
    """The dimensions that every family names alike, as arguments of `ModelConfig`.

    `norm_eps` is the reference's default.
    """
    c.must_be("hidden_act", ("silu",), "feed-forward layers are SwiGLU")
    return dict(
        vocab_size=c.integer("vocab_size"),
        width=c.integer("hidden_size"),
        num_layers=c.layers(),
        dense_width=c.integer("intermediate_size"),
        context=c.integer("max_position_embeddings"),
        norm_eps=c.number("rms_norm_eps", norm_eps),
        tied=c.flag("tie_word_embeddings", False),
        eos_ids=c.eos_ids(),
    )


def gqa_config(
    c: RawConfig,
    *,
    head_dim: int | None = None,
    partial: float = 1.0,
    theta: float = 10000.0,
    **options: Any,
) -> GQAConfig:
    """Grouped-query attention with half-split rotation.

    Args:
      head_dim: the reference's default; None is width / heads.
      partial, theta: the reference's defaults for the share of a head that is rotated, and for the
        base of its frequencies.
      options: further fields of `GQAConfig`.
    """
    heads = c.integer("num_attention_heads")
    default = c.integer("hidden_size") // max(heads, 1) if head_dim is None else head_dim
    dim = c.integer("head_dim", default)
    return GQAConfig(
        heads=heads,
        kv_heads=c.integer("num_key_value_heads", heads),
        head_dim=dim,
        rope=c.rope(dim, interleaved=False, partial=partial, theta=theta),
        **options,
    )


def number_of_experts(c: RawConfig, *names: str) -> int:
    """The number of routed experts, under whichever of its names a file has; all must agree."""
    given = {name: c.integer(name) for name in names if c.raw.get(name) is not None}
    if len(set(given.values())) > 1:
        c.refuse(f"{' and '.join(given)} disagree: {given}; expected one number of experts")
    return next(iter(given.values())) if given else c.integer(names[0])

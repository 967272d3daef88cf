"""Typed reading of a checkpoint's `config.json`, shared by the families."""

from typing import Any

from dejax.config import RopeConfig, YarnConfig
from dejax.errors import UsageError


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
            raise UsageError(f"config.json: {key} is {value!r}; expected {expected}")
        return value

    def integer(self, key: str, default: Any = ...) -> Any:
        """An integer; `default` (if given) where the key is absent or null."""
        return self._typed(key, int, default, "an integer")

    def number(self, key: str, default: Any = ...) -> Any:
        """A float; `default` (if given) where the key is absent or null."""
        value = self._typed(key, (int, float), default, "a number")
        return float(value) if value is not None else None

    def flag(self, key: str, default: Any = ...) -> Any:
        """A boolean; `default` (if given) where the key is absent or null."""
        return self._typed(key, bool, default, "true or false")

    def text(self, key: str, default: Any = ...) -> Any:
        """A string; `default` (if given) where the key is absent or null."""
        return self._typed(key, str, default, "a string")

    def must_be(self, key: str, allowed: tuple[Any, ...], why: str) -> None:
        """Refuses values of an optional key that the arithmetic here does not honour."""
        value = self.raw.get(key)
        if value is not None and value not in allowed:
            shown = " or ".join(repr(item) for item in allowed)
            raise UsageError(f"config.json: {key} is {value!r}; expected {shown} ({why})")

    def eos_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids: an integer, a list, or none."""
        value = self.raw.get("eos_token_id")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise UsageError(
                f"config.json: eos_token_id is {value!r}; expected an integer or a list of them"
            )
        return tuple(ids)

    def rope(self, dim: int, *, interleaved: bool) -> RopeConfig:
        """Rotary settings, from `rope_parameters` (new) or `rope_scaling` and `rope_theta` (old)."""
        raw = self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {}
        if not isinstance(raw, dict):
            raise UsageError(f"config.json: the rope settings are {raw!r}; expected an object")
        rope = RawConfig(raw)
        theta = rope.number("rope_theta", None) or self.number("rope_theta", 10000.0)
        kind = raw.get("rope_type") or raw.get("type") or "default"
        if kind == "default":
            return RopeConfig(dim=dim, theta=theta, interleaved=interleaved)
        if kind != "yarn":
            raise UsageError(
                f"config.json: rope type {kind!r} is not supported; use default or yarn"
            )
        original = rope.integer("original_max_position_embeddings", None)
        yarn = YarnConfig(
            factor=rope.number("factor"),
            original_context=original or self.integer("max_position_embeddings"),
            beta_fast=rope.number("beta_fast", 32.0) or 32.0,
            beta_slow=rope.number("beta_slow", 1.0) or 1.0,
            mscale=rope.number("mscale", 0.0),
            mscale_all_dim=rope.number("mscale_all_dim", 0.0),
            attention_factor=rope.number("attention_factor", None),
            truncate=rope.flag("truncate", True),
        )
        return RopeConfig(dim=dim, theta=theta, interleaved=interleaved, yarn=yarn)

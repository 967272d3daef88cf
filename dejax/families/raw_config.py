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

    def must_lack(self, key: str, why: str) -> None:
        """Refuses an optional key that the arithmetic here does not honour, whatever its value."""
        if self.raw.get(key) is not None:
            raise UsageError(f"config.json: {key} is given; expected none ({why})")

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
        """Rotary settings: `rope_parameters` (new), or `rope_scaling` and `rope_theta` (old)."""
        keys = ("rope_parameters", "rope_scaling")
        given = {key: self.raw[key] for key in keys if self.raw.get(key)}
        read = {key: self._rope(key, given[key], dim, interleaved) for key in given}
        if len(set(read.values())) > 1:
            raise UsageError(
                "config.json: rope_parameters and rope_scaling disagree; expected one of them"
            )
        return next(iter(read.values()), None) or self._rope("rope", {}, dim, interleaved)

    def _rope(self, key: str, raw: Any, dim: int, interleaved: bool) -> RopeConfig:
        if not isinstance(raw, dict):
            raise UsageError(f"config.json: {key} is {raw!r}; expected an object")
        rope = RawConfig(raw)
        for part in (self, rope):
            part.must_be("partial_rotary_factor", (1,), "every rotary dimension is rotated")
        theta = rope.number("rope_theta", None)
        theta = self.number("rope_theta", 10000.0) if theta is None else theta
        kind = raw.get("rope_type") or raw.get("type") or "default"
        if kind == "default":
            return RopeConfig(dim=dim, theta=theta, interleaved=interleaved)
        if kind != "yarn":
            raise UsageError(f"config.json: rope type {kind!r} is unknown; use default or yarn")
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

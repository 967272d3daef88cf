"""`pytree`: chex's dataclass, a JAX pytree, that type checkers see as a plain dataclass."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as pytree
else:
    from chex import dataclass as pytree

__all__ = ["pytree"]

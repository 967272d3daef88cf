"""`pytree`: chex's frozen dataclass, which is a JAX pytree, seen by type checkers as a dataclass."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as pytree
else:
    from chex import dataclass as pytree

__all__ = ["pytree"]

"""Trees by name, as `--tree` takes them."""

import re

from dejax.errors import UsageError
from dejax.spec.tree import CHAIN, TreeConfig, full_tree

EXPECTED = (
    "chain, BxD (B children of every node, D deep, as 2x3), BxD:N (its N most confident nodes), "
    "best8 (2x3:8), eagle:N[,K,D] or static:PARENTS (as static:0,0,1)"
)
EAGLE_WIDTH, EAGLE_DEPTH = 4, 6
_MOST = 10**4  # before anything is built
_INT = r"[0-9]{1,9}"


def parse_tree(text: str) -> TreeConfig:
    """The tree that a word names.

    Raises:
      UsageError: it names none.
    """
    if text == "chain":
        return CHAIN
    if text == "best8":
        return best_of(2, 3, 8)
    if match := re.fullmatch(rf"({_INT})x({_INT})(?::({_INT}))?", text):
        branching, depth, keep = (None if part is None else int(part) for part in match.groups())
        assert branching is not None and depth is not None
        _check(text, branching, depth, 1 if keep is None else keep)
        if branching**depth > _MOST:
            raise UsageError(f"{text!r} has more than {_MOST} nodes")
        if keep is None:
            return TreeConfig(shape=full_tree(branching, depth))
        return best_of(branching, depth, keep)
    if match := re.fullmatch(rf"eagle:({_INT})(?:,({_INT}),({_INT}))?", text):
        keep = int(match[1])
        width, depth = int(match[2] or EAGLE_WIDTH), int(match[3] or EAGLE_DEPTH)
        _check(text, width, depth, keep)
        return TreeConfig(branching=width, depth=depth, expand=width, keep=keep)
    if re.fullmatch(rf"static:{_INT}(,{_INT})*", text):
        return TreeConfig(shape=tuple(map(int, text.removeprefix("static:").split(","))))
    raise UsageError(f"{text[:80]!r} is no tree; expected {EXPECTED}")


def best_of(branching: int, depth: int, keep: int) -> TreeConfig:
    """All of a full tree is drafted; its most confident nodes are verified."""
    return TreeConfig(branching=branching, depth=depth, keep=keep)


def show_tree(tree: TreeConfig) -> str:
    """The word that names a tree."""
    if tree.is_chain:
        return "chain"
    if tree.shape is not None:
        return "static:" + ",".join(map(str, tree.shape))
    if tree.expand is None:
        return f"{tree.branching}x{tree.depth}:{tree.keep}"
    return f"eagle:{tree.keep},{tree.branching},{tree.depth}"


def _check(text: str, branching: int, depth: int, keep: int) -> None:
    if min(branching, depth, keep) < 1 or max(branching, depth, keep) > _MOST:
        raise UsageError(f"{text!r}: expected numbers from 1 to {_MOST}")

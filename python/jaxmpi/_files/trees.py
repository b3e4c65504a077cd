"""Trees in files: the names of leaves, the structure that is kept, and trees of grids that are prefixes of others."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxmpi._files import metadata
from jaxmpi._grid.grid import Grid
from jaxmpi._unstructured.index_map import IndexMap

Division = Grid | IndexMap | None
"""How an array is divided among the ranks: into blocks, into rows, or not at all."""

_WHOLE = "data"
"""The name of a tree that is one leaf."""


def leaves(tree: Any, operation: str) -> tuple[list[str], list[Any]]:
    """The names of leaves and the leaves. Raises ValueError for two leaves of one name, or names that no file has."""
    try:
        listed, _ = jax.tree_util.tree_flatten_with_path(tree)
    except ValueError as error:
        raise ValueError(f"{operation}: the tree is not one of JAX's: {error}") from error
    names: list[str] = []
    known: dict[str, str] = {}
    for path, _ in listed:
        name = name_of(path)
        shown = f"tree{jax.tree_util.keystr(path)}"
        if name in known:
            raise ValueError(
                f"{operation}: {known[name]} and {shown} would both be called {name!r} in the file. Rename one of them."
            )
        check_name(name, shown, operation)
        known[name] = shown
        names.append(name)
    return names, [leaf for _, leaf in listed]


def name_of(path: Sequence[Any]) -> str:
    """The name of the leaf at a path: its keys joined by dots."""
    keys = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
    return plain(".".join(keys)) if keys else _WHOLE


def plain(name: str) -> str:
    """A name without what divides folders, for zarr on any system."""
    return name.replace("/", ".").replace("\\", ".")


def check_name(name: str, shown: str, operation: str) -> None:
    bare = not name.strip(".") or name.startswith(("__", ".zarr.json")) or name == "zarr.json" or "\0" in name
    if bare or not 0 < len(name.encode(errors="ignore")) <= 240 or any("\ud800" <= char <= "\udfff" for char in name):
        raise ValueError(
            f"{operation}: {shown} would be called {name[:60]!r} in the file, which is no name for an array. Rename it."
        )


def skeleton(tree: Any) -> Any:
    """The structure of a tree as JSON holds it: names of leaves in dicts, lists, tuples, None and nodes."""
    return _skeleton(tree, ())


def _skeleton(tree: Any, path: tuple[Any, ...]) -> Any:
    if tree is None:
        return None
    if jax.tree_util.all_leaves([tree]):
        return name_of(path)
    children, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    parts = [_skeleton(child, (*path, *key)) for key, child in children]
    if type(tree) is dict and all(type(key) in (str, int) for key in tree):
        return {"dict": [[key[0].key, part] for (key, _), part in zip(children, parts, strict=True)]}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: parts}
    return {"node": f"{type(tree).__module__}.{type(tree).__qualname__}", "children": parts}


def build(its: Any, leaf: Callable[[str], Any]) -> Any:
    """A tree of this structure, with `leaf(name)` for each leaf."""
    if its is None or isinstance(its, str):
        return None if its is None else leaf(its)
    if "dict" in its:
        return {key: build(part, leaf) for key, part in its["dict"]}
    if "list" in its:
        return [build(part, leaf) for part in its["list"]]
    if "tuple" in its:
        return tuple(build(part, leaf) for part in its["tuple"])
    if not isinstance(node := its["node"], str):
        raise ValueError(f"a node is {node!r:.60}")
    what = "dict whose keys are no texts or integers" if node == "builtins.dict" else node
    raise metadata.Refusal(
        f"has a {what} in its tree, which cannot be made from a file alone. Pass like=, a tree of the same structure "
        "with arrays or jax.ShapeDtypeStruct as leaves."
    )


def is_division(x: Any) -> bool:
    return x is None or isinstance(x, Grid | IndexMap)


def spread(divisions: Any, tree: Any, operation: str) -> list[Division]:
    """The division of each leaf, from a tree of divisions that is a prefix of the tree."""
    for part in jax.tree.leaves(divisions, is_leaf=is_division):
        if not is_division(part):
            raise TypeError(
                f"{operation}: grid is {part!r:.80} of {type(part).__name__}: pass a jaxmpi.Grid, a jaxmpi.IndexMap, "
                "None for what is the same on all ranks, or a tree of these that is a prefix of the tree, such as "
                '{"state": grid, "step": None}.'
            )
    found: list[Division] = []

    def note(division: Division, part: Any) -> None:
        found.extend([division] * len(jax.tree.leaves(part)))

    try:
        jax.tree.map(note, divisions, tree, is_leaf=is_division)
    except ValueError as error:
        raise ValueError(
            f"{operation}: grid has not the structure of the tree: pass one for all of it, or a tree that is a prefix, "
            f'such as {{"state": grid, "step": None}}: {error}'
        ) from error
    return found


def spread_width(width: Any, tree: Any, operation: str) -> list[Any]:
    """The width of each leaf's halo, from one for all, or from a dict of widths by keys; what is not in it has none."""
    if not isinstance(width, Mapping):
        return [width] * len(jax.tree.leaves(tree))
    children, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    names = [name_of(path) for path, _ in children]
    if absent := [name for name in map(str, width) if name not in names]:
        raise ValueError(
            f"{operation}: width has {absent[0]!r}, and the tree has {', '.join(names) or 'nothing'} there: pass one "
            'width for all fields, or a dict with those of some keys, such as {"state": 1}.'
        )
    given = {str(name): its for name, its in width.items()}
    return [
        its
        for name, (_, child) in zip(names, children, strict=True)
        for its in spread_width(given.get(name, 0), child, operation)
    ]

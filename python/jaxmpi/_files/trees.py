"""Trees in files: the names of leaves, the structure in the file, and trees of grids that are prefixes of others."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxmpi._files import metadata
from jaxmpi._grid.grid import Grid
from jaxmpi._unstructured.index_map import IndexMap

Division = Grid | IndexMap | None
"""The division of an array among the ranks: into blocks, into rows, or none."""


def leaves(tree: Any, operation: str) -> tuple[list[str], list[Any]]:
    """Return the names of leaves and the leaves. Raise ValueError if two have one name, or a name is not possible."""
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
    """Return the name of the leaf at a path: the keys joined by dots, or "data" if the tree is a single leaf."""
    keys = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
    return plain(".".join(keys)) if keys else "data"


def plain(name: str) -> str:
    """Return a name without separators of folders, for zarr on any system."""
    return name.replace("/", ".").replace("\\", ".")


def check_name(name: str, shown: str, operation: str) -> None:
    bare = not name.strip(".") or name.startswith(("__", ".zarr.json")) or name == "zarr.json" or "\0" in name
    if bare or not 0 < len(name.encode(errors="ignore")) <= 240 or any("\ud800" <= char <= "\udfff" for char in name):
        raise ValueError(
            f"{operation}: {shown} would be called {name[:60]!r} in the file, which is no name for an array. Rename it."
        )


def skeleton(tree: Any, path: tuple[Any, ...] = ()) -> Any:
    """Return the structure of a tree at a path as JSON holds it: names of leaves in dicts, lists, tuples, None and
    nodes."""
    if tree is None:
        return None
    if jax.tree_util.all_leaves([tree]):
        return name_of(path)
    children, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    parts = [skeleton(child, (*path, *key)) for key, child in children]
    if type(tree) is dict and all(type(key) in (str, int) for key in tree):
        return {"dict": [[key[0].key, part] for (key, _), part in zip(children, parts, strict=True)]}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: parts}
    return {"node": f"{type(tree).__module__}.{type(tree).__qualname__}", "children": parts}


def build(structure: Any, leaf: Callable[[str], Any]) -> Any:
    """Build a tree of this structure, with `leaf(name)` for each leaf."""
    if structure is None or isinstance(structure, str):
        return None if structure is None else leaf(structure)
    if "dict" in structure:
        return {key: build(part, leaf) for key, part in structure["dict"]}
    if "list" in structure:
        return [build(part, leaf) for part in structure["list"]]
    if "tuple" in structure:
        return tuple(build(part, leaf) for part in structure["tuple"])
    if not isinstance(node := structure["node"], str):
        raise ValueError(f"a node is {node!r:.60}")
    what = "dict whose keys are no texts or integers" if node == "builtins.dict" else node
    raise metadata.Refusal(
        f"has a {what} in its tree, which cannot be made from a file alone. Pass like=, a tree of the same structure "
        "with arrays or jax.ShapeDtypeStruct as leaves."
    )


def is_division(x: Any) -> bool:
    return x is None or isinstance(x, Grid | IndexMap)


def spread(divisions: Any, tree: Any, operation: str) -> list[Division]:
    """Return the division of each leaf, from a tree of divisions that is a prefix of the tree."""
    for part in jax.tree.leaves(divisions, is_leaf=is_division):
        if not is_division(part):
            raise TypeError(
                f"{operation}: grid is {part!r:.80} of {type(part).__name__}: pass a jaxmpi.Grid, a jaxmpi.IndexMap, "
                "None for what is the same on all ranks, or a tree of these that is a prefix of the tree, such as "
                '{"state": grid, "step": None}.'
            )
    by_leaf: list[Division] = []

    def note(division: Division, part: Any) -> None:
        by_leaf.extend([division] * len(jax.tree.leaves(part)))

    try:
        jax.tree.map(note, divisions, tree, is_leaf=is_division)
    except ValueError as error:
        raise ValueError(
            f"{operation}: grid does not have the structure of the tree: pass one for all of it, or a tree that is a "
            f'prefix, such as {{"state": grid, "step": None}}: {error}'
        ) from error
    return by_leaf


def spread_width(width: Any, tree: Any, operation: str) -> list[Any]:
    """Return the width of each leaf's halo. `width`: one for all, or a dict by keys; other keys have no halo."""
    if not isinstance(width, Mapping):
        return [width] * len(jax.tree.leaves(tree))
    children, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    names = [name_of(path) for path, _ in children]
    if absent := [name for name in map(str, width) if name not in names]:
        raise ValueError(
            f"{operation}: width has {absent[0]!r}, and the tree has {', '.join(names) or 'nothing'} there: pass one "
            'width for all fields, or a dict with widths for some keys, such as {"state": 1}.'
        )
    by_key = {str(name): entry for name, entry in width.items()}
    return [
        entry
        for name, (_, child) in zip(names, children, strict=True)
        for entry in spread_width(by_key.get(name, 0), child, operation)
    ]

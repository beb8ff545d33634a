"""Count public functions and classes without a docstring, and those that raise without saying so.

    python -m lab.docstrings
    python -m lab.docstrings jaxserve/engine --names

Public is what has no leading underscore on the way to it, outside tests. A method counts as
documented where a class of the same part documents one of that name: the protocol or base that it
implements. Types of bodies in JSON (`Struct`s) and of C are named by their fields and left out. A
function raises if its own body has a `raise` with an exception; private helpers are not followed.
It says so with "Raises", or by the name of the exception in its docstring.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PARTS = ("jaxserve", "kernels/jaxserve_kernels", "checkpoints/jaxserve_checkpoints")
AsDef = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Found(NamedTuple):
    place: str
    method: str | None
    documented: bool
    silent: tuple[str, ...]
    """Exceptions that it raises, and that its docstring does not name."""


def structs(trees: Iterable[ast.Module]) -> set[str]:
    """The names of `Struct`, of ctypes' `Structure`, and of all classes under them."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"Struct", "Structure"}  # of msgspec, and of ctypes
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found


def public(body: list[ast.stmt], file: Path, bodies: set[str], owner: str = "") -> Iterator[Found]:
    """Functions and classes, and methods of public classes.

    Args:
      bodies: the names of classes that are left out.
    """
    for node in body:
        if not isinstance(node, AsDef) or node.name.startswith("_"):
            continue
        if isinstance(node, ast.ClassDef) and node.name in bodies:
            continue
        decorators = {ast.unparse(each) for each in node.decorator_list}
        if decorators & {"override", "overload"}:
            continue
        text = ast.get_docstring(node) or ""
        raised = () if isinstance(node, ast.ClassDef) else _raised(node)
        said = "Raises" in text
        silent = () if said else tuple(name for name in raised if name not in text)
        place = f"{file.relative_to(ROOT)}:{node.lineno} {owner}{node.name}"
        yield Found(place, node.name if owner else None, bool(text), silent)
        if isinstance(node, ast.ClassDef):
            yield from public(node.body, file, bodies, f"{node.name}.")


def _raised(function: ast.AST) -> tuple[str, ...]:
    names = (
        ast.unparse(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
        for node in ast.walk(function)
        if isinstance(node, ast.Raise) and node.exc is not None
    )
    return tuple(dict.fromkeys(name for name in names if name[:1].isupper()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=PARTS, help="folders")
    parser.add_argument("--names", action="store_true", help="list what is missing")
    args = parser.parse_args()
    for part in args.parts:
        files = sorted((ROOT / part).rglob("*.py"))
        trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}
        bodies = structs(trees.values())
        found = [each for file, tree in trees.items() for each in public(tree.body, file, bodies)]
        told = {each.method for each in found if each.documented and each.method}
        bare = [each for each in found if not each.documented and each.method not in told]
        silent = [each for each in found if each.silent]
        share = 1 - len(bare) / max(1, len(found))
        print(f"{part}: {len(found)} public, {share:.0%} documented, {len(silent)} raise silently")
        if args.names:
            for each in (*bare, *silent):
                what = "raises " + ", ".join(each.silent) if each.silent else "no docstring"
                print(f"  {each.place}: {what}")


if __name__ == "__main__":
    main()

"""Imports go down only, and what must start fast or run anywhere does not know jax."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
SOURCES = {
    "jaxserve": ROOT,
    "jaxserve_checkpoints": ROOT / "checkpoints",
    "jaxserve_kernels": ROOT / "kernels",
}

LAYERS = (
    ("jaxserve_kernels",),
    ("jaxserve_checkpoints",),
    (
        "jaxserve.api",
        "jaxserve.config",
        "jaxserve.grammar_server",
        "jaxserve.host_memory",
        "jaxserve.kv_events",
        "jaxserve.layer_spec",
        "jaxserve.logs",
        "jaxserve.metrics",
        "jaxserve.model_spec",
        "jaxserve.plan",
        "jaxserve.setting_files",
        "jaxserve.speculation_config",
        "jaxserve.step_times",
        "jaxserve.tokenizer",
        "jaxserve.views",
    ),
    (
        "jaxserve.cli",
        "jaxserve.models",
        "jaxserve.offload",
        "jaxserve.programs",
        "jaxserve.structured",
    ),
    ("jaxserve.bench", "jaxserve.runner", "jaxserve.scheduler", "jaxserve.weights"),
    ("jaxserve.engine", "jaxserve.flax", "jaxserve.server"),
    ("jaxserve.startup",),
    (
        "jaxserve.__main__",
        "jaxserve.commands",
        "jaxserve.dynamo",
        "jaxserve.library",
        "jaxserve.ray",
    ),
)
"""From the bottom up. A part may import from its own layer and those below it."""

STRANGERS = (
    {"jaxserve.server", "jaxserve.engine"},
    {"jaxserve.server", "jaxserve.scheduler"},
    {"jaxserve.scheduler", "jaxserve.runner"},
)
"""They know each other's contract (`api`, `plan`), not each other."""

WITHOUT = {
    "jaxserve.bench": {"jax", "jaxlib"},
    "jaxserve.grammar_server": {"jax", "jaxlib", "numpy"},
    "jaxserve.models.registry": {"jax", "jaxlib"},
    "jaxserve.offload": {"jax", "jaxlib", "numpy"},
    "jaxserve.ray": {"jax", "jaxlib"},
    "jaxserve.server": {"jax", "jaxlib", "llguidance"},
    "jaxserve.engine": {"llguidance"},
    "jaxserve.scheduler": {"jax", "jaxlib", "numpy", "zmq"},
}
"""What a part must not import, directly or through others."""

LAYER_OF = {part: number for number, parts in enumerate(LAYERS) for part in parts}

Imports = dict[str, set[str]]
"""Module -> the modules it imports; of ours, the module itself and not a name in it."""


@functools.cache
def read_imports() -> Imports:
    files: dict[str, Path] = {}
    for package, root in SOURCES.items():
        for path in sorted((root / package).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            files[name.removesuffix(".__init__")] = path
    return {
        module: {
            _module_in(name, files)
            for name in imported_names(path.read_text(), _package(module, path))
        }
        for module, path in files.items()
    }


def _package(module: str, path: Path) -> str:
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def imported_names(source: str, package: str) -> Iterator[str]:
    """Absolute names of all that is imported anywhere, in functions and for types too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join([*parts, node.module] if node.module else parts)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _module_in(name: str, modules: Container[str]) -> str:
    """`a.b.C` is module `a.b` if we have that; other packages' names stay as they are."""
    shorter = name
    while shorter and shorter not in modules:
        shorter = shorter.rpartition(".")[0]
    return shorter or name


def part_of(module: str) -> str | None:
    """The entry of LAYERS that a module belongs to; None if it is in no layer."""
    parts = (part for part in LAYER_OF if module == part or module.startswith(part + "."))
    return next(parts, None)


def violations(imports: Imports) -> list[str]:
    found: list[str] = []
    for module, names in imports.items():
        if module == "jaxserve":
            found += [f"jaxserve/__init__.py imports {name}" for name in names if _ours(name)]
            continue
        part = part_of(module)
        if part is None:
            found.append(f"{module} is in no layer: put it into LAYERS")
            continue
        for name in sorted(filter(_ours, names)):
            other = part_of(name)
            if other is None or other == part:
                continue  # the bare package, or reported as the module it is
            if LAYER_OF[other] > LAYER_OF[part]:
                found.append(f"{module} imports upwards: {name}")
            if {part, other} in STRANGERS:
                found.append(f"{module} must not know {name}")
    return found


def _ours(name: str) -> bool:
    return name.split(".")[0] in SOURCES


def reachable(imports: Imports, part: str) -> dict[str, str]:
    """Everything that a part imports, directly or through others -> a module that imports it."""
    found: dict[str, str] = {}
    todo = [module for module in imports if part in (module, part_of(module))]
    seen = set(todo)
    while todo:
        module = todo.pop()
        for name in imports[module]:
            found.setdefault(name, module)
            if name in imports and name not in seen:
                seen.add(name)
                todo.append(name)
    return found


def test_the_table_of_the_architecture_is_this_one() -> None:
    rows = re.findall(r"^\| (\d) \| (.*?) \|", ARCHITECTURE.read_text(), re.M)
    shown = {int(number): set(re.findall(r"`(\w+)`", parts)) for number, parts in rows}
    held = {n: {part.removeprefix("jaxserve.") for part in parts} for n, parts in enumerate(LAYERS)}
    assert shown == held


def test_only_the_registry_knows_families() -> None:
    """To everything else a model is a ModelSpec and the rules of its tensors."""
    families = "jaxserve.models.families."
    knowing = {
        module
        for module, names in read_imports().items()
        if not module.startswith(families) and any(name.startswith(families) for name in names)
    }
    assert knowing == {"jaxserve.models.registry"}


def test_imports_go_down_only() -> None:
    assert not violations(read_imports())


def test_the_packages_know_neither_lab_nor_scripts_nor_tests() -> None:
    outside = {"lab", "scripts", "tests"}
    found = {
        f"{module} imports {name}"
        for module, names in read_imports().items()
        for name in names
        if name.split(".")[0] in outside
    }
    assert not found


@pytest.mark.parametrize("part", WITHOUT)
def test_no_import_of_what_a_part_must_do_without(part: str) -> None:
    found = reachable(read_imports(), part)
    bad = {name: by for name, by in found.items() if name.split(".")[0] in WITHOUT[part]}
    assert not bad, "imported name: by which module"


@pytest.mark.parametrize("part", WITHOUT)
def test_importing_a_part_loads_nothing_it_must_do_without(part: str) -> None:
    code = f"import sys, {part}; print(*({WITHOUT[part]!r} & sys.modules.keys()))"
    path = os.pathsep.join(str(root) for root in SOURCES.values())
    environment = {**os.environ, "PYTHONPATH": path}
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
    assert not loaded.split()


def test_the_key_of_programs_covers_the_sources_that_they_depend_on_and_no_others() -> None:
    """Of the kernels it covers all."""
    from jaxserve.runner.fingerprint import program_sources

    imports = read_imports()
    found = {name for name in imports if part_of(name) == "jaxserve.runner"}
    found |= reachable(imports, "jaxserve.runner").keys()
    files = (name.removesuffix(".py").removesuffix("/__init__") for name, _ in program_sources())
    covered = {name.replace("/", ".") for name in files if name.startswith("jaxserve/")}
    packages = {name.rpartition(".")[0] for name in covered}
    assert covered - packages == {name for name in found if name.startswith("jaxserve.")} - packages


def test_the_check_finds_each_kind_of_violation() -> None:
    assert violations({"jaxserve.plan": {"jaxserve.runner.step"}}) == [
        "jaxserve.plan imports upwards: jaxserve.runner.step"
    ]
    assert violations({"jaxserve.scheduler.pages": {"jaxserve.runner.batch"}}) == [
        "jaxserve.scheduler.pages must not know jaxserve.runner.batch"
    ]
    assert violations({"jaxserve_kernels.int4": {"jaxserve_checkpoints.reader"}}) == [
        "jaxserve_kernels.int4 imports upwards: jaxserve_checkpoints.reader"
    ]
    assert violations({"jaxserve.surprise": set()}) == [
        "jaxserve.surprise is in no layer: put it into LAYERS"
    ]
    assert not violations({"jaxserve.engine": {"jaxserve.scheduler", "jaxserve.plan", "jax"}})


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from jaxserve import runner", ["jaxserve.runner"]),
        ("from . import pages", ["jaxserve.scheduler.pages"]),
        ("from .pages import PagePool", ["jaxserve.scheduler.pages.PagePool"]),
        ("from .. import runner", ["jaxserve.runner"]),
        ("from ..runner import Runner", ["jaxserve.runner.Runner"]),
        ("def f():\n    import jax.numpy as jnp", ["jax.numpy"]),
    ],
)
def test_every_form_of_import_is_read(source: str, names: list[str]) -> None:
    assert list(imported_names(source, "jaxserve.scheduler")) == names

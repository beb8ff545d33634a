"""`jaxserve convert`: converts a checkpoint to another format, and quantises it if asked."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxserve.cli.options import Options
from jaxserve.commands.progress import Work
from jaxserve.config import ConfigError
from jaxserve.startup.environment import prepare
from jaxserve.weights.model_source import find_model
from jaxserve.weights.text_files import copy_text_files
from jaxserve_checkpoints.native import FILE
from jaxserve_checkpoints.reader import SINGLE_FILE, CheckpointError


def convert(options: Options) -> int:
    """Writes the converted checkpoint. Returns the exit status. Errors are one line on stderr."""
    prepare(options.gpu_memory_utilization)
    try:
        _convert(options)
    except (ConfigError, CheckpointError, OSError) as error:
        print(f"jaxserve: error: {error}", file=sys.stderr)
        return 1
    return 0


def _convert(options: Options) -> None:
    from jaxserve.weights.conversion import (
        convert_model,  # imports jax, which reads the settings of `prepare`
    )

    assert options.out is not None
    started = time.monotonic()
    source = find_model(options)
    assert source.folder is not None
    out, folder = options.out, source.folder
    work = Work("converting")
    errors = _Errors(work.console)

    def show(done: int, total: int) -> None:
        work.update(done, total, f"{_size(done)} of {_size(total)}")

    with ExitStack() as shown:

        def begin() -> None:
            _copy_text_files(folder, out, SINGLE_FILE if options.to == "safetensors" else FILE)
            if options.hf_config is not None and options.hf_config.is_file():
                shutil.copyfile(options.hf_config, out / "config.json")
            shown.enter_context(work)

        file = convert_model(options, source, out, show, errors.add, begin)
    errors.show(options.quantization_method or "rtn")
    files = [file] if file.is_file() else [each for each in file.rglob("*") if each.is_file()]
    size = _size(sum(each.stat().st_size for each in files))
    print(f"{size} in {file} after {time.monotonic() - started:.0f} s{_checked(options)}")


def _checked(options: Options) -> str:
    return "" if options.to == "orbax" else ", every checksum compared"


def _size(count: int) -> str:
    """Formats bytes for people."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


class _Errors:
    """Errors of quantised matrices: prints a line for each layer, and a table at the end."""

    def __init__(self, console: Console):
        self._console = console
        self._found: dict[str, dict[str, float]] = {}
        """Relative error by matrix, then by layer."""

    def add(self, path: str, error: Any) -> None:
        place, _, matrix = path.rpartition(".")
        self._found.setdefault(matrix, {})[place] = float(error)
        if matrix == "down" or not place:
            here = {name: found[place] for name, found in self._found.items() if place in found}
            text = ", ".join(f"{name} {each:.2%}" for name, each in here.items())
            self._console.print(f"{place or 'model'}: relative error of {text}", highlight=False)

    def show(self, method: str) -> None:
        if not self._found:
            return
        table = Table("matrix", "of its", "mean", "largest", "in", title="relative errors")
        for matrix, layers in self._found.items():
            worst = max(layers, key=layers.__getitem__)
            mean = sum(layers.values()) / len(layers)
            of = "product" if method == "awq" and worst else "weight"
            table.add_row(matrix, of, f"{mean:.2%}", f"{layers[worst]:.2%}", worst or "the model")
        self._console.print(table)


def _copy_text_files(source: Path, target: Path, written: str) -> None:
    """Copies the other files of a model beside its weights, which go to the file `written`."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        if target.samefile(source):
            raise ConfigError(f"--out {target} is the model's own folder: choose another")
        others = sorted(file.name for file in target.glob("*.safetensors") if file.name != written)
        if others:
            raise ConfigError(
                f"--out {target} holds a model's weights ({others[0]}), whose config.json would be "
                "replaced: choose another folder"
            )
        copy_text_files(source, target)
    except OSError as error:
        if error.filename and Path(error.filename).parent == source:
            raise ConfigError(f"{error.filename}: cannot be read: {error.strerror}") from None
        raise ConfigError(f"--out {target}: cannot be written: {error.strerror}") from None

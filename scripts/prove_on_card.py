"""Measures all claims about a GPU again, with one command.

    python scripts/prove_on_card.py --list
    python scripts/prove_on_card.py --out results                     # all of it
    python scripts/prove_on_card.py decode serving --out results      # some of it
    python scripts/prove_on_card.py --out results --gpus 0,1,2,3      # a card for each at a time

A proof is one or more commands of this repository. A command runs even if an earlier one failed.
Each proof has a folder under --out with its log and the JSON files that docs/measurements keeps.
Proofs that passed are not run again, so an interrupted run continues; --again repeats them. A
command fails if it needs packages that are not installed, and names them; the other commands run.

With several cards, proofs share the host's processors. Times of the host, above all TTFT, are
reliable only with one proof at a time. The exit status is the number of failed proofs.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.proofs import NEEDS, PROOFS, Proof
from scripts.working_tree import commit


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("proofs", nargs="*", metavar="PROOF", help="default: all; see --list")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--gpus", default="0", help="numbers of the cards to use: 0,1")
    parser.add_argument("--budget", type=float, help="begin no proof after this many minutes")
    parser.add_argument("--again", action="store_true", help="repeat proofs that have passed")
    parser.add_argument("--list", action="store_true", help="list the proofs")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run none")
    options = parser.parse_args()
    if unknown := set(options.proofs) - set(PROOFS):
        parser.error(
            f"no proof is called {', '.join(sorted(unknown))}; there are {', '.join(PROOFS)}"
        )
    if options.list:
        for name, proof in PROOFS.items():
            missing = _missing(proof.commands)
            lacks = f" (not installed: {', '.join(missing)})" if missing else ""
            print(f"{name:16} {proof.minutes:4.0f} min  {proof.shows}{lacks}")
        return 0
    if options.dry_run:
        show_commands(options.proofs or list(PROOFS), options.out)
        return 0
    return prove(options)


def show_commands(names: list[str], out: Path) -> None:
    """Prints the commands, one per line."""
    for name in names:
        places = _places(name, out, "8100")
        server = PROOFS[name].server
        flags = () if server is None else (f"-m jaxserve --port {{port}} {server}",)
        for command in (*flags, *PROOFS[name].commands):
            print(shlex.join(["python", *_words(command, places)[1:]]))


def prove(options: argparse.Namespace) -> int:
    options.out.mkdir(parents=True, exist_ok=True)
    gpus = options.gpus.split(",")
    _describe(options.out / "card.json", gpus[0])
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    names = options.proofs or list(PROOFS)
    for name in names:
        if options.again or not _passed(options.out / name):
            waiting.put(name)
    begun, failed = time.monotonic(), list[str]()

    def work(gpu: str, port: int) -> None:
        while True:
            late = options.budget is not None and time.monotonic() - begun > options.budget * 60
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                return
            if late:
                print(f"{name}: not begun, {options.budget:g} minutes are over", flush=True)
                failed.append(name)
            elif not _run(name, options.out, gpu, port):
                failed.append(name)

    threads = [
        threading.Thread(target=work, args=(gpu, 8100 + number)) for number, gpu in enumerate(gpus)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:  # the running command was interrupted, too
        while not waiting.empty():
            failed.append(waiting.get_nowait())
        for thread in threads:
            thread.join()
    passed = [name for name in names if name not in failed]
    print(
        f"{len(passed)} of {len(names)} passed" + (f"; not: {', '.join(failed)}" if failed else "")
    )
    return len(failed)


def _passed(folder: Path) -> bool:
    return (folder / "passed").exists()


def _describe(path: Path, gpu: str) -> None:
    """Writes the card and the versions, for readers of the results."""
    asked = ["nvidia-smi", "-i", gpu, "--query-gpu=name,driver_version,memory.total"]
    try:
        lines = subprocess.check_output([*asked, "--format=csv,noheader"], text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"nvidia-smi found no card: {error}")
    name, driver, memory = (part.strip() for part in lines.splitlines()[0].split(","))
    versions: dict[str, str] = {}
    for package in ("jax", "jaxlib", "triton", "jax-triton"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    path.write_text(
        json.dumps(
            {"card": name, "driver": driver, "memory": memory, "commit": commit(), **versions},
            indent=1,
        )
        + "\n"
    )
    print(
        f"{name}, driver {driver}, jax {versions['jax']}, triton {versions['triton']}", flush=True
    )


def _run(name: str, out: Path, gpu: str, port: int) -> bool:
    proof, folder = PROOFS[name], out / name
    folder.mkdir(exist_ok=True)
    places = _places(name, out, str(port))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "PYTHONUNBUFFERED": "1"}
    begun = time.monotonic()
    if missing := _missing(proof.commands):
        print(f"{name}: FAILS without {', '.join(missing)}: pip install them", flush=True)
        if all(_missing((command,)) for command in proof.commands):
            return False
    print(f"{name}: {proof.shows}; about {proof.minutes:g} min on GPU {gpu}", flush=True)
    with (folder / "log").open("w") as log:
        passed = _commands(proof, places, environment, log)
    seconds = time.monotonic() - begun
    if passed:
        (folder / "passed").touch()
    print(
        f"{name}: {'passed' if passed else 'FAILED'} after {seconds:.0f} s, see {folder / 'log'}",
        flush=True,
    )
    return passed


def _places(name: str, out: Path, port: str) -> dict[str, object]:
    """The values of `{…}` in commands."""
    return {
        "out": (out / name).resolve(),
        "cache": (out / "programs").resolve(),
        "url": f"http://127.0.0.1:{port}",
        "port": port,
        "python": sys.executable,
    }


def _missing(commands: tuple[str, ...]) -> list[str]:
    """The packages that the commands need and that are not installed."""
    needed = [
        package
        for words, packages in NEEDS.items()
        if any(words in command for command in commands)
        for package in packages
    ]
    return [package for package in dict.fromkeys(needed) if not _installed(package)]


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _commands(
    proof: Proof, places: dict[str, object], environment: dict[str, str], log: IO[str]
) -> bool:
    server = None
    try:
        if proof.server is not None:
            flags = f"-m jaxserve --port {{port}} {proof.server}"
            server = subprocess.Popen(
                _words(flags, places), cwd=ROOT, env=environment, stdout=log, stderr=log
            )
            if not _ready(f"{places['url']}/ready", server):
                return False
        passed = [_command(command, proof, places, environment, log) for command in proof.commands]
        return all(passed)
    finally:
        if server is not None:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()


def _command(
    command: str,
    proof: Proof,
    places: dict[str, object],
    environment: dict[str, str],
    log: IO[str],
) -> bool:
    """Runs a command. Returns whether it passed, and writes that to the log."""
    log.write(f"\n$ python {command.format(**places)}\n")
    if missing := _missing((command,)):
        log.write(f"not run; not installed: {', '.join(missing)}\n")
        return False
    log.flush()
    begun = time.monotonic()
    try:
        done = subprocess.run(
            _words(command, places),
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
            timeout=proof.minutes * 300,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        log.write(f"\n{late}\n")
        return False
    seconds = time.monotonic() - begun
    log.write(f"\nexit status {done.returncode} after {seconds:.0f} s\n")
    return done.returncode == 0


def _words(command: str, places: dict[str, object]) -> list[str]:
    return [sys.executable, *shlex.split(command.format(**places))]


def _ready(url: str, server: subprocess.Popen[bytes], seconds: float = 600.0) -> bool:
    """Waits for the server, whose first start compiles. Returns whether it became ready."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    return False


if __name__ == "__main__":
    sys.exit(main())

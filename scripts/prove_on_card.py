"""Everything that is claimed of a GPU, measured again with one command.

    python scripts/prove_on_card.py --list
    python scripts/prove_on_card.py --out results                     # all of it
    python scripts/prove_on_card.py decode serving --out results      # some of it
    python scripts/prove_on_card.py --out results --gpus 0,1,2,3      # a card for each at a time

A proof is one or more commands of this repository, each of which runs whatever those before it
did; it has a folder under --out with its log and the JSON files that docs/measurements keeps. One
that passed is not run again, so a run that was cut off goes on where it was; --again starts anew.
A command that needs packages which are not installed fails and names them; the others run. Several
cards share their host: times of the host, TTFT above all, are honest with one proof at a time only.
The exit status is the number of proofs that failed.
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
from typing import IO, NamedTuple

ROOT = Path(__file__).parents[1]
MODEL = "--model qwen3-4b --load-format dummy --cache-dir {cache}"
RANDOM = "scripts/random_checkpoint.py qwen3-4b {cache}/models/bf16"
CLIENTS = "1,8,32,64,128,256"
BATCH = "1,2,4,8,16,32,64,128,256"
NEEDS = {
    # pytest's settings in pyproject.toml and tests/conftest.py want more than pytest
    "-m pytest": ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis"),
    "gpu_parity.py": ("torch", "transformers"),
    "bench_power": ("torch",),
    "eval_formats": ("flax",),
    "--plot": ("matplotlib",),
    "--to orbax": ("orbax-checkpoint",),
    "/orbax/": ("orbax-checkpoint",),
}
"""Packages that the extras for GPUs do not install, by words of the commands that need them."""


class Proof(NamedTuple):
    """`{out}`, `{cache}` and `{url}` in a command are its folder, the compiled programs' and the
    server's address."""

    shows: str
    minutes: float
    """On an H200, with nothing compiled before: a guide for the estimate, and a fifth of what each
    command may take."""
    commands: tuple[str, ...]
    server: str | None = None
    """Flags of the server that runs meanwhile."""


PROOFS = {
    "kernels": Proof(
        "every kernel against its reference",
        9,
        ("-m pytest -m gpu tests/kernels -q -p no:cacheprovider",),
    ),
    "equality": Proof(
        "random joins, leaves and preemptions give the tokens of requests that run alone; float32",
        5,
        ("-m pytest -m gpu tests/runner -q -p no:cacheprovider",),
    ),
    "parity": Proof(
        "logprobs beside those of transformers",
        4,
        ("scripts/gpu_parity.py --model-config qwen3-4b --json {out}/parity.json",),
    ),
    "decode": Proof(
        "decode steps of every bucket against the floor of the same process",
        2,
        (f"scripts/bench_step.py --batch {BATCH} --steps 100 --out {{out}}/step.json",),
    ),
    "prefill": Proof(
        "mixed steps against their floor, attention, and the table of the scheduler",
        5,
        (
            "scripts/bench_mixed.py --out {out}/mixed.json",
            "scripts/bench_attention.py --out {out}/prefill_attention.json",
            "-m lab.simulation.measure_steps --out {out}/step_times.json",
        ),
    ),
    "power": Proof(
        "what the card's power limit leaves room for",
        1,
        ("-m lab.studies.bench_power --out {out}/power.json",),
    ),
    "link": Proof(
        "pages between host memory and the card",
        1,
        ("scripts/bench_link.py --out {out}/link.json",),
    ),
    "sampler": Proof(
        "the sampler alone", 1, ("scripts/bench_sampler.py --out {out}/sampler.json",)
    ),
    "products": Proof(
        "products of every weight format, from one token to prefill, none slower than bfloat16's",
        8,
        (
            "scripts/bench_matmul.py --out {out}/matmul.json --plot {out}/matmul.svg"
            " --budget 20 --assert-ratio 1.0",
        ),
    ),
    "quantized-steps": Proof(
        "decode steps with quantised weights, none slower than bfloat16's (but for noise)",
        12,
        (
            f"scripts/bench_step.py --batch {BATCH} --steps 50 --out {{out}}/step_bf16.json",
            *(
                f"scripts/bench_step.py --batch {BATCH} --steps 50 --quantization {weights}"
                f" --lm-head-dtype {head}{copy} --out {{out}}/step_{weights}.json"
                f" --compare {{out}}/step_bf16.json --assert-ratio 1.02"
                for weights, head, copy in (
                    ("int4", "int8", " --fp8-copy"),
                    ("fp8", "fp8", ""),
                    ("nvfp4", "fp8", " --fp8-copy"),
                    ("mxfp4", "fp8", " --fp8-copy"),
                    ("int4-g64", "int8", " --fp8-copy"),
                    ("int4-zeros", "int8", " --fp8-copy"),
                    ("int4-act-order", "int8", " --fp8-copy"),
                )
            ),
        ),
    ),
    "serving": Proof(
        "over HTTP: first tokens cold and cached, a long prompt beside 32 streams, closed loops",
        6,
        (
            "scripts/bench_serving.py --url {url} --prefix-hit 256,1024,4096,16384"
            " --out {out}/first_token.json",
            "scripts/bench_serving.py --url {url} --stall 32 --out {out}/stall.json",
            f"scripts/bench_serving.py --url {{url}} --concurrency {CLIENTS} --rounds 4"
            " --out {out}/serving.json",
            f"scripts/bench_serving.py --url {{url}} --concurrency {CLIENTS} --rounds 3"
            " --same-prompts --seed 42 --out {out}/serving_same_prompts.json",
            "scripts/bench_serving.py --url {url} --concurrency 100 --rounds 1"
            " --prompt-tokens 512 --output-tokens 128 --out {out}/burst.json",
            "scripts/bench_serving.py --url {url} --concurrency 256 --rounds 1"
            " --prompt-tokens 64 --output-tokens 512 --out {out}/streams.json",
        ),
        server=f"{MODEL} --forbid-compiles",
    ),
    "serving-int4": Proof(
        "the same closed loops and the burst with int4 weights",
        5,
        (
            f"scripts/bench_serving.py --url {{url}} --concurrency {CLIENTS} --rounds 2"
            " --out {out}/serving_int4.json",
            "scripts/bench_serving.py --url {url} --concurrency 100 --rounds 1"
            " --prompt-tokens 512 --output-tokens 128 --out {out}/burst_int4.json",
        ),
        server=f"{MODEL} --forbid-compiles --quantization int4 --lm-head-dtype int8",
    ),
    "answers": Proof(
        "the embedded model's answers with weights in each format, by their values",
        4,
        ("-m lab.embedded.eval_formats --out {out}/formats.json",),
    ),
    **{
        f"answers-{weights}": Proof(
            f"the embedded model's answers over HTTP, {weights} weights: the kernels that serve",
            2,
            (
                "-m lab.embedded.evaluate --url {url}/v1 --concurrency 128"
                f" --out {{out}}/embedded_{weights}.json",
            ),
            server="--model jaxserve-embedded --cache-dir {cache}"
            + (f" --quantization {weights}" if weights != "bf16" else ""),
        )
        for weights in ("bf16", "int4", "fp8", "nvfp4")
    },
    "kv-formats": Proof(
        "throughput, capacity, compiles and accuracy of every KV format at 1 to 256 clients",
        17,
        (
            "scripts/bench_kv.py --budget 30 --out {out}/kv.json",
            "-m lab.embedded.eval_kv_formats --out {out}/kv_accuracy.json",
        ),
    ),
    "start": Proof(
        "from nothing to ready, and memory, with compiled programs at hand: a safetensors folder,"
        " and one converted to int4",
        5,
        (
            RANDOM,
            "-m jaxserve convert --model {cache}/models/bf16 --out {cache}/models/int4"
            " --quantization int4",
            *(
                command
                for name in ("bf16", "int4")
                for command in (
                    f"-m jaxserve precompile --model {{cache}}/models/{name} --cache-dir {{cache}}",
                    f"scripts/bench_start.py --runs 3 --memory --json {{out}}/start_{name}.json"
                    f" -- --model {{cache}}/models/{name} --cache-dir {{cache}}"
                    " --require-precompiled",
                )
            ),
        ),
    ),
    "start-orbax": Proof(
        "from nothing to ready from Orbax, beside the same weights in safetensors",
        6,
        (
            RANDOM,
            # A folder of the same name, so that both start with the same compiled programs.
            "-m jaxserve convert --model {cache}/models/bf16 --to orbax --out {cache}/orbax/bf16",
            "-m jaxserve precompile --model {cache}/models/bf16 --cache-dir {cache}",
            "scripts/bench_start.py --runs 3 --memory --json {out}/start_safetensors.json"
            " -- --model {cache}/models/bf16 --cache-dir {cache} --require-precompiled",
            "scripts/bench_start.py --runs 3 --memory --json {out}/start_orbax.json"
            " --compare {out}/start_safetensors.json"
            " -- --model {cache}/orbax/bf16 --cache-dir {cache} --require-precompiled",
        ),
    ),
    "weight-swap": Proof(
        "changes of the weights beside 32 streams and in place: seconds of loading, and the gaps"
        " that streams see",
        5,
        (
            RANDOM,
            "scripts/bench_weight_swap.py --model {cache}/models/bf16 --cache-dir {cache}"
            " --json {out}/swap.json",
        ),
    ),
    "goodput": Proof(
        "the study's mix in order of arrival and by deadline, where fcfs has half of it in time and"
        " at twice that rate",
        16,
        tuple(
            f"-m jaxserve bench --rate {rate} --duration 120 --drain 70 --timeout 180 --warmup 0"
            f" --cooldown 30 --slo-headers --name {policy}-{rate}"
            f' --output {{out}}/{policy}_{rate}.json --url {{url}} --server "{{python}}'
            f" -m jaxserve {MODEL} --port {{port}} --kv-cache-memory-bytes 62G"
            f' --max-model-len 8192 --scheduling-policy {policy}"'
            for rate in (19, 38)
            for policy in ("fcfs", "slo")
        ),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("proofs", nargs="*", metavar="PROOF", help="see --list; default: all")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--gpus", default="0", help="numbers of the cards to use: 0,1")
    parser.add_argument("--budget", type=float, help="begin none after so many minutes")
    parser.add_argument("--again", action="store_true", help="also those that have passed")
    parser.add_argument("--list", action="store_true", help="what there is")
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
    return prove(options)


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
    except KeyboardInterrupt:  # what runs was interrupted, too
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
    """The card and the versions, for whoever reads the results."""
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
        json.dumps({"card": name, "driver": driver, "memory": memory, **versions}, indent=1) + "\n"
    )
    print(
        f"{name}, driver {driver}, jax {versions['jax']}, triton {versions['triton']}", flush=True
    )


def _run(name: str, out: Path, gpu: str, port: int) -> bool:
    proof, folder = PROOFS[name], out / name
    folder.mkdir(exist_ok=True)
    places: dict[str, object] = {
        "out": folder.resolve(),
        "cache": (out / "programs").resolve(),
        "url": f"http://127.0.0.1:{port}",
        "port": port,
        "python": sys.executable,
    }
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


def _missing(commands: tuple[str, ...]) -> list[str]:
    """Which of the packages that they need are not installed."""
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
    """Whether the command passed, which the log says, too."""
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
    """Whether the server came up; the first start compiles."""
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

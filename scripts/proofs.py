"""The proofs that `prove_on_card.py` runs, one for each claim about a GPU, and their packages."""

from __future__ import annotations

from typing import NamedTuple

MODEL = "--model qwen3-4b --load-format dummy --cache-dir {cache}"
RANDOM = "scripts/random_checkpoint.py qwen3-4b {cache}/models/bf16"
HYBRIDS = {"27b": "qwen3.5-27b", "35b_a3b": "qwen3.5-35b-a3b"}
FEW_BUCKETS = (
    "--load-format dummy --cache-dir {cache} --forbid-compiles --speculative-config off"
    " --decode-buckets 1,8,16,32,64 --prefill-buckets 64,128,256,512,1024,2048"
)
"""Of servers of large models, which compile for long. Random prompts have no drafts."""
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
"""Extra packages, which the extras for GPUs do not install, by a part of the command that needs
them."""


class Proof(NamedTuple):
    """A proof: a series of commands. In a command `{out}` is the proof's folder, `{cache}` that of
    compiled programs, and `{url}` the server's address."""

    shows: str
    minutes: float
    """Duration on an H200 with nothing compiled before. It is used for the estimate; each command
    may take five times as long."""
    commands: tuple[str, ...]
    server: str | None = None
    """Flags of a server that runs during the commands; None: no server."""


def _served_loops(
    model: str, weights: str | None, shows: str, command: str, *, published: str = "bf16"
) -> Proof:
    """Closed loops of a large model with random weights, after another measurement.

    Args:
      weights: value of --quantization; None: weights are in the `published` format.
    """
    quantized = "" if weights is None else f" --quantization {weights}"
    return Proof(
        f"{model} over HTTP: {shows}, closed loops; {weights or published}",
        4,
        (
            f"scripts/bench_serving.py --url {{url}} {command}",
            "scripts/bench_serving.py --url {url} --concurrency 1,8,32,64 --rounds 2"
            " --out {out}/serving.json",
        ),
        server=f"--model {model}{quantized} --max-model-len 8192 {FEW_BUCKETS}",
    )


FIRST_TOKENS = (
    "first tokens cold and cached",
    "--prefix-hit 1024,4096 --out {out}/first_token.json",
)
TEN_CLIENTS = (
    "ten clients with long prompts",
    "--concurrency 10 --rounds 2 --prompt-tokens 2048 --output-tokens 1024"
    " --out {out}/ten_clients.json",
)

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
    "offload": Proof(
        "first tokens from every tier, streams beside restores with and without a bound, chats",
        5,
        (
            "scripts/bench_offload.py --repeats 3 --load-rate 5G,7G,9G --out {out}/offload.json"
            " -- --model qwen3-4b --load-format dummy --cache-dir {cache} --kv-offload-size 56G"
            " --kv-offload-disk-size 24G --kv-cache-memory-bytes 9G --max-model-len 20480"
            " --decode-buckets 1,4,16 --prefill-buckets 64,128,256,1024,2048"
            " --speculative-config off",
        ),
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
    "experts": Proof(
        "mixtures of experts: layers of 1 to 2,048 rows in every format over their floor, and"
        " whole decode steps over that of the experts touched",
        12,
        (
            "scripts/bench_experts.py --models qwen3-30b-a3b --formats bf16,int4,fp8"
            " --rows 1,8,32,64,256,2048 --budget 240 --out {out}/qwen3_30b_a3b.json",
            "scripts/bench_experts.py --models gpt-oss-20b --formats mxfp4"
            " --rows 1,8,32,64,256,2048 --budget 120 --out {out}/gpt_oss_20b.json",
            *(
                f"scripts/bench_step.py --model {model}{flags} --batch 1,8,32,64,256 --steps 40"
                f" --kv-gib 40 --out {{out}}/step_{name}.json"
                for name, model, flags in (
                    ("qwen3_30b_a3b_bf16", "qwen3-30b-a3b", ""),
                    ("qwen3_30b_a3b_int4", "qwen3-30b-a3b", " --quantization int4"),
                    ("gpt_oss_20b_mxfp4", "gpt-oss-20b", " --quantization mxfp4"),
                )
            ),
        ),
    ),
    "experts-prompts": Proof(
        "layers of experts: 512 to 4,096 rows in every format, and each kernel's time",
        4,
        (
            "scripts/bench_experts.py --models qwen3-30b-a3b,qwen3.5-35b-a3b"
            " --formats bf16,int4,fp8,fp8-blocks --rows 512,1024,2048,4096 --profile"
            " --out {out}/experts_prompts.json",
            "scripts/bench_experts.py --models gpt-oss-20b --formats mxfp4"
            " --rows 512,1024,2048,4096 --profile --out {out}/experts_prompts_gpt_oss_20b.json",
        ),
    ),
    "experts-padding": Proof(
        "decode steps of fewer rows than their bucket, over the floor of the experts of these rows",
        2,
        (
            "scripts/bench_step.py --model qwen3-30b-a3b --quantization int4 --buckets 16,64"
            " --batch 9,16,40,64 --steps 40 --kv-gib 10"
            " --out {out}/padded_qwen3_30b_a3b_int4.json",
        ),
    ),
    "recurrent": Proof(
        "recurrent layers of hybrid models: decode over the floor, prompts in both forms",
        4,
        (
            *(
                f"scripts/bench_recurrent.py --model {model} --rows 1,8,32,64"
                f" --out {{out}}/recurrent_{name}.json"
                for name, model in HYBRIDS.items()
            ),
            "scripts/bench_recurrent.py --model qwen3.5-27b --quantization int4 --whole --profile"
            " --rows 1,8,16,32,64 --prompts 2048 --out {out}/recurrent_27b_whole.json",
        ),
    ),
    "hybrid-steps": Proof(
        "whole steps of hybrid models: decode over the floor, TFLOP/s of prompts",
        12,
        (
            *(
                f"scripts/bench_step.py --model {HYBRIDS[model]}{flags} --batch {rows} --steps 40"
                f" --kv-gib 5 --out {{out}}/step_{model}_{weights}.json"
                for model, weights, rows, flags in (
                    ("27b", "bf16", "1,8,32", ""),
                    ("27b", "int4", "1,8,32,64", " --quantization int4 --lm-head-dtype int8"),
                    ("35b_a3b", "fp8", "1,8,32,64", " --quantization fp8"),
                )
            ),
            *(
                f"scripts/bench_mixed.py --model {HYBRIDS[model]}{flags} --buckets 512,2048"
                f" --decodes 8 --prompts 2048,8192 --steps 6"
                f" --out {{out}}/mixed_{model}_{weights}.json"
                for model, weights, flags in (
                    ("27b", "bf16", ""),
                    ("35b_a3b", "fp8", " --quantization fp8"),
                )
            ),
        ),
    ),
    "hybrid-serving": _served_loops("qwen3.5-27b", "int4", *FIRST_TOKENS),
    "hybrid-serving-27b-bf16": _served_loops("qwen3.5-27b", None, *FIRST_TOKENS),
    "hybrid-serving-35b-a3b": _served_loops("qwen3.5-35b-a3b", "fp8", *FIRST_TOKENS),
    "hybrid-soak": Proof(
        "a server of qwen3.5-35b-a3b lives through long and short prompts in turn; fp8",
        6,
        tuple(
            f"scripts/bench_serving.py --url {{url}} {load} --seed {seed}"
            f" --out {{out}}/{name}_{seed}.json"
            for seed in range(1, 7)
            for name, load in (
                ("long", "--concurrency 16 --rounds 4 --prompt-tokens 4000 --output-tokens 32"),
                ("short", "--concurrency 64 --rounds 2 --prompt-tokens 700 --output-tokens 100"),
            )
        ),
        server=f"--model qwen3.5-35b-a3b --quantization fp8 --max-model-len 8192 {FEW_BUCKETS}",
    ),
    "experts-serving": _served_loops("qwen3-30b-a3b", None, *TEN_CLIENTS),
    "experts-serving-int4": _served_loops("qwen3-30b-a3b", "int4", *TEN_CLIENTS),
    "experts-serving-gpt-oss": _served_loops(
        "gpt-oss-20b", None, *TEN_CLIENTS, published="MXFP4 experts, the rest bf16"
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

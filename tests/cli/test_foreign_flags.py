"""Command lines that were written for vLLM and SGLang start, and say what has no effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.__main__ import main
from jaxserve.cli.foreign_flags import NOT_HERE, ONE, SAME, SWITCHES, VALUED, translated
from jaxserve.cli.options import parse_args


def test_other_spellings_mean_the_same() -> None:
    sglang = (
        "--model-path m --context-length=32k --max-running-requests 8 --mem-fraction-static 0.8 "
        "--page-size 64 --disable-radix-cache --kv-cache-dtype fp8 -tp 1"
    )
    argv, without_effect = translated(sglang.split())
    options = parse_args(argv)
    assert (options.model, options.max_model_len, options.max_num_seqs) == ("m", 32768, 8)
    assert (options.gpu_memory_utilization, options.block_size) == (0.8, 64)
    assert not options.enable_prefix_caching and options.kv_cache_dtype == "fp8_e4m3"
    assert without_effect == ["-tp"]
    others = "--sampling-defaults openai --load-format=safetensors --max-model-len auto"
    options = parse_args(translated(others.split()).argv)
    assert (options.generation_config, options.load_format) == ("vllm", "auto")
    assert options.max_model_len is None
    assert parse_args(translated(["--kv-cache-dtype=fp8"]).argv).kv_cache_dtype == "fp8_e4m3"


def test_flags_without_effect_are_left_out_and_told() -> None:
    vllm = "--enable-auto-tool-choice --tool-call-parser hermes --port 1 --swap-space=4"
    argv, without_effect = translated(vllm.split())
    assert argv == ["--tool-call-parser", "hermes", "--port", "1"]
    assert without_effect == ["--enable-auto-tool-choice", "--swap-space"]


def test_parsers_have_the_names_of_vllm_and_of_sglang() -> None:
    for tools, ours in (("qwen3_coder", "qwen3_coder"), ("llama3", "llama3_json")):
        flags = ["--tool-call-parser", tools, "--reasoning-parser=deepseek-r1"]
        options = parse_args(translated(flags).argv)
        assert (options.tool_call_parser, options.reasoning_parser) == (ours, "deepseek_r1")
    with pytest.raises(SystemExit):
        parse_args(["--tool-call-parser", "unknown"])


def test_no_flag_of_ours_is_taken_for_a_foreign_one() -> None:
    ours = {f"--{name.replace('_', '-')}" for name in vars(parse_args([]))}
    assert not ours & (SAME.keys() | ONE | SWITCHES | VALUED | NOT_HERE.keys())


@pytest.mark.parametrize("flags", [["-tp", "2"], ["--tensor-parallel-size=8"], ["--dp-size"]])
def test_more_than_one_gpu_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "some-model", *flags])
    assert ended.value.code == 2
    assert "one process serves one GPU; start one per GPU" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--enable-lora"], ["--lora-modules", "a=b"]])
def test_lora_is_refused_by_name(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(flags)
    assert f"{flags[0]}: LoRA adapters are not served" in capsys.readouterr().err


def test_how_a_checkpoint_is_quantised_may_be_said_though_its_files_say_it() -> None:
    for name in ("awq", "gptq_marlin", "compressed-tensors", "modelopt"):
        for flags in (["--quantization", name], [f"--quantization={name}"], ["-q", name]):
            argv, without_effect = translated(flags)
            assert argv == [] and without_effect == [f"--quantization {name}"]
    assert parse_args(translated(["--quantization", "int4"]).argv).quantization == "int4"
    assert parse_args(translated(["-q", "nvfp4"]).argv).quantization == "nvfp4"
    assert translated(["--cpu-offload-gb", "0", "--hf-overrides={}"]).argv == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--dtype", "half"], "models run in bfloat16"),
        (["--dtype=float16"], "models run in bfloat16"),
        (["--cpu-offload-gb", "4"], "use --quantization int4"),
        (["--hf-overrides", '{"a": 1}'], "change config.json"),
    ],
)
def test_what_is_not_there_is_refused_with_what_to_do(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2 and said in capsys.readouterr().err
    assert parse_args(translated(["--dtype", "float"]).argv).dtype == "float32"


def test_a_file_may_hold_flags_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: m\nport: 1\nmax_model_len: 32k\nenable-prefix-caching: false\n"
        "open-metrics: true\nserved-model-name: [a, b]\ntensor-parallel-size: 1\n"
    )
    for flags in (["--config", str(file), "--port", "2"], ["--port", "2", f"--config={file}"]):
        argv, without_effect = translated(flags)
        options = parse_args(argv)
        assert (options.model, options.port, options.max_model_len) == ("m", 2, 32768)
        assert not options.enable_prefix_caching and options.open_metrics
        assert options.served_model_name == ["a", "b"]
        assert without_effect == ["--tensor-parallel-size"]
    assert translated(["precompile", "--config", str(file)]).argv[0] == "precompile"


@pytest.mark.parametrize("text", ["- 1\n", "a: [", None])
def test_a_file_that_holds_no_flags_is_refused(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=r"--config .*serve.yaml: "):
        translated(["--config", str(file)])
    with pytest.raises(ValueError, match="needs a file"):
        translated(["--config"])


def test_tiers_of_other_servers_are_ours() -> None:
    vllm = translated(["--kv-offloading-size", "64", "--kv-offloading-backend", "native"])
    assert parse_args(vllm.argv).kv_offload_size == 64 * 2**30
    sglang = translated(["--enable-hierarchical-cache", "--hicache-size=30"])
    assert parse_args(sglang.argv).kv_offload_size == 30 * 10**9
    with pytest.raises(ValueError, match="lmcache: pages go to this host's memory and disk only"):
        translated(["--kv-offloading-size", "64", "--kv-offloading-backend", "lmcache"])

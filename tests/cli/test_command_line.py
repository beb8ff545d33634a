"""A command line is right, or one line says what is wrong with it; Ctrl-C ends it with one."""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from typing import Any

import pytest

import jaxserve
from jaxserve.__main__ import main
from jaxserve.bench.command import main as bench
from jaxserve.cli.options import parse_args
from jaxserve.speculation_config import SpeculationConfig


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--prot 8000", "unknown flag --prot; did you mean --port?"),
        ("--cache_dir=/tmp", "unknown flag --cache_dir; did you mean --cache-dir?"),
        ("--max-model 5", "unknown flag --max-model; did you mean --max-model-len?"),
        ("--wibble", "unknown flag --wibble (jaxserve --help"),
        ("sevre --port 1", "unknown command 'sevre'; did you mean serve?"),
        ("frobnicate", "unknown command 'frobnicate'; commands are serve, precompile, convert"),
        ("--model a b", "unexpected argument 'b'"),
        ("--port 65536", "--port: must be a port from 0 to 65535, not '65536'"),
        ("--port=-1", "--port: must be a port from 0 to 65535, not '-1'"),
        ("--max-num-seqs 0", "--max-num-seqs: must be a positive integer, not '0'"),
        ("--gpu-memory-utilization 90", "must be above 0 and at most 1, not '90'"),
        ("--max-itl-ms 0", "--max-itl-ms: must be a number above 0, not '0'"),
        ("--slo-ttft-ms nan", "--slo-ttft-ms: must be a number above 0, not 'nan'"),
        ("--shutdown-timeout=-1", "--shutdown-timeout: must be a number, at least 0, not '-1'"),
        ("--probe-port x", "--probe-port: must be a port from 0 to 65535, not 'x'"),
        ("--inference-objectives a", "must be NAME=PRIORITY such as batch=-10, not 'a'"),
        ("--inference-objectives a=b", "must be NAME=PRIORITY such as batch=-10, not 'a=b'"),
        ("--inference-objectives =1", "must be NAME=PRIORITY such as batch=-10, not '=1'"),
        ("--inference-objectives a=9999999999", "must fit into 32 bits: 'a=9999999999'"),
        ("--health-means well", "invalid choice: 'well' (choose from 'ready', 'live')"),
        ("--seed x", "--seed: must be a whole number, at least 0, not 'x'"),
        ("--kv-cache-memory-bytes", "--kv-cache-memory-bytes: expected one argument"),
        ("--kv-cache-memory-bytes=-5", "must be a size such as 512M, 20G or 20Gi, not '-5'"),
        ("--max-request-bytes=0", "must be a size such as 512M, 20G or 20Gi, not '0'"),
        (f"--max-request-bytes={'9' * 400}", "must be a size such as 512M, 20G or 20Gi, not '99"),
        ("--block-size 3", "--block-size: must be a power of two, not '3'"),
        ("--served-model-name=", "--served-model-name: a name must not be empty"),
        ("--speculative-config on", "must be off or a JSON object, not 'on'"),
        ('--speculative-config {"method":"eagle"}', "method 'eagle' without a model; use ngram or"),
        ('--speculative-config {"model":"m","method":"ngram"}', "method 'ngram' with a model; use"),
        ('--speculative-config {"models":"m"}', "unsupported keys: models"),
        ('--speculative-config {"prompt_lookup_min":0}', "must be a positive integer, not 0"),
    ],
)
def test_one_line_says_what_is_wrong(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_args(line.split())
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.count("\n") == 1
    assert said.startswith("jaxserve: error: ")
    assert message in said


def test_an_older_python_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    with pytest.raises(ImportError, match=r"needs Python 3\.12 or newer"):
        runpy.run_path(str(jaxserve.__file__))


def test_the_ends_of_ranges_are_allowed() -> None:
    options = parse_args(
        ["--port=0", "--gpu-memory-utilization=1", "--shutdown-timeout=0", "--max-itl-ms=inf"]
    )
    assert (options.port, options.gpu_memory_utilization) == (0, 1.0)
    assert (options.shutdown_timeout, options.max_itl_ms) == (0.0, float("inf"))


def test_other_commands_name_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    for run, named in (
        (lambda: parse_args(["--requir-precompiled"], "precompile"), "--require-precompiled"),
        (lambda: parse_args(["--model", "a", "--out", "b", "--outt"], "convert"), "--out"),
        (lambda: bench(["--durtion", "3"]), "--duration"),
    ):
        with pytest.raises(SystemExit):
            run()
        assert f"did you mean {named}?" in capsys.readouterr().err


def test_help_shows_commands_and_no_default_where_there_is_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    shown = capsys.readouterr().out
    assert "default: None" not in shown
    assert "default: False" not in shown and "default: True" not in shown
    assert "(default: 8000)" in shown
    assert "--cache-dir DIR " in shown
    for command in ("serve", "precompile", "convert", "bench"):
        assert f"\n  {command} " in shown


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("precompile", "interrupted; the same command goes on from here"),
        ("convert --model a --out b", "interrupted; the same command goes on from here"),
        ("--port 0", "interrupted"),
    ],
)
def test_an_interrupted_command_says_how_to_go_on(
    line: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for module in ("precompile", "convert", "serve"):
        monkeypatch.setattr(f"jaxserve.commands.{module}.prepare", interrupted)
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 130
    assert capsys.readouterr().err == f"jaxserve: {said}\n"


def test_flags_of_the_environment_go_behind_those_of_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = "--port 1 --host '::' --api-key a"
    options = parse_args(["--port", "2", "--api-key", "b"], defaults=given)
    assert (options.host, options.port) == ("::", 2)
    assert options.api_key == ["a", "b"]
    assert parse_args([], "precompile", given).port == 1
    assert parse_args(["--model", "a", "--out", "b"], "convert", given).host == "127.0.0.1"
    for wrong, message in (
        ("--host '::", "JAXSERVE_FLAGS in the environment: No closing quotation"),
        ("--prot 8000", "unknown flag --prot; did you mean --port?"),
    ):
        with pytest.raises(SystemExit) as ended:
            parse_args([], defaults=wrong)
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("method", ["mtp", "qwen3_next_mtp", "qwen3_5_mtp"])
def test_vllms_names_of_multi_token_prediction(method: str) -> None:
    flag = "--speculative-config"
    found = parse_args([flag, f'{{"method": "{method}"}}']).speculative_config
    assert found == SpeculationConfig(drafts=3, native=True)
    given = f'{{"method": "{method}", "num_speculative_tokens": 2}}'
    assert parse_args([flag, given]).speculative_config == replace(found, drafts=2)

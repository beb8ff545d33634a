"""The whole harness against a server with known latencies, over real sockets."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import math
import os
import re
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from rich.console import Console

from jaxserve.bench import command, report, results, tables
from jaxserve.bench.experiment import ServerNotReady, run_experiment
from jaxserve.bench.load import Run
from jaxserve.bench.options import Experiment
from tests.bench.mock_server import Course, serving
from tests.bench.virtual_time import at_virtual_time

QUICK: dict[str, Any] = {
    "duration": 1.0,
    "rate": 40,
    "traffic": "fixed",
    "input_tokens": 4,
    "output_tokens": 5,
    "warmup": 0.0,
    "cooldown": 0.0,
    "drain": 5.0,
}


async def measured(url: str, **settings: Any) -> dict[str, Any]:
    experiment = Experiment(url=url, **{**QUICK, **settings})
    return await run_experiment(experiment, lambda run: nullcontext())


@at_virtual_time
async def test_figures_are_those_of_the_server() -> None:
    """Each request has a course of its own, so that means and percentiles differ."""
    courses = [Course(ttft=0.05 + 0.002 * n, gap=0.02 + 0.001 * (n % 7)) for n in range(100)]
    async with serving(lambda body, number: courses[number]) as mock:
        point = await measured(mock.url)
    total = point["summary"]["total"]
    sent = total["sent"]
    assert total["completed"] == sent == len(mock.bodies) > 10
    for figure, times in (
        ("ttft_ms_of_completed", [course.ttft for course in courses[:sent]]),
        ("ttft_ms", [course.ttft for course in courses[:sent]]),
        ("tpot_ms_of_completed", [course.gap for course in courses[:sent]]),
        ("e2e_ms", [course.ttft + 4 * course.gap for course in courses[:sent]]),
    ):
        expected = {"mean": mean(times)} | {
            f"p{q}": sorted(times)[math.ceil(q / 100 * sent) - 1] for q in (50, 90, 95, 99)
        }
        for name, seconds in expected.items():
            assert total[figure][name] == pytest.approx(1e3 * seconds, abs=0.002), (figure, name)
    assert total["send_lag_ms"]["p99"] == 0
    assert total["cached_token_share"] == pytest.approx(0.25)
    assert point["server_metrics"][0]["running"] == 3


@at_virtual_time
async def test_a_stall_of_the_server_counts_from_the_intended_times() -> None:
    """It answers nobody before half a second has gone by."""

    def course(body: dict[str, Any], number: int) -> Course:
        return Course(ttft=max(0.0, 0.5 - asyncio.get_running_loop().time() + start), tokens=1)

    async with serving(course) as mock:
        start = asyncio.get_running_loop().time()
        point = await measured(mock.url, rate=20, burstiness=float("inf"))
    waited = [request["ttft"] for request in point["requests"]]
    assert waited == pytest.approx([max(0.0, 0.475 - 0.05 * n) for n in range(20)], abs=0.001)


@at_virtual_time
async def test_the_commonest_errors_are_told_with_their_counts() -> None:
    def course(body: dict[str, Any], number: int) -> Course:
        return (
            Course(status=400, message=f"too long: {number} tokens")
            if number % 3
            else Course(status=503)
        )

    async with serving(course) as mock:
        point = await measured(mock.url)
    first, second = point["errors"]
    assert first["count"] + second["count"] == point["summary"]["total"]["sent"]
    assert first["count"] > second["count"] > 0
    assert re.fullmatch(r"HTTP 400: too long: \d+ tokens", first["example"])
    assert second["example"] == "HTTP 503: busy"
    console = Console(record=True, width=100)
    tables.print_point(console, point)
    assert f"{first['count']} requests: HTTP 400: too long" in console.export_text()
    assert "HTTP 503: busy" in report.page([("x", results.document([point]))])


@at_virtual_time
async def test_requests_that_cannot_fit_are_not_sent() -> None:
    async with serving(lambda body, number: Course()) as mock:
        mock.max_model_len = 4096
        with pytest.raises(ValueError, match=r"6713 tokens.* takes 4096 .*--length-scale 0.61"):
            await measured(mock.url, traffic="study", model="mock")
        assert not mock.bodies
        point = await measured(mock.url, traffic="lilo", model="mock", length_scale=0.6)
    assert point["summary"]["total"]["completed"] > 0
    assert all(len(b["prompt"]) + b["max_tokens"] <= 4096 for b in mock.bodies)


@at_virtual_time
async def test_every_fate_is_counted_once() -> None:
    fates = (
        Course(),
        Course(status=503),
        Course(status=429),
        Course(status=500),
        Course(breaks_after=2),
        Course(ttft=30.0),
        Course(refuses_late=True),
    )
    async with serving(lambda body, number: fates[number % len(fates)]) as mock:
        point = await measured(mock.url, timeout=0.5)
    total = point["summary"]["total"]
    outcomes = [fates[number % len(fates)] for number in range(len(mock.bodies))]
    assert total["sent"] == len(mock.bodies)
    assert total["completed"] == outcomes.count(fates[0])
    assert total["shed"] == sum(outcomes.count(fates[which]) for which in (1, 2, 6))
    assert total["failed"] == outcomes.count(fates[3]) + outcomes.count(fates[4])
    assert total["timed_out"] == outcomes.count(fates[5])
    assert total["slo_attainment"] == pytest.approx(total["completed"] / total["sent"])


@at_virtual_time
async def test_what_runs_at_the_end_is_unfinished_and_a_miss() -> None:
    async with serving(lambda body, number: Course(ttft=30)) as mock:
        point = await measured(mock.url, drain=0.1, duration=0.3)
    total = point["summary"]["total"]
    assert total["unfinished"] == total["sent"] > 0
    assert total["slo_attainment"] == 0
    assert any("still running" in warning for warning in point["warnings"])


@at_virtual_time
async def test_an_interrupted_run_keeps_what_it_has() -> None:
    @asynccontextmanager
    async def interrupted(run: Run) -> AsyncGenerator[None]:
        asyncio.get_running_loop().call_later(0.5, run.interrupt)
        yield

    async with serving(lambda body, number: Course(ttft=0.1)) as mock:
        experiment = Experiment(url=mock.url, **{**QUICK, "duration": 60.0})
        point = await run_experiment(experiment, interrupted)
    total = point["summary"]["total"]
    assert point["interrupted"] and point["elapsed_s"] == pytest.approx(0.5, abs=0.001)
    assert total["sent"] == len(mock.bodies) == total["completed"] + total["unfinished"]
    assert total["completed"] > 5 and total["unfinished"] > 0
    assert point["summary"]["window"]["end_s"] == pytest.approx(0.5, abs=0.001)
    assert point["warnings"][-1] == "interrupted after 0.5 s of 60 s"


@at_virtual_time
async def test_the_url_may_be_the_one_that_clients_need() -> None:
    async with serving(lambda body, number: Course()) as mock:
        point = await measured(mock.url + "/v1/", duration=0.2)
    assert point["summary"]["total"]["completed"] > 0


@at_virtual_time
async def test_a_server_that_dies_loses_what_it_was_sent_then() -> None:
    async with serving(lambda body, number: Course(ttft=0.05)) as mock:
        asyncio.get_running_loop().call_later(0.5, lambda: asyncio.ensure_future(mock.stop()))
        point = await measured(mock.url)
    total = point["summary"]["total"]
    assert total["completed"] > 5 and total["failed"] > 5
    assert total["completed"] + total["failed"] == total["sent"]
    assert any("Cannot connect" in error["example"] for error in point["errors"])


@at_virtual_time
async def test_a_request_may_take_as_long_as_it_wants() -> None:
    async with serving(lambda body, number: Course(ttft=700)) as mock:
        point = await measured(mock.url, timeout=math.inf, slo_headers=True, drain=1000)
    total = point["summary"]["total"]
    assert total["completed"] == total["sent"] > 10
    assert point["settings"]["timeout"] == "inf", "JSON has no infinity"
    assert "x-slo-e2e-ms" not in mock.headers[0]


@at_virtual_time
async def test_an_open_loop_does_not_wait_for_the_server() -> None:
    """A server that stalls is still sent every request at its time."""
    async with serving(lambda body, number: Course(ttft=0.8)) as mock:
        point = await measured(mock.url, rate=20, burstiness=float("inf"))
    sent = [request["sent"] for request in point["requests"]]
    assert sent == pytest.approx([0.025 + 0.05 * i for i in range(20)])


@at_virtual_time
async def test_a_closed_loop_keeps_so_many_clients_busy() -> None:
    async with serving(lambda body, number: Course(ttft=0.05, tokens=1)) as mock:
        point = await measured(mock.url, concurrency=4, duration=0.6)
    assert len(point["requests"]) == 4 * 12
    prompts = {json.dumps(body["prompt"]) for body in mock.bodies}
    assert len(prompts) == len(mock.bodies), "no prompt is sent twice"


@at_virtual_time
async def test_clients_of_a_closed_loop_do_not_hammer_a_server_that_fails() -> None:
    """Else the requests of a second without a server outnumber all others."""
    async with serving(lambda body, number: Course(status=500)) as mock:
        asyncio.get_running_loop().call_later(0.45, lambda: asyncio.ensure_future(mock.stop()))
        point = await measured(mock.url, concurrency=2, duration=0.95)
    assert point["summary"]["total"]["failed"] == len(point["requests"]) == 2 * 10


@pytest.mark.parametrize(
    ("last", "outcome"),
    [
        ({"choices": None, "usage": {"prompt_tokens": None, "completion_tokens": 5}}, "completed"),
        ([1], "failed"),
        ({"choices": [None]}, "failed"),
        ({"choices": [{"delta": "x"}]}, "failed"),
        ({"choices": [], "usage": 5}, "failed"),
        ({"choices": [], "usage": {"prompt_tokens_details": 5}}, "failed"),
    ],
)
@at_virtual_time
async def test_a_chunk_that_is_none_loses_one_request_and_not_the_client(
    last: Any, outcome: str
) -> None:
    async with serving(lambda body, number: Course(last=last if number == 0 else None)) as mock:
        point = await measured(mock.url, concurrency=1, duration=0.5)
    outcomes = [request["outcome"] for request in point["requests"]]
    assert outcomes[0] == outcome and set(outcomes[1:]) == {"completed"} and len(outcomes) > 3


@at_virtual_time
async def test_a_role_is_not_a_first_token() -> None:
    async with serving(lambda body, number: Course(ttft=0.1, chat=True)) as mock:
        point = await measured(
            mock.url, endpoint="chat", prompts="text", rate=10, slo_headers=True, api_key="k"
        )
    assert point["summary"]["total"]["ttft_ms_of_completed"]["p50"] == pytest.approx(100)
    assert mock.headers[0]["x-slo-ttft-ms"] == "500"
    assert mock.headers[0]["Authorization"] == "Bearer k"
    assert mock.bodies[0]["max_completion_tokens"] == 5
    assert "k" not in json.dumps(point["settings"]["api_key"])


async def test_no_server_is_one_clear_error() -> None:
    with pytest.raises(ServerNotReady, match="no server answers at http://127"):
        await measured("http://127.0.0.1:9")


async def test_a_server_that_cannot_start_is_said() -> None:
    with pytest.raises(ServerNotReady, match="status 3"):
        await measured("http://127.0.0.1:9", server=f"{sys.executable} -c 'raise SystemExit(3)'")


async def test_another_server_at_the_url_is_not_measured_in_place_of_the_own() -> None:
    async with serving(lambda body, number: Course()) as mock:
        with pytest.raises(ServerNotReady, match="another server answers"):
            await measured(mock.url, server="sleep 60")
    assert not mock.bodies


async def _invoke(*argv: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "jaxserve", "bench", *argv,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def test_a_configuration_file_from_the_command_line(tmp_path: Path) -> None:
    """A sweep of two rates writes JSON, CSV and a page; comparing the file with itself works."""
    config = tmp_path / "bench.yaml"
    out, table, page = tmp_path / "o.json", tmp_path / "o.csv", tmp_path / "o.html"
    async with serving(lambda body, number: Course(status=503 if number % 5 == 0 else 200)) as mock:
        settings = {**QUICK, "url": mock.url, "traffic": "study", "ignore_eos": False}
        document = {"run": settings, "experiments": [{"name": "mix", "rate": [20, 40]}]}
        config.write_text(json.dumps(document))  # JSON is YAML
        status, text = await _invoke(
            "--config", str(config), "--output", str(out), "--csv", str(table), "--html", str(page)
        )
    assert status == 0, text
    points = results.read(out)["points"]
    assert [point["name"] for point in points] == ["mix rate=20", "mix rate=40"]
    assert points[0]["settings"]["content_seed"] != points[1]["settings"]["content_seed"]
    rows = list(csv.DictReader(io.StringIO(table.read_text())))
    assert len(rows) == len(mock.bodies) == sum(len(point["requests"]) for point in points)
    assert {row["outcome"] for row in rows} == {"completed", "shed"}
    html = page.read_text()
    assert html.count("<svg") == 2 + 2 * 3 and "http-equiv" not in html
    assert "--decode: light-dark(" in html, "the style of the other pages"
    assert "stroke: var(--decode)" in html and "#0b8a7d" not in html.partition("</style>")[2]
    assert "mix rate=20" in text and "shed" in text
    assert command.main(["compare", str(out), str(out)]) == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rate", "-1"], "rate must be above 0"),
        (["--url", "localhost:8000"], "must begin with http://"),
        (["--rate", "nan"], "rate must be above 0, got nan"),
        (["--rate", "inf"], "rate must be finite"),
        (["--rate-end", "-3"], "rate_end must be at least 0, got -3"),
        (["--rate-steps", "4,0"], "rate_steps must all be above 0"),
        (["--output-tokens", "0"], "output_tokens must be at least 1, got 0"),
        (["--output", "/"], "is a directory"),
        (["--endpoint", "chat"], "prompts: text"),
        (["--traffic", "lots"], "supported: study"),
        (["--config", "/does/not/exist"], "No such file"),
        (["compare", "/does/not/exist"], "No such file"),
    ],
)
def test_wrong_settings_are_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(argv) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run:\n  ratee: 3\n", "unknown keys ['ratee']"),
        ("run: {rate: [1,\n", "is not YAML"),
        ("experiments: {rate: 1}\n", "experiments must be a list"),
        ("experiments: [fast]\n", "must hold settings, found 'fast'"),
        ("run: 3\n", "run must hold settings"),
        ("run: {rate: fast}\n", "rate is 'fast'"),
        ("run: {rate_steps: 4}\n", "rate_steps is 4"),
        ("run: {rate: }\n", "rate has no value"),
        ("run: {url: }\n", "url has no value"),
        ("run: {rate_steps: }\n", "rate_steps has no value"),
        ("run: {url: yes}\n", "url is 'True'"),
        ("run: {rate_steps: yes}\n", "rate_steps is True"),
        ("run: {concurrency: .inf}\n", "concurrency is inf"),
        ("run: {rate: []}\n", "an empty list leaves no experiment"),
        ("- rate\n", "expected the keys run and experiments"),
    ],
)
def test_mistakes_in_a_file_are_one_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "bench.yaml"
    config.write_text(text)
    assert command.main(["--config", str(config)]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_file_that_is_no_result_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    assert command.main(["compare", str(path)]) == 1
    assert "not a result file" in capsys.readouterr().err


def test_a_result_goes_through_a_pipe_or_a_link_and_does_not_replace_it(tmp_path: Path) -> None:
    """As --output /dev/stdout, or for root --output /dev/null."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to("there")
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (pipe, link):
        results.check_writable(path)
        results.write(path, "{}")
    assert os.read(end, 9) == (tmp_path / "there").read_bytes() == b"{}"
    assert pipe.is_fifo() and link.is_symlink()
    os.close(end)

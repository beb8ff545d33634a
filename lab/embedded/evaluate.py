"""Measures the embedded model's accuracy per task, greedily, on its stored evaluation set.

Against a server that speaks the OpenAI API:

    python -m lab.embedded.evaluate --url http://127.0.0.1:8000/v1

or in this process, with the plain flax model:

    python -m lab.embedded.evaluate --local
"""

import argparse
import asyncio
import gzip
import json
import re
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

type Scores = dict[str, dict[str, float | int]]
"""task -> number of cases, number right, and their ratio."""

MODEL_FOLDER = Path(__file__).parents[2] / "checkpoints/jaxserve_checkpoints/embedded"
_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Answer:
    """What came back for a case: the visible text and the first tool call, if there was one."""

    text: str
    tool_call: dict[str, Any] | None = None


@dataclass(frozen=True)
class Result:
    """A case's task, whether the answer was right, and the answer."""

    task: str
    correct: bool
    answer: Answer
    expect: Any


def load_cases(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def parse_answer(raw: str) -> Answer:
    """Splits generated text into visible text and tool call, dropping the reasoning."""
    text = raw.rpartition("</think>")[2].strip()
    match = _TOOL_CALL.search(text)
    if not match:
        return Answer(text)
    return Answer(text[: match.start()].strip(), _json_or_none(match[1]))


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def is_correct(check: str, expect: Any, answer: Answer) -> bool:
    """Applies a case's check; a tool call where none was wanted is wrong."""
    if check == "tool_call":
        return answer.tool_call == expect
    if answer.tool_call is not None:
        return False
    if check == "equals":
        return answer.text == expect
    if check == "contains":
        return re.search(rf"(?<!\w){re.escape(expect)}(?!\w)", answer.text) is not None
    if check == "number":
        return re.findall(r"-?\d+", answer.text.replace(" - ", " "))[-1:] == [str(expect)]
    if check == "json":
        return _json_or_none(answer.text) == expect
    raise ValueError(f"unknown check {check!r}")


def judge(cases: list[dict[str, Any]], answers: Iterable[Answer]) -> list[Result]:
    return [
        Result(
            case["task"], is_correct(case["check"], case["expect"], answer), answer, case["expect"]
        )
        for case, answer in zip(cases, answers, strict=True)
    ]


def accuracy(results: list[Result]) -> Scores:
    by_task: dict[str, list[bool]] = defaultdict(list)
    for result in results:
        by_task[result.task].append(result.correct)
    return {
        task: {"cases": len(hits), "correct": sum(hits), "accuracy": sum(hits) / len(hits)}
        for task, hits in by_task.items()
    }


def answer_locally(
    cases: list[dict[str, Any]], folder: Path, batch_tokens: int, loaded: Any = None
) -> list[Answer]:
    """Answers with the flax model in this process.

    Args:
      loaded: the model and its parameters, if they are not the folder's.
    """
    from lab.embedded.chat import Encoder, render
    from lab.embedded.model import ModelConfig, Qwen3, generate, load_model

    encoder = Encoder.load(folder)
    model, params = loaded or (Qwen3(config=ModelConfig.load(folder)), load_model(folder))
    prompts = [
        encoder.ids(render(case["messages"], case["tools"], prompt=True, thinking=case["thinking"]))
        for case in cases
    ]
    answers = [Answer("")] * len(cases)
    max_new = max(case["max_tokens"] for case in cases)
    with Progress() as progress:
        bar = progress.add_task("answering", total=len(cases))
        for index, tokens in generate(
            model,
            params,
            prompts,
            max_new=max_new,
            stop_ids=encoder.stop_ids,
            batch_tokens=batch_tokens,
        ):
            answers[index] = parse_answer(encoder.text(tokens))
            progress.advance(bar)
    return answers


async def answer_remotely(
    cases: list[dict[str, Any]], url: str, model: str | None, concurrency: int, api_key: str
) -> list[Answer]:
    """Answers with a server's chat completions, `concurrency` requests at a time."""
    import aiohttp

    limit = asyncio.Semaphore(concurrency)
    headers = {"Authorization": f"Bearer {api_key}"}
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        name = model or await _first_model(session, url)
        with Progress() as progress:
            bar = progress.add_task("answering", total=len(cases))

            async def answer(case: dict[str, Any]) -> Answer:
                async with limit:
                    message = await _complete(session, url, name, case)
                progress.advance(bar)
                return _answer_of(message)

            return list(await asyncio.gather(*map(answer, cases)))


async def _first_model(session: Any, url: str) -> str:
    async with session.get(f"{url}/models") as response:
        response.raise_for_status()
        return (await response.json())["data"][0]["id"]


async def _complete(session: Any, url: str, model: str, case: dict[str, Any]) -> dict[str, Any]:
    body = {
        "model": model,
        "messages": case["messages"],
        "temperature": 0,
        "max_tokens": case["max_tokens"],
        "chat_template_kwargs": {"enable_thinking": case["thinking"]},
    }
    if case["tools"]:
        body["tools"] = case["tools"]
    async with session.post(f"{url}/chat/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        return (await response.json())["choices"][0]["message"]


def _answer_of(message: dict[str, Any]) -> Answer:
    """An answer from a message whose tool call the server may or may not have parsed."""
    answer = parse_answer(message.get("content") or "")
    if calls := message.get("tool_calls"):
        function = calls[0]["function"]
        arguments = _json_or_none(function["arguments"])
        return Answer(answer.text, {"name": function["name"], "arguments": arguments})
    return answer


def print_table(scores: Scores, title: str, beside: dict[str, Scores]) -> None:
    """One row per task and one for their mean; earlier results in columns of their own."""
    table = Table("task", "cases", "right", "accuracy", *beside, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for task, score in scores.items():
        others = [_percent(earlier, [task]) for earlier in beside.values()]
        ratio = _percent(scores, [task])
        table.add_row(task, str(score["cases"]), str(score["correct"]), ratio, *others)
    means = [_percent(each, list(scores)) for each in (scores, *beside.values())]
    table.add_row("mean of the tasks", "", "", *means)
    Console().print(table)


def _percent(scores: Scores, tasks: list[str]) -> str:
    """The mean accuracy of some tasks; a dash where one was not measured."""
    if not all(task in scores for task in tasks):
        return "-"
    return f"{sum(scores[task]['accuracy'] for task in tasks) / len(tasks):.1%}"


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="base URL of an OpenAI-compatible server, with its /v1")
    where.add_argument("--local", action="store_true", help="run the flax model in this process")
    parser.add_argument("--model-folder", type=Path, default=MODEL_FOLDER)
    parser.add_argument("--model", help="model name to ask for (default: the server's first)")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--tasks", nargs="+", help="only tasks whose name begins with one of these")
    parser.add_argument("--limit", type=int, help="at most this many cases of each task")
    parser.add_argument("--batch-tokens", type=int, default=16_384, help="--local: prompt tokens")
    parser.add_argument("--out", type=Path, help="where to write the accuracies as JSON")
    parser.add_argument(
        "--beside",
        nargs="+",
        default=[],
        metavar="NAME=FILE",
        help="print earlier results (files of --out) in columns of their own",
    )
    parser.add_argument("--failures", type=int, default=0, help="print this many wrong answers")
    return parser.parse_args()


def select(
    cases: list[dict[str, Any]], tasks: list[str] | None, limit: int | None
) -> list[dict[str, Any]]:
    """The cases of some tasks, at most `limit` of each."""
    counts: dict[str, int] = defaultdict(int)
    chosen: list[dict[str, Any]] = []
    for case in cases:
        counts[case["task"]] += 1
        wanted = tasks is None or case["task"].startswith(tuple(tasks))
        if wanted and (limit is None or counts[case["task"]] <= limit):
            chosen.append(case)
    return chosen


def main() -> None:
    args = _parse_args()
    cases = select(load_cases(args.model_folder / "eval.jsonl.gz"), args.tasks, args.limit)
    begin = time.perf_counter()
    if args.local:
        answers = answer_locally(cases, args.model_folder, args.batch_tokens)
    else:
        url = args.url.rstrip("/")
        answers = asyncio.run(
            answer_remotely(cases, url, args.model, args.concurrency, args.api_key)
        )
    results = judge(cases, answers)
    scores = accuracy(results)
    earlier = dict(entry.split("=", 1) for entry in args.beside)
    beside = {name: json.loads(Path(file).read_text())["tasks"] for name, file in earlier.items()}
    print_table(scores, f"{len(cases)} cases in {time.perf_counter() - begin:.1f} s", beside)
    for wrong in [result for result in results if not result.correct][: args.failures]:
        print(json.dumps(asdict(wrong)))
    if args.out:
        report = {"target": args.url or "local", "tasks": scores}
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

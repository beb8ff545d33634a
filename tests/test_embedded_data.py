"""The embedded model's data is reproducible and split, and its files agree with one another."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open

from lab.embedded import chat, data, strings, tasks, tool_tables
from lab.embedded import evaluate as evaluation

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "checkpoints/jaxserve_checkpoints/embedded"

encoder = chat.Encoder.load(FOLDER)
WEATHER = tool_tables.TOOLS["get_weather"][0]


def stored(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name).read_text())


@pytest.mark.parametrize("block", data.BLOCK_LENGTHS)
def test_rows_depend_on_seed_and_step_alone(block: str) -> None:
    first, again, other = (data.block_rows(3, step, block, 2, encoder) for step in (5, 5, 6))
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(first[1], again[1])
    assert (first[0] != other[0]).any()
    assert first[0].shape == (2, data.BLOCK_LENGTHS[block])


@pytest.mark.parametrize(
    "task",
    [
        "add_subtract",
        "add_subtract_3_digits",
        "product",
        "spell",
        "reverse_letters",
        "sort_words",
        "reverse_words",
        "repeat",
        "json_object",
        "fact",
    ],
)
def test_no_question_of_the_evaluation_is_trained_on(task: str) -> None:
    make = getattr(tasks, task)
    rng = Random(1)
    trained = {make(rng, "train").user for _ in range(3000)}
    assert not trained & {make(rng, "eval").user for _ in range(300)}


def test_words_held_out_are_in_no_training_table_and_in_no_vocabulary() -> None:
    unseen = set(strings.UNSEEN_WORDS)
    assert unseen
    assert not unseen & {*strings.KNOWN_WORDS, *strings.TEMPLATE_WORDS}
    assert all(len(encoder.ids(word)) > 1 for word in unseen)


@pytest.mark.slow
def test_stored_evaluation_set_and_tokenizer_config_are_what_the_scripts_make() -> None:
    made = "".join(json.dumps(data.asdict(c)) + "\n" for c in data.eval_cases(encoder))
    assert gzip.decompress((FOLDER / "eval.jsonl.gz").read_bytes()).decode() == made
    assert stored("tokenizer_config.json") == chat.tokenizer_config(encoder._tokenizer)


@pytest.mark.slow
def test_evaluation_cases_fit_into_the_context() -> None:
    for case in evaluation.load_cases(FOLDER / "eval.jsonl.gz"):
        prompt = chat.render(case["messages"], case["tools"], prompt=True)
        assert len(encoder.ids(prompt)) + case["max_tokens"] <= chat.MAX_LENGTH


def test_template_renders_turns_and_think_blocks() -> None:
    messages = [chat.system("S"), *chat.turn("a", "b", "past"), *chat.turn("c", "d", "why")]
    assert chat.render(messages) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
        "<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nwhy\n</think>\n\nd<|im_end|>\n"
    )
    prompt = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert chat.render([chat.user("a")], prompt=True) == prompt
    no_thinking = chat.render([chat.user("a")], prompt=True, thinking=False)
    assert no_thinking == prompt + "<think>\n\n</think>\n\n"


def test_template_renders_tools_calls_and_results() -> None:
    call = {"name": "get_weather", "arguments": {"city": "Oslo"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [{"function": call}]}
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    text = chat.render([chat.user("a"), asked, *results], [WEATHER], prompt=True)
    assert f"<tools>\n{json.dumps(WEATHER)}\n</tools>" in text
    assert text.endswith(
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n"
        "<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_stored_template_renders_as_trained() -> None:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda x: json.dumps(x, ensure_ascii=False)
    template = environment.from_string(stored("tokenizer_config.json")["chat_template"])
    rng = Random(2)
    for _ in range(50):
        drawn = data.conversation(rng, encoder, "medium")
        rendered = template.render(messages=drawn.messages, tools=drawn.tools)
        assert rendered == chat.render(drawn.messages, drawn.tools)


def test_the_last_answer_is_scored_from_where_a_prompt_ends() -> None:
    rng = Random(4)
    for _ in range(100):
        drawn = data.conversation(rng, encoder, rng.choice(("short", "medium")))
        tokens = encoder.scored(drawn.messages, drawn.tools, thinking=drawn.thinking)
        prompt = encoder.ids(
            chat.render(drawn.messages[:-1], drawn.tools, prompt=True, thinking=drawn.thinking)
        )
        assert tokens.ids[: len(prompt)] == prompt
        answer = tokens.scored[len(prompt) :]
        assert answer == [True] * (len(answer) - 1) + [False]
        assert tokens.ids[-2] == encoder.stop_ids[0]
        assert not tokens.scored[len(prompt) - 1]


def test_special_tokens_are_single_and_only_control_tokens_are_special() -> None:
    config = stored("tokenizer_config.json")["added_tokens_decoder"]
    for token in chat.SPECIAL_TOKENS + chat.TAG_TOKENS:
        (token_id,) = encoder.ids(token)
        assert config[str(token_id)]["content"] == token
        assert config[str(token_id)]["special"] == (token in chat.SPECIAL_TOKENS)
    assert encoder.ids("2026") == [encoder.ids(digit)[0] for digit in "2026"]
    assert stored("generation_config.json")["eos_token_id"] == list(encoder.stop_ids)
    assert stored("config.json")["eos_token_id"] == encoder.stop_ids[0]


def test_tokenizer_is_lossless_on_any_text() -> None:
    for text in ("  spaces\t\n\n and\r\nlines ", "naïve 漢字 🎉", '{"a": [1, -2.5]}', "don't"):
        assert encoder.text(encoder.ids(text)) == text


def test_weights_have_the_shapes_that_the_config_promises() -> None:
    c = stored("config.json")
    hidden, ffn, vocab = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    q = c["num_attention_heads"] * c["head_dim"]
    kv = c["num_key_value_heads"] * c["head_dim"]
    assert all(size % 128 == 0 for size in (hidden, ffn, vocab, q, kv))
    assert encoder._tokenizer.get_vocab_size() <= vocab
    layer = {
        "self_attn.q_proj": [q, hidden],
        "self_attn.k_proj": [kv, hidden],
        "self_attn.v_proj": [kv, hidden],
        "self_attn.o_proj": [hidden, q],
        "self_attn.q_norm": [c["head_dim"]],
        "self_attn.k_norm": [c["head_dim"]],
        "mlp.gate_proj": [ffn, hidden],
        "mlp.up_proj": [ffn, hidden],
        "mlp.down_proj": [hidden, ffn],
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
    }
    expected = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    for i in range(c["num_hidden_layers"]):
        expected |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    with safe_open(FOLDER / "model.safetensors", "numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        assert {name: part.get_shape() for name, part in slices.items()} == expected
        assert {part.get_dtype() for part in slices.values()} == {"BF16"}
    num_bytes = (FOLDER / "model.safetensors").stat().st_size
    assert 2 * sum(map(math.prod, expected.values())) < num_bytes <= 16e6
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 18e6


@pytest.mark.parametrize(
    ("check", "expect", "raw", "right"),
    [
        ("equals", "ok", "<think>\n\n</think>\n\nok", True),
        ("contains", "12", "The code of x is 12.", True),
        ("contains", "12", "The code of x is 312.", False),
        ("number", -5, "<think>\n3\n</think>\n\n3 - 8 = -5", True),
        ("number", 5, "3 - 8 = -5", False),
        ("number", 5, "no idea", False),
        ("json", {"a": 1}, '{"a":1}', True),
        ("json", {"a": 1}, '{"a":1', False),
        ("tool_call", {"name": "f"}, '<tool_call>\n{"name": "f"}\n</tool_call>', True),
        ("equals", "", '<tool_call>\n{"name": "f"}\n</tool_call>', False),
    ],
)
def test_answers_are_judged(check: str, expect: Any, raw: str, right: bool) -> None:
    assert evaluation.is_correct(check, expect, evaluation.parse_answer(raw)) is right


async def test_a_server_is_asked_as_the_cases_say_and_parsed_calls_count() -> None:
    cases = evaluation.load_cases(FOLDER / "eval.jsonl.gz")
    chosen = evaluation.select(cases, ["chat", "tool_call"], 2)
    answers = {json.dumps(case["messages"]): case["expect"] for case in chosen}

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["temperature"] == 0
        assert body["chat_template_kwargs"] == {"enable_thinking": False}
        expect = answers[json.dumps(body["messages"])]
        message = {"content": expect}
        if "tools" in body:
            function = {"name": expect["name"], "arguments": json.dumps(expect["arguments"])}
            message = {"content": None, "tool_calls": [{"function": function}]}
        return web.json_response({"choices": [{"message": message}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    async with TestServer(app) as server:
        url = str(server.make_url("/v1"))
        got = await evaluation.answer_remotely(chosen, url, "embedded", 2, "none")
    scores = evaluation.accuracy(evaluation.judge(chosen, got))
    assert {task: score["accuracy"] for task, score in scores.items()} == {
        "chat": 1,
        "tool_call": 1,
    }

"""What a grammar lets through, with the embedded model's tokenizer and without any model."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.api import Guide
from jaxserve.metrics.metrics import Metrics
from jaxserve.server.chat_formats.choose import HERMES
from jaxserve.server.request.schema import ToolFunction
from jaxserve.structured import GrammarError, Guides, Thinking, grammars
from jaxserve.tokenizer import HfTokenizer, Tokenizer
from jaxserve_checkpoints.resolve import embedded_model
from tests.structured.following import accepts, allowed, random_text

type Compile = Callable[..., Guide]


# JSON schemas.

SCHEMAS: list[dict[str, Any]] = [
    {"type": "object"},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "integer", "minimum": -7, "exclusiveMaximum": 312},
    {"type": "number", "multipleOf": 0.5},
    {"enum": ["a", 1, None, True, {"b": [1.5, "é\n"]}]},
    {"const": {"x": [1, {}]}},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "null"}, {"type": "integer"}], "items": False},
    {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^[a-c]+$"}]},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "pattern": "^(\\+1)?[0-9]{3}-[0-9]{4}$"},
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "additionalProperties": {"type": "integer"},
        "patternProperties": {"^x_": {"type": "boolean"}},
    },
    {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
    },
    {"allOf": [{"type": "object", "required": ["a"]}, {"properties": {"a": {"type": "null"}}}]},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
async def test_random_tokens_that_a_schema_allows_are_json_of_that_schema(
    guides: Guides, tokenizer: Tokenizer, schema: dict[str, Any]
) -> None:
    guide = await guides.compile(grammars.json_schema(schema))
    complete = 0
    for seed in range(12):
        text = random_text(guide, tokenizer, seed, most=120)
        if text is not None:
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
            complete += 1
    assert complete >= 4, "hardly any text came to an end"


def json_schemas() -> st.SearchStrategy[dict[str, Any]]:
    leaves = st.sampled_from(
        [
            {"type": "null"},
            {"type": "boolean"},
            {"type": "integer"},
            {"type": "integer", "minimum": 3, "maximum": 1000},
            {"type": "number", "exclusiveMinimum": -2.5},
            {"type": "string", "maxLength": 6},
            {"type": "string", "pattern": "^[x-z]{1,3}$"},
            {"enum": ["red", 7, None]},
            {"const": [1, {"k": "v"}]},
        ]
    )
    names = st.sampled_from(["a", "b c", 'quo"te', "ü", "x_1"])

    def nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        objects = st.dictionaries(names, inner, max_size=3).flatmap(
            lambda properties: st.fixed_dictionaries(
                {
                    "type": st.just("object"),
                    "properties": st.just(properties),
                    "required": st.lists(st.sampled_from(sorted(properties)), unique=True)
                    if properties
                    else st.just([]),
                    "additionalProperties": st.one_of(st.just(False), inner),
                }
            )
        )
        arrays = st.fixed_dictionaries(
            {"type": st.just("array"), "items": inner, "maxItems": st.integers(0, 3)}
        )
        either = st.lists(inner, min_size=1, max_size=3).map(lambda schemas: {"anyOf": schemas})
        return objects | arrays | either

    return st.recursive(leaves, nested, max_leaves=6)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=json_schemas(), seed=st.integers(0, 2**32))
async def test_random_schemas_give_json_that_they_validate(
    guides: Guides, tokenizer: Tokenizer, schema: dict[str, Any], seed: int
) -> None:
    guide = await guides.compile(grammars.json_schema(schema))
    text = random_text(guide, tokenizer, seed, most=150)
    if text is not None:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "frob"},
        {"not": {"type": "string"}},
        {"type": "array", "uniqueItems": True},
        {"oneOf": [{"type": "string"}, {"minLength": 2}]},
        {"x-guidance": {"lenient": True}, "not": {"type": "string"}},
        {"x-guidance": {"coerce_one_of": True}, "oneOf": [{"type": "string"}, {"minLength": 2}]},
        {"type": "string", "pattern": "^[a-"},
        {"type": "string", "pattern": "(?=x)y"},
        {"type": "string", "format": "no-such-format"},
        {"$ref": "http://localhost/schema.json"},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"enum": []},
    ],
    ids=json.dumps,
)
async def test_what_cannot_be_guaranteed_is_refused(guides: Guides, schema: Any) -> None:
    with pytest.raises(GrammarError):
        await guides.compile(grammars.json_schema(schema))


async def test_a_schema_that_is_only_itself_is_refused_in_words(guides: Guides) -> None:
    with pytest.raises(GrammarError, match=r"^it cannot be compiled \(\w+\)$"):
        await guides.compile(grammars.json_schema({"$ref": "#"}))


async def test_white_space_comes_to_an_end(guides: Guides, tokenizer: Tokenizer) -> None:
    state = (await guides.compile(grammars.json_object())).start()
    state.advance(*tokenizer.encode("{"))
    (space,) = tokenizer.encode(" ")
    for _ in range(100):
        if space not in allowed(state):
            return
        state.advance(space)
    raise AssertionError("100 spaces in a row")


# Others.


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (grammars.regex(r"\d{3}-[a-f]+"), ["123-a", "000-fff"], ["12-a", "123-", "123-ag", ""]),
        (grammars.choice(["yes", "no", 'say "é"\n']), ["yes", 'say "é"\n'], ["yesno", "n", ""]),
        (grammars.choice(["", "a"]), ["", "a"], ["aa"]),
        (grammars.choice(["\0\x1f\x7f\x85\u2028"]), ["\0\x1f\x7f\x85\u2028"], ["\0\x1f"]),
        (grammars.grammar('start: "a" start | "b"'), ["b", "aab"], ["a", "ba", ""]),
        (grammars.grammar('root ::= "a" | b\nb ::= [0-9]+'), ["a", "007"], ["a1", ""]),
        (grammars.json_object(), ["{}", '{"a": [1, null]}', '{ "é": "\\n" }'], ["[]", "{,}", "1"]),
    ],
    ids=["regex", "choice", "empty_choice", "control_choice", "lark", "gbnf", "json_object"],
)
async def test_exactly_the_texts_of_a_grammar_are_accepted(
    guides: Guides, tokenizer: Tokenizer, grammar: str, right: list[str], wrong: list[str]
) -> None:
    guide = await guides.compile(grammar)
    assert [text for text in right if not accepts(guide, tokenizer, text)] == []
    assert [text for text in wrong if accepts(guide, tokenizer, text)] == []


@pytest.mark.parametrize("text", ["(a", r"(?<=x)y", "[z-a]"])
async def test_bad_expressions_are_refused(guides: Guides, text: str) -> None:
    with pytest.raises(GrammarError):
        await guides.compile(grammars.regex(text))


async def test_bad_or_huge_grammars_are_refused(guides: Guides) -> None:
    for text in ("", "start: missing", 'start: "a', "no grammar at all"):
        with pytest.raises(GrammarError):
            await guides.compile(grammars.grammar(text))
    with pytest.raises(GrammarError):
        await guides.compile(grammars.grammar('root ::= "a" ::= ('))
    with pytest.raises(GrammarError, match="nested too deeply"):
        await guides.compile(grammars.grammar("root ::= " + "(" * 5000 + '"a"' + ")" * 5000))
    with pytest.raises(GrammarError, match="surrogate"):
        await guides.compile(grammars.regex("\ud800"))
    with pytest.raises(GrammarError, match="characters"):
        await guides.compile(grammars.regex("a" * 300_000))


CITY = {
    "properties": {"city": {"$ref": "#/$defs/c"}},
    "required": ["city"],
    "$defs": {"c": {"enum": ["Bern", "Oslo"]}},
}
TOOLS = [ToolFunction(name="weather", parameters=CITY), ToolFunction(name='odd "name"')]


async def test_forced_calls_are_calls_and_nothing_else(
    guides: Guides, tokenizer: Tokenizer
) -> None:
    grammar = grammars.tool_calls(HERMES.rules(TOOLS, tokenizer.markers, 16))
    guide = await guides.compile(grammar)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    odd = '<tool_call>\n{"name": "odd \\"name\\"", "arguments": {"a": 1}}\n</tool_call>'
    assert accepts(guide, tokenizer, call) and accepts(guide, tokenizer, f"{call}\n{odd}")
    for wrong in ("", "Hello", call.replace("Oslo", "Rome"), call.replace("weather", "wether")):
        assert not accepts(guide, tokenizer, wrong)
    single = await guides.compile(grammars.tool_calls(HERMES.rules(TOOLS, tokenizer.markers, 1)))
    assert accepts(single, tokenizer, call) and not accepts(single, tokenizer, f"{call}\n{odd}")


async def test_a_marker_inside_a_string_is_not_the_marker(
    guides: Guides, tokenizer: Tokenizer
) -> None:
    state = (await guides.compile(grammars.json_schema({"type": "string"}))).start()
    state.advance(*tokenizer.encode('"'))
    assert not set(tokenizer.markers.values()) & set(allowed(state))


@pytest.mark.parametrize("text", ["<|im_end|>", "a <think>b", "e\u0301 \u1100\u1161 \u212b"])
async def test_what_a_grammar_leaves_no_choice_about_is_spelled_as_it_is(
    tokenizer: Tokenizer, text: str
) -> None:
    """A marker in it is text, and it is not normalised, as Qwen3's tokenizer does with prompts."""
    full = tokenizers.Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))
    full.normalizer = tokenizers.normalizers.NFC()
    normalising = HfTokenizer(full, eos_token_ids=tokenizer.eos_token_ids)
    guides = Guides(normalising, Metrics("tiny"))
    for grammar, spelled in (
        (grammars.choice([text]), text),
        (grammars.json_schema({"const": text}), json.dumps(text, ensure_ascii=False)),
    ):
        guide = await guides.compile(grammar)
        assert random_text(guide, normalising, seed=0, most=100) == spelled


# Thinking.


async def test_the_grammar_begins_after_the_think_block(
    guides: Guides, tokenizer: Tokenizer
) -> None:
    markers, ends = tokenizer.markers, tokenizer.eos_token_ids
    plain = allowed((await guides.compile(grammars.json_object())).start())

    state = (await guides.compile(grammars.json_object(), Thinking.MAY_OPEN)).start()
    assert set(allowed(state)) == {*plain, markers["<think>"]}
    state.advance(markers["<think>"])
    for token in tokenizer.encode("hm, {"):
        inside = set(allowed(state))
        assert token in inside and not inside & ends, "it may not end while it thinks"
        state.advance(token)
    assert markers["</think>"] in allowed(state)
    state.advance(markers["</think>"])
    assert allowed(state) == plain

    opened = (await guides.compile(grammars.json_object(), Thinking.OPEN)).start()
    assert markers["</think>"] in allowed(opened) and not set(allowed(opened)) & ends
    silent = (await guides.compile(grammars.json_object(), Thinking.MAY_OPEN)).start()
    silent.advance(plain[0])
    assert markers["<think>"] not in allowed(silent)

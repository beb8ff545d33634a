"""What a grammar lets through, with the embedded model's tokenizer and without any model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.api import Guide, GuideState
from jaxserve.grammar_server.wire import Grammar
from jaxserve.metrics.metrics import Metrics
from jaxserve.server.chat_formats.choose import HERMES
from jaxserve.server.request.schema import ToolFunction
from jaxserve.structured import GrammarError, Guides, Thinking, grammars
from jaxserve.tokenizer import ByteTokenizer, HfTokenizer, Tokenizer, decode
from jaxserve_checkpoints.resolve import embedded_model

type Compile = Callable[..., Guide]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return HfTokenizer.from_folder(embedded_model())


@pytest.fixture(scope="module")
def guides(tokenizer: Tokenizer) -> Iterator[Guides]:
    made = Guides(tokenizer, Metrics("tiny"))
    yield made
    made.close()


def allowed(state: GuideState) -> list[int]:
    assert state.wait(10) and state.error is None, state.error
    bits = np.unpackbits(np.frombuffer(state.mask, np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def accepts(guide: Guide, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the text, in any spelling by tokens, is complete under the grammar."""
    state = guide.start()
    for token in tokenizer.encode(text):
        if token not in allowed(state):
            return False
        state.advance(token)
    return bool(tokenizer.eos_token_ids & set(allowed(state)))


def random_text(guide: Guide, tokenizer: Tokenizer, seed: int, most: int) -> str | None:
    """What uniformly random tokens give; None if it is not complete after `most` of them.

    After half of them an end is taken as soon as there is one, and short tokens are preferred.
    """
    rng, state, tokens = np.random.default_rng(seed), guide.start(), list[int]()
    while len(tokens) < most:
        ids = allowed(state)
        ends = [i for i in ids if i in tokenizer.eos_token_ids]
        if ends and (len(ends) == len(ids) or len(tokens) > most // 2 or rng.random() < 0.1):
            return decode(tokenizer, tokens)
        ids = [i for i in ids if i not in tokenizer.eos_token_ids]
        if len(tokens) > most // 2:
            closing = [i for i in ids if tokenizer.token_bytes(i) in (b'"', b"}", b"]", b"0", b",")]
            ids = closing or ids
        tokens.append(int(rng.choice(ids)))
        state.advance(tokens[-1])
    return None


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


# The machinery.


async def test_sequences_of_one_guide_do_not_share_their_place(
    guides: Guides, tokenizer: Tokenizer
) -> None:
    guide = await guides.compile(grammars.choice(["abc", "xyz"]))
    first, second = guide.start(), guide.start()
    first.advance(*tokenizer.encode("a"))
    second.advance(*tokenizer.encode("x"))
    assert not set(allowed(first)) & set(allowed(second))
    assert len(allowed(guide.start())) > len(allowed(first))


async def test_a_token_that_the_mask_forbids_is_an_error(
    guides: Guides, tokenizer: Tokenizer
) -> None:
    state = (await guides.compile(grammars.choice(["abc"]))).start()
    state.advance(*tokenizer.encode("x"))
    assert state.wait(10) and state.error is not None


@pytest.fixture
async def byte_guides() -> AsyncIterator[Guides]:
    made = Guides(ByteTokenizer(), Metrics("bytes"))
    yield made
    made.close()


async def test_a_tokenizer_without_an_end_gets_one(byte_guides: Guides) -> None:
    state = (await byte_guides.compile(grammars.choice(["é"]))).start()
    for byte in "é".encode():
        assert allowed(state) == [byte]
        state.advance(byte)
    assert allowed(state) == [256]


async def test_errors_are_short_and_compiled_grammars_are_kept(guides: Guides) -> None:
    with pytest.raises(GrammarError) as caught:
        await guides.compile(grammars.grammar("start: " + "x" * 5000))
    assert len(str(caught.value)) <= 500
    grammar = grammars.choice(["kept"])
    first, second = await guides.compile(grammar), await guides.compile(grammar)
    assert first.compiled is second.compiled


async def test_a_grammar_that_many_ask_for_at_once_is_compiled_once(
    guides: Guides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the last ones of many would wait for longer than they may."""
    compiled: list[Grammar] = []
    compile_one = guides._compiler.compile

    def counted(grammar: Grammar, tenant: str) -> Any:
        compiled.append(grammar)
        return compile_one(grammar, tenant)

    monkeypatch.setattr(guides._compiler, "compile", counted)
    good, bad = grammars.choice(["at", "once"]), grammars.regex("(at once")
    made = await asyncio.gather(*(guides.compile(good) for _ in range(8)))
    assert len({id(guide.compiled) for guide in made}) == len(compiled) == 1
    told = await asyncio.gather(*(guides.compile(bad) for _ in range(8)), return_exceptions=True)
    assert {type(each) for each in told} == {GrammarError} and len(compiled) == 2


def followed(guide: Guide, most: int) -> int:
    """Tokens until the grammar cannot be followed any further."""
    state, rng = guide.start(), np.random.default_rng(0)
    for count in range(most):
        assert state.wait(10)
        if state.error is not None:
            return count
        state.advance(int(rng.choice(sorted({*allowed(state)} - guide.end_token_ids))))
    return most


async def test_a_grammar_that_met_a_limit_is_compiled_anew(guides: Guides) -> None:
    """Copies share llguidance's states: the next request met the limit at its first token."""
    grammar = grammars.regex("((a{1,100}){1,100}){1,100}")
    first = followed(await guides.compile(grammar), 400)
    assert 1 < first < 400
    assert followed(await guides.compile(grammar), 400) == first


async def test_a_grammar_that_many_tokens_have_followed_is_compiled_anew_meanwhile(
    guides: Guides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it."""
    monkeypatch.setattr("jaxserve.structured.guides.SHARED_TOKENS", 20)
    grammar = grammars.regex("[ab]{100}")
    first = await guides.compile(grammar)
    assert (await guides.compile(grammar)).compiled is first.compiled
    assert followed(first, 21) == 21
    compiling, compile_again = asyncio.Event(), guides._compiler.compile

    async def late(grammar: Grammar, tenant: str) -> Any:
        await compiling.wait()
        return await compile_again(grammar, tenant)

    monkeypatch.setattr(guides._compiler, "compile", late)
    assert (await guides.compile(grammar)).compiled is first.compiled
    compiling.set()
    async with asyncio.timeout(10):
        while (await guides.compile(grammar)).compiled is first.compiled:
            await asyncio.sleep(0.01)

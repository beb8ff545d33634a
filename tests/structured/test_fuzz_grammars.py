"""Whatever a client sends as a grammar is followed or refused in words, and costs what it may."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.api import FinishReason
from jaxserve.grammar_server.wire import Grammar, Limits
from jaxserve.metrics.metrics import Metrics
from jaxserve.server.chat_formats.choose import TOOL_FORMATS
from jaxserve.server.chat_formats.tool_format import ToolFormat
from jaxserve.server.request.schema import ToolFunction
from jaxserve.structured import GrammarError, Guides, grammars
from jaxserve.structured.compiling import CompileLimits
from tests.fakes import tiny_tokenizer

LIMITS = CompileLimits(quick_seconds=0.3, seconds=1.0, process=Limits(process_bytes=64 * 2**20))
MAX_SECONDS = 15.0
"""For one grammar on a busy machine; what it may take of a processor is 1.3."""

names = st.sampled_from(["a", "b", "c", "d0", "d1", "ü", 'quo"te', "x" * 300, ""])
numbers = (
    st.integers(-3, 3)
    | st.sampled_from([10**8, 10**18, -(10**30), 99999989, 0.1, 1e-300, 1e300])
    | st.floats(allow_nan=False, allow_infinity=False)
)
sizes = st.sampled_from([0, 1, 2, 50, 1000, 10**6, 10**9, -1])

# Regular expressions: mostly valid ones, and any text of their characters.

atoms = st.sampled_from(
    [
        ".",
        "a",
        "[a-z]",
        "[^b]",
        r"\d",
        r"\w",
        r"\p{L}",
        r"\b",
        "é",
        "^",
        "$",
        r"\x{10FFFF}",
        "(?i)k",
    ]
)
repeats = st.sampled_from(["*", "+", "?", "{3}", "{0,1000}", "{100,}", "{1,100000}", "*?"])
expressions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, repeats).map(lambda pair: f"({pair[0]}){pair[1]}"),
        st.lists(inner, min_size=2, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=4).map(lambda each: f"({'|'.join(each)})"),
        inner.map(lambda each: f"(?={each})"),
    ),
    max_leaves=12,
) | st.text("()[]{}|*+?.^$\\ab019,-é", max_size=40)

# JSON schemas: any keyword with any of its values, or with those of others.

references = st.sampled_from(
    ["#", "#/$defs/a", "#/$defs/b", "#/$defs/c", "#/properties/a", "#/nowhere", "http://x/y", "a"]
)
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
leaves = st.one_of(
    st.just({}),
    st.booleans(),
    st.sampled_from(
        [{"type": t} for t in ("null", "boolean", "integer", "number", "string", "object", "array")]
    ),
    references.map(lambda ref: {"$ref": ref}),
    st.fixed_dictionaries({"enum": st.lists(numbers | names | st.none(), max_size=4)}),
    st.fixed_dictionaries({"const": numbers | names}),
    st.fixed_dictionaries({"type": st.just("string"), "pattern": expressions}),
    st.fixed_dictionaries(
        {"type": st.just("string")}, optional={"minLength": sizes, "maxLength": sizes}
    ),
    st.fixed_dictionaries({"format": st.sampled_from(["date-time", "email", "uri", "ipv6", "?"])}),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional=dict.fromkeys(BOUNDS, numbers),
    ),
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, max_size=4)
    named = st.dictionaries(names, inner, max_size=4)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "array", ["array", "null"], 7]),
            "properties": named,
            "patternProperties": st.dictionaries(expressions, inner, max_size=2),
            "additionalProperties": inner,
            "required": st.lists(names, max_size=3),
            "minProperties": sizes,
            "items": inner,
            "prefixItems": several,
            "minItems": sizes,
            "maxItems": sizes,
            "uniqueItems": st.booleans(),
            "allOf": several,
            "anyOf": several,
            "oneOf": several,
            "not": inner,
            "if": inner,
            "$defs": named,
            "$id": names,
            "$anchor": names,
            "x-guidance": st.just({"lenient": True}),
        },
    )


schemas = st.recursive(leaves, nested, max_leaves=12).filter(lambda each: isinstance(each, dict))

# Lark and GBNF: rules of each other, with what llguidance adds to the language.

symbols = st.sampled_from(
    [
        *("start", "r0", "r1", "r2", "T0", "T1", '"a"', '"é\\n"', '""', "/[a-z]+/", "/(/", "<[5]>"),
        *(
            "<|im_end|>",
            "(",
            ")",
            "|",
            "*",
            "+",
            "?",
            "{2,1000}",
            "~3",
            '%json {"type": "integer"}',
        ),
        *("[", "]", "root", "[a-z]", "[^", ".", "& /b/", "~ /b/", "%regex {}", "%lark { start: }"),
    ]
)
bodies = st.lists(symbols, max_size=12).map(" ".join)
heads = st.sampled_from(["start", "r0", "r1", "r2", "T0", "T1", "r0[lazy]", "T0[capture]", "root"])


def rules(arrow: str) -> st.SearchStrategy[str]:
    rule = st.tuples(heads, bodies).map(lambda pair: f"{pair[0]}{arrow} {pair[1]}")
    start = "start" if arrow == ":" else "root"
    first = bodies.map(lambda body: f"{start}{arrow} {body}")
    return st.tuples(first, st.lists(rule, max_size=6)).map(lambda p: "\n".join([p[0], *p[1]]))


def calls_of(tool_format: ToolFormat, name: str, schema: dict[str, Any]) -> Grammar:
    """The forced calls of one tool; any object where the format cannot follow its schema."""
    for parameters in (schema, {}):
        tool = ToolFunction(name=name or "f", parameters=parameters)
        try:
            return grammars.tool_calls(tool_format.rules([tool], {"<tool_call>": 258}, 16))
        except GrammarError:
            continue
    raise AssertionError("any object can be followed")


texts = rules(":") | rules(" ::=") | st.text(max_size=60)
sources = st.one_of(
    schemas.map(grammars.json_schema),
    expressions.map(grammars.regex),
    texts.map(grammars.grammar),
    st.tuples(st.sampled_from(list(TOOL_FORMATS.values())), names, schemas).map(
        lambda each: calls_of(each[0], each[1], each[2])
    ),
)


@pytest.fixture(scope="module")
def guides() -> Iterator[Guides]:
    made = Guides(tiny_tokenizer(), Metrics("tiny"), limits=LIMITS)
    yield made
    made.close()


def server(guides: Guides) -> int | None:
    processes = guides._compiler._processes
    return None if processes is None or processes.ended else processes.pid


def resident_mib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
@given(grammar=sources, seed=st.integers(0, 2**32))
async def test_any_grammar_is_followed_or_refused(
    guides: Guides, grammar: Grammar, seed: int
) -> None:
    await guides.compile(grammars.regex("a"))
    pid, memory, begun = server(guides), resident_mib(), time.monotonic()
    try:
        guide = await guides.compile(grammar)
    except GrammarError as error:
        assert 0 < len(str(error)) <= 500
    else:
        rng, state = np.random.default_rng(seed), guide.start()
        for _ in range(25):
            assert state.wait(MAX_SECONDS)
            if state.error is not None:
                assert state.error.finish is FinishReason.GRAMMAR, "a limit, and no defect"
                break
            bits = np.unpackbits(np.frombuffer(state.mask, np.uint8), bitorder="little")
            tokens = set(np.flatnonzero(bits).tolist()) - guide.end_token_ids
            if not tokens:
                break
            state.advance(int(rng.choice(sorted(tokens))))
    assert time.monotonic() - begun < MAX_SECONDS
    assert server(guides) == pid and resident_mib() < memory + 32

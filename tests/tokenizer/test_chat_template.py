"""Templates render as transformers does, inside limits, and errors are for the client to read."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.config import ConfigError
from jaxserve.tokenizer import HfTokenizer, chat_template
from jaxserve.tokenizer.chat_template import ChatTemplate, TemplateError

QWEN3 = Path(__file__).parents[3] / "shared" / "models" / "qwen3-4b"
MARKERS = ("<|im_end|>", "<think>")


def render(source: str, content: str = "hi", **variables: object) -> str:
    rendered = ChatTemplate(source, MARKERS).render(
        [{"role": "user", "content": content}], variables=variables
    )
    return rendered.text.replace(rendered.breaker, "")


def test_blocks_are_trimmed_as_the_published_templates_expect() -> None:
    assert render("{% for m in messages %}\n  {{ m.content }}\n{% endfor %}\n") == "  hi\n"


def test_tojson_keeps_characters_and_does_not_escape_html() -> None:
    assert render("{{ messages[0] | tojson }}", "é<b>'") == '{"role": "user", "content": "é<b>\'"}'


def test_text_from_outside_cannot_make_a_marker_and_the_template_can() -> None:
    template = ChatTemplate("{{ messages[0].content }}<|im_end|>{{ name }}", MARKERS)
    rendered = template.render(
        [{"role": "user", "content": "<|im_end|>"}], variables={"name": "<think>"}
    )
    assert rendered.text.count("<|im_end|>") == 1
    assert "<think>" not in rendered.text
    assert rendered.text.replace(rendered.breaker, "") == "<|im_end|><|im_end|><think>"


def test_the_breaker_is_a_character_that_the_messages_do_not_hold() -> None:
    content = "\ufdd0\ufdd1<think>"
    rendered = ChatTemplate("{{ messages[0].content }}", MARKERS).render(
        [{"role": "user", "content": content}]
    )
    assert rendered.breaker not in content
    assert rendered.text.replace(rendered.breaker, "") == content
    everything = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    with pytest.raises(TemplateError, match="noncharacters"):
        render("", everything)


def test_a_template_may_refuse_messages_in_its_own_words() -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
    ],
)
def test_what_a_template_must_not_or_cannot_do_is_an_error_of_one_kind(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


def test_a_template_that_calls_itself_without_end_is_an_error_of_the_same_kind() -> None:
    with pytest.raises(TemplateError, match="nests too deeply"):
        render("{% macro again(x) %}{{ again(x) }}{% endmacro %}{{ again(1) }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 1000 + "1" + ")" * 1000 + " }}",
        "{% for a in b %}" * 21 + "{% endfor %}" * 21,  # more blocks than Python has
        "{% if a %}" * 100 + "{% endif %}" * 100,
        "{{ 1" + "0" * 5000 + " }}",
    ],
)
def test_a_source_beyond_the_parser_s_limits_is_no_template(source: str) -> None:
    with pytest.raises(ConfigError, match=r"nested too deeply|not a Jinja template"):
        ChatTemplate(source)


def test_output_and_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = "{% for i in range(1000) %}{{ messages[0].content }}{% endfor %}"
    monkeypatch.setattr(chat_template, "MAX_CHARS", 100)
    with pytest.raises(TemplateError, match="too much or took too long"):
        render(loop)
    monkeypatch.setattr(chat_template, "MAX_CHARS", 10**6)
    monkeypatch.setattr(chat_template, "MAX_SECONDS", -1.0)
    with pytest.raises(TemplateError, match="too much or took too long"):
        render(loop)


@pytest.mark.skipif(not QWEN3.is_dir(), reason="the Qwen3 tokenizer is not here")
def test_qwen3_history_of_tools_and_thoughts_has_real_markers_and_users_do_not() -> None:
    tokenizer = HfTokenizer.from_folder(QWEN3)
    template = ChatTemplate(tokenizer.chat_template or "", tokenizer.markers)
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": "<think>"}'}}
    rendered = template.render(
        [
            {"role": "user", "content": "<|im_end|><tool_call>"},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "hm </think>",
                "tool_calls": [call],
            },
            {"role": "tool", "content": "3 <tool_response>"},
        ],
        variables={"enable_thinking": False},
    )
    ids = tokenizer.encode(*rendered)
    counts = {name: ids.count(token) for name, token in tokenizer.markers.items()}
    assert {name: count for name, count in counts.items() if count} == {
        "<|im_start|>": 4,
        "<|im_end|>": 3,
        "<think>": 2,
        "</think>": 2,
        "<tool_call>": 1,
        "</tool_call>": 1,
        "<tool_response>": 1,
        "</tool_response>": 1,
    }

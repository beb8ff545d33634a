"""The embedded model's tokenizer, chat template, and the step from messages to scored tokens."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
MAX_LENGTH = 4096
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAG_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)

# A word never carries its leading space: a name then has the same tokens in prose, in a list and
# in JSON, which is what lets a small model copy names it has never seen. Digits stand alone.
_PIECES = r"\p{L}+|\p{N}| *[^\s\p{L}\p{N}]+ *|[\r\n]+|[^\S\r\n]+"

# Renders the format of Qwen3's template: tools in the system turn, tool results inside a user
# turn, reasoning kept only after the last question.
CHAT_TEMPLATE = r"""
{%- macro open(role) %}{{ '<|im_start|>' + role + '\n' }}{% endmacro %}
{%- set close = '<|im_end|>\n' %}

{%- macro tool_section() %}
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for tool in tools %}{{ '\n' ~ (tool | tojson) }}{% endfor %}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and ' }}
    {{- 'arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' }}
{%- endmacro %}

{%- macro tool_call(call) %}
    {%- set function = call.function or call %}
    {%- set arguments = function.arguments %}
    {{- '<tool_call>\n{"name": "' ~ function.name ~ '", "arguments": ' }}
    {{- arguments if arguments is string else arguments | tojson }}
    {{- '}\n</tool_call>' }}
{%- endmacro %}

{%- set system = messages[0].content if messages[0].role == 'system' %}
{%- if tools %}
    {{- open('system') ~ (system ~ '\n\n' if system is string) }}
    {{- tool_section() ~ close }}
{%- elif system is string %}
    {{- open('system') ~ system ~ close }}
{%- endif %}

{%- set last = namespace(question=messages | length - 1) %}
{%- for message in messages %}
    {%- set text = message.content or '' %}
    {%- set is_result = text[:15] == '<tool_response>' and text[-16:] == '</tool_response>' %}
    {%- if message.role == 'user' and not is_result %}
        {%- set last.question = loop.index0 %}
    {%- endif %}
{%- endfor %}

{%- for message in messages %}
    {%- set text = message.content or '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- open(message.role) ~ text ~ close }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content or '' %}
        {%- if not reasoning and '</think>' in text %}
            {%- set reasoning = text.split('</think>')[0].split('<think>')[-1] %}
            {%- set text = text.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- open('assistant') }}
        {%- if loop.index0 > last.question and (loop.last or reasoning) %}
            {{- '<think>\n' ~ reasoning.strip('\n') ~ '\n</think>\n\n' }}
            {%- set text = text.lstrip('\n') %}
        {%- endif %}
        {{- text }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n' if text or not loop.first }}
            {{- tool_call(call) }}
        {%- endfor %}
        {{- close }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
        {{- '\n<tool_response>\n' ~ text ~ '\n</tool_response>' }}
        {{- close if loop.last or loop.nextitem.role != 'tool' }}
    {%- endif %}
{%- endfor %}

{%- if add_generation_prompt %}
    {{- open('assistant') }}
    {{- '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking }}
{%- endif %}
"""


Message = dict[str, Any]


class ScoredTokens(NamedTuple):
    """Token ids, and for each whether the model is trained to produce it."""

    ids: list[int]
    scored: list[bool]


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, reasoning: str = "") -> Message:
    message = {"role": "assistant", "content": text}
    return message | {"reasoning_content": reasoning} if reasoning else message


def turn(question: str, answer: str, reasoning: str = "") -> list[Message]:
    """A question and its answer."""
    return [user(question), assistant(answer, reasoning)]


def _to_json(value: Any, indent: int | None = None) -> str:
    """The `tojson` filter of chat templates: plain JSON, neither sorted nor escaped for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


@cache
def _template() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _to_json
    return environment.from_string(CHAT_TEMPLATE)


def render(
    messages: list[Message],
    tools: list[dict[str, Any]] | None = None,
    *,
    prompt: bool = False,
    thinking: bool = True,
) -> str:
    """The text of a chat; with `prompt` it ends where the assistant's next answer begins."""
    return _template().render(
        messages=messages, tools=tools, add_generation_prompt=prompt, enable_thinking=thinking
    )


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE of VOCAB_SIZE entries: merges, then the added tokens, then spare ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE - 16,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in TAG_TOKENS])
    return tokenizer


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The contents of tokenizer_config.json."""
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in SPECIAL_TOKENS,
        }
        for token in SPECIAL_TOKENS + TAG_TOKENS
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE.lstrip("\n"),
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": MAX_LENGTH,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


class Encoder:
    """Turns chats into tokens, and marks the ones that are the model's to produce."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._start, self._end, self._think, self._think_end = (
            tokenizer.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
        )
        self._assistant = self.ids("assistant\n")
        self._empty_thought = self.ids("<think>\n\n</think>\n\n")

    @classmethod
    def load(cls, folder: Path) -> "Encoder":
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")))

    @property
    def stop_ids(self) -> tuple[int, int]:
        return self._end, self._tokenizer.token_to_id("<|endoftext|>")

    def ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def lengths(self, texts: list[str]) -> list[int]:
        """The number of tokens of each text."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [len(encoding.ids) for encoding in encodings]

    def text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def scored(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        *,
        thinking: bool,
    ) -> ScoredTokens:
        """A finished chat, scored on every assistant turn up to and with its <|im_end|>.

        Two things are left unscored because serving never asks for them: the first token of a
        past turn (there the template drops the think block that the model really began with),
        and, with thinking off, the empty think block that the prompt already holds.
        """
        ids = self.ids(render(messages, tools))
        scored = [False] * len(ids)
        header = len(self._assistant)
        starts = [
            i + 1 + header
            for i, token in enumerate(ids)
            if token == self._start and ids[i + 1 : i + 1 + header] == self._assistant
        ]
        for start in starts:
            stop = ids.index(self._end, start) + 1
            if start != starts[-1]:
                start += 1
            elif not thinking:
                start += len(self._empty_thought)
            scored[start:stop] = [True] * (stop - start)
        return ScoredTokens(ids, scored)

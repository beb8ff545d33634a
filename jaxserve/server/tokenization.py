"""POST /tokenize and /detokenize, in vLLM's shape."""

from __future__ import annotations

import msgspec
from aiohttp import web

from jaxserve.server.errors import json_response
from jaxserve.server.output.logprobs import token_text
from jaxserve.server.reply import ignored_header
from jaxserve.server.request.params import check_token_ids
from jaxserve.server.request.parse import parse, read_json
from jaxserve.server.request.prompts import chat_prompt
from jaxserve.server.request.schema import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from jaxserve.server.service import SERVICE
from jaxserve.server.shapes import Detokenized, Tokenized
from jaxserve.tokenizer import decode, encode_off_loop


class _Messages(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw()


async def tokenize(request: web.Request) -> web.Response:
    """The tokens of a text, or of the prompt that a chat would have."""
    service = request.app[SERVICE]
    body = await read_json(request)
    if _has_messages(body):
        fields, ignored = parse(body, TokenizeChatRequest)
        service.model_name(fields.model)
        limits = service.engine.limits
        ids = (await chat_prompt(fields, service.template, service.tokenizer, limits)).ids
    else:
        fields, ignored = parse(body, TokenizeRequest)
        service.model_name(fields.model)
        ids = await encode_off_loop(service.tokenizer, fields.prompt)
    tokenizer = service.tokenizer
    answer = Tokenized(
        count=len(ids),
        max_model_len=service.engine.limits.max_model_len,
        tokens=ids,
        token_strs=[token_text(tokenizer, i) for i in ids] if fields.return_token_strs else None,
    )
    return json_response(answer, headers=ignored_header(service, ignored))


async def detokenize(request: web.Request) -> web.Response:
    """The text of tokens, markers included."""
    service = request.app[SERVICE]
    fields, ignored = parse(await read_json(request), DetokenizeRequest)
    service.model_name(fields.model)
    check_token_ids(fields.tokens, service.engine.limits, "tokens")
    text = decode(service.tokenizer, fields.tokens, skip_special=False)
    return json_response(Detokenized(prompt=text), headers=ignored_header(service, ignored))


def _has_messages(body: bytes) -> bool:
    try:
        return bytes(msgspec.json.decode(body, type=_Messages).messages) not in (b"", b"null")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False  # `parse` says what is wrong

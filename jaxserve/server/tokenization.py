"""POST /tokenize and /detokenize, in vLLM's format."""

from __future__ import annotations

import msgspec
from aiohttp import web

from jaxserve.server.access import service_of
from jaxserve.server.errors import json_response
from jaxserve.server.off_loop import check_wanted, lane, off_loop
from jaxserve.server.output.logprobs import token_text
from jaxserve.server.reply import ignored_header
from jaxserve.server.request.parse import parse, read_json
from jaxserve.server.request.prompts import rendered_chat
from jaxserve.server.request.schema import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from jaxserve.server.request.validation import check_token_ids
from jaxserve.server.service import Service
from jaxserve.server.shapes import Detokenized, Tokenized
from jaxserve.tokenizer import decode


class _Messages(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw()


async def tokenize(request: web.Request) -> web.Response:
    """Answers with the tokens of a text or of a chat's prompt."""
    service, body = service_of(request), await read_json(request)
    answer, ignored = await off_loop(lane(len(body)), _tokenized, service, body)
    return json_response(answer, headers=ignored_header(service, ignored))


async def detokenize(request: web.Request) -> web.Response:
    """Answers with the text of tokens, special tokens included."""
    service, body = service_of(request), await read_json(request)
    answer, ignored = await off_loop(lane(len(body)), _detokenized, service, body)
    return json_response(answer, headers=ignored_header(service, ignored))


def _tokenized(service: Service, body: bytes) -> tuple[Tokenized, tuple[str, ...]]:
    tokenizer = service.tokenizer
    if _has_messages(body):
        fields, ignored, _ = parse(body, TokenizeChatRequest)
        service.model_name(fields.model)
        prompt = rendered_chat(fields, service.chats, tokenizer)
        ids, ignored = prompt.ids, (*ignored, *prompt.ignored)
    else:
        fields, ignored, _ = parse(body, TokenizeRequest)
        service.model_name(fields.model)
        prefix = fields.add_special_tokens is not False
        ids = tokenizer.encode(fields.prompt, "", lambda _: check_wanted(), prefix=prefix)
    answer = Tokenized(
        count=len(ids),
        max_model_len=service.engine.limits.max_model_len,
        tokens=ids,
        token_strs=[token_text(tokenizer, i) for i in ids] if fields.return_token_strs else None,
    )
    return answer, ignored


def _detokenized(service: Service, body: bytes) -> tuple[Detokenized, tuple[str, ...]]:
    fields, ignored, _ = parse(body, DetokenizeRequest)
    service.model_name(fields.model)
    check_token_ids(fields.tokens, service.engine.limits, "tokens")
    text = decode(service.tokenizer, fields.tokens, skip_special=False)
    return Detokenized(prompt=text), ignored


def _has_messages(body: bytes) -> bool:
    try:
        return bytes(msgspec.json.decode(body, type=_Messages).messages) not in (b"", b"null")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False  # `parse` reports the error

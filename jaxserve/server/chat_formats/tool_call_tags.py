"""The grammar of calls between `<tool_call>` and `</tool_call>`, one call in each pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxserve.grammar_server.wire import Grammar
from jaxserve.structured import grammars

CALL, END_CALL = "<tool_call>", "</tool_call>"


def tagged_calls(
    bodies: Sequence[str], inputs: Mapping[str, Grammar], markers: Mapping[str, int], most: int
) -> grammars.CallRules:
    """Returns the grammar of one to `most` calls.

    Args:
      bodies: rules. The rule `body` matches the text between the tags, after a line break.
      inputs: grammars that these rules refer to.
      markers: token ids by spelling.
    """
    call, end_call = (grammars.marker(each, markers) for each in (CALL, END_CALL))
    lines = [
        f'calls: call ("\\n" call){{0,{most - 1}}}' if most > 1 else "calls: call",
        f'call: {call} "\\n" body {end_call}',
        *bodies,
    ]
    among_text = "text? call?" if most == 1 else f"text? (call text?){{0,{most}}}"
    return grammars.CallRules(lines, inputs, among_text if CALL in markers else None)

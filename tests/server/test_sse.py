"""Events on the wire."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.server.sse import TextEvent, data_event


@given(text=st.text())
def test_an_event_made_around_a_text_is_the_event_of_that_text(text: str) -> None:
    def body(text: str) -> dict[str, Any]:
        return {"id": "text", "delta": {"reasoning": text, "reasoning_content": text}, "index": 0}

    assert TextEvent(body)(text) == data_event(body(text))

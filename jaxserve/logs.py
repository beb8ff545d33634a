"""Log formats: text for people, and one JSON object per line for log collectors."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

import msgspec

FORMATS = ("text", "json")


def configure(level: str, form: str) -> None:
    """Sends all log records to stderr. `form` is one of FORMATS."""
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])


class JsonFormatter(logging.Formatter):
    """Writes `time` (UTC), `level`, `logger` and `message`; `exception`, if there is one; and the
    fields that the caller passed as `extra={"fields": ...}`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()

"""What log lines look like: text for people, or one JSON object a line (`--log-format`)."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

LOG_FORMATS = ("text", "json")
ACCESS_LOG = "megatron_hybrid.access"  # the logger of requests that have ended
_PLAIN = re.compile(r"[\w.:/@<>+-]+", re.ASCII)  # needs no quotes
_FIELDS = "fields"


def set_up_logging(log_format: str, process: str, text: str, level: int) -> None:
    """For all of this process. process: its name in JSON; text: the beginning of a line of text,
    up to the message, as `logging.Formatter` wants it."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter(process) if log_format == "json" else TextFormatter(f"{text}%(message)s")
    )
    logging.basicConfig(level=level, handlers=[handler])


def log_fields(logger: logging.Logger, level: int, message: str, fields: dict[str, Any]) -> None:
    """A line with fields: members of the object in JSON, name=value in text. What clients send may
    be in them: whatever is not printable ASCII is escaped."""
    logger.log(level, message, extra={_FIELDS: fields})


class TextFormatter(logging.Formatter):
    """The message, then name=value for each field."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The message, and its fields behind it."""
        line = super().formatMessage(record)
        fields: dict[str, Any] = getattr(record, _FIELDS, {})
        return " ".join([line, *(f"{name}={_quoted(value)}" for name, value in fields.items())])


class JsonFormatter(logging.Formatter):
    """time (ISO 8601), level, process, pid, logger, message, the fields, exception."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03d"

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        line: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _quoted(value: Any) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)

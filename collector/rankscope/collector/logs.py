"""How a collector's log is written: lines for people, or one JSON object a line."""

import json
import logging

FORMATS = ("text", "json")


class JsonFormatter(logging.Formatter):
    """`time` (seconds since the epoch), `level`, `logger`, `message`, and `exception` if any."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def begin(log_format: str) -> None:
    """Log to standard error; raises ValueError for a format that is none."""
    if log_format not in FORMATS:
        raise ValueError(f"{log_format!r} is not one of {', '.join(FORMATS)}")
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler])

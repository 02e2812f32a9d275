"""Calls a human: a webhook gets what was decided, as JSON."""

import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

VARIABLE = "ZAYA_WEBHOOK"
"""Holds the address. Not an option: it is a secret as often as not, and all can read a command line."""
LIMIT_SECONDS = 10.0


def page(text: str, about: Mapping[str, Any]) -> str | None:
    """Sends a sentence, and what it is about, to the webhook, if there is one.

    Args:
      text: a sentence. Slack, Mattermost and others show the field "text" of what they are sent.
      about: JSON.

    Returns:
      Why nobody was called; None where somebody was.
    """
    address = os.environ.get(VARIABLE)
    if not address:
        return f"{VARIABLE} is not set"
    body = json.dumps({"text": text, "host": socket.gethostname()} | dict(about)).encode()
    try:
        if not address.startswith(("https://", "http://")):
            raise ValueError("it must be an address of http or https")
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=LIMIT_SECONDS):
            return None
    # Whatever it is, a run does not end because nobody could be called; and the address stays unsaid.
    except (ValueError, OSError) as error:
        return f"the address in {VARIABLE} could not be called: {type(error).__name__}"

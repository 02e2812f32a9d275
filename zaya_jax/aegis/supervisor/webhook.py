"""Notification of a human through a webhook."""

import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from zaya_jax.errors import UserError

VARIABLE = "ZAYA_WEBHOOK"
"""Variable with the address of the webhook. It is not an option, because such addresses are often secret,
and all users of a machine can see its command lines."""
LIMIT_SECONDS = 10.0


def page(text: str, values: Mapping[str, Any]) -> str | None:
    """Posts a message to the webhook.

    Args:
      text: message. Slack, Mattermost and other services show the field "text" of the body.
      values: further JSON fields of the body.

    Returns:
      Why no webhook was called; None if it was called.
    """
    address = os.environ.get(VARIABLE)
    if not address:
        return f"{VARIABLE} is not set"
    body = json.dumps({"text": text, "host": socket.gethostname()} | dict(values)).encode()
    try:
        # `urlopen` would open files and FTP addresses as well.
        if not address.startswith(("https://", "http://")):
            raise UserError("it must be an address of http or https")
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=LIMIT_SECONDS):
            return None
    # A failed notification must not end the run. The error omits the address, which may be secret.
    except (ValueError, OSError) as error:
        return f"the address in {VARIABLE} could not be called: {type(error).__name__}"

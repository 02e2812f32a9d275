"""Chat templates: rendering messages, and turning the rendered text into tokens and loss masks."""

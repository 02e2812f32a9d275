"""OpenAI's API: validation of requests, responses, and streams."""

"""A server with OpenAI's interface over the engine: what is asked, how it is written, who may ask how much.

Starlette and uvicorn are an extra; only `command.py` is imported without them.
"""

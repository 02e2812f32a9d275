"""HTTP server with an OpenAI-compatible API and a chat page, on top of the inference engine.

The server needs the `serve` extra (Starlette, uvicorn, pydantic); only `command.py` can be imported without
it.
"""

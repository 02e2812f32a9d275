"""OpenAI's Responses API over the same engine: its requests become chats, and chats its responses."""

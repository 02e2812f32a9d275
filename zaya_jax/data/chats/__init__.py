"""Chats and preferences: records, and corpora of whole examples packed into windows."""

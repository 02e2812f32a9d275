"""The network as pure functions, and the Linen shell that declares its weights."""

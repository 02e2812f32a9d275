"""Using a trained network: how a token is drawn, and the loop that writes text token by token.

`sampling` turns logits into a token; `generate` runs prefill and decoding for a batch of prompts, or
streams one for a terminal.
"""

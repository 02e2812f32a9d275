"""A tokenizer with which no text can produce a special token, for documents and user input.

The option `encode_special_tokens` of the `tokenizers` package stops the search for special tokens in a text.
The model may still produce one if its vocabulary contains the token as a piece: in Unigram, "</s>" is a
piece; in BPE, it may result from a merge; in WordPiece and WordLevel, it is a word. A normalizer may also
turn other text into it. This module therefore renames the pieces to names that no text contains. Token ids
and the tokens of all other texts stay the same.
"""

import json
from collections.abc import Collection
from typing import Any

import tokenizers

# Name of a hidden piece. It contains noncharacters, which Unicode reserves for internal use in programs.
_HIDDEN = "\ufdd0%d\ufdd1"


def hide_tokens(fields: dict[str, Any], hidden: Collection[str]) -> tokenizers.Tokenizer:
    """Creates a tokenizer that never produces certain tokens, and otherwise encodes like the original.

    Args:
      fields: content of tokenizer.json.
      hidden: contents of the tokens to hide, including special tokens.
    """
    names = {token: _HIDDEN % i for i, token in enumerate(sorted(hidden))}
    added = [_hide_added(token, names) for token in fields["added_tokens"]]
    model = _hide_pieces(fields["model"], names)
    # The post-processor refers to special tokens by name. It adds nothing here, so it can be removed.
    changed = fields | {"added_tokens": added, "model": model, "post_processor": None}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(changed))
    tokenizer.encode_special_tokens = True
    return tokenizer


def _hide_added(token: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    if token["content"] not in names:
        return token
    # normalized=False: a normalizer could turn the name into one that a text contains. special=True: with
    # encode_special_tokens, the search ignores special tokens.
    flags = {"normalized": False, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
    return token | flags | {"content": names[token["content"]]}


def _hide_pieces(model: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    changed = dict(model)
    if model["type"] == "Unigram":
        # Keep the scores: the lowest one determines the score of unknown pieces.
        changed["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
        return changed
    changed["vocab"] = {names.get(piece, piece): id for piece, id in model["vocab"].items()}
    if model.get("unk_token") in names:
        changed["unk_token"] = names[model["unk_token"]]
    if model["type"] == "BPE":
        changed["merges"] = [
            pair for pair in model["merges"] if names.keys().isdisjoint(_pieces(pair, model))
        ]
    return changed


def _pieces(pair: list[str], model: dict[str, Any]) -> tuple[str, str, str]:
    """The two pieces of a merge and their result."""
    first, second = pair
    prefix = model["continuing_subword_prefix"] or ""
    return first, second, first + second[len(prefix) :]

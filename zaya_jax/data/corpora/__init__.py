"""Corpora: documents to shards of token blocks, in a training and a held-out split."""

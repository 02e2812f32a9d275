"""Reading corpora: the order of sequences, mixtures, batches, and the loader."""

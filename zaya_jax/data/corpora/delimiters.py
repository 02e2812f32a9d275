"""The tokens between the documents of a stream.

With a BOS token the stream is BOS document EOS BOS document EOS ... Many tokenizers have no BOS, or use one
token as BOS and EOS, as GPT-2 does. The stream is then EOS document EOS document EOS: as a target, EOS ends
the document before it; as an input, it starts the document after it.
"""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentDelimiters:
    """The tokens around documents.

    Attributes:
      bos_id: token that starts a document; None if EOS does that too.
      eos_id: token that ends a document.
      pad_id: padding token. It may equal EOS, because padding is recognized by its position.
    """

    bos_id: int | None
    eos_id: int
    pad_id: int

    @property
    def has_bos(self) -> bool:
        """Whether documents start with a token other than EOS."""
        return self.bos_id is not None and self.bos_id != self.eos_id

    @property
    def first_id(self) -> int:
        """The token that a model reads before the first token of a document."""
        return self.eos_id if self.bos_id is None else self.bos_id

    @property
    def opening(self) -> list[int]:
        """The tokens at the start of a stream, so that its first document also has a token before it."""
        return [] if self.has_bos else [self.eos_id]

    def wrap(self, ids: Iterable[int]) -> list[int]:
        """The tokens that a document adds to a stream."""
        # Without BOS the EOS of the previous document is also the start of this one.
        return [*self.begin(ids), self.eos_id] if self.has_bos else [*ids, self.eos_id]

    def begin(self, ids: Iterable[int]) -> list[int]:
        """The tokens of a document that has not ended, such as a prompt."""
        return [self.first_id, *ids]


# No token has the id -1, so that nothing in the stream counts as a delimiter.
NO_DELIMITERS = DocumentDelimiters(bos_id=None, eos_id=-1, pad_id=0)
"""For a stream that is a single document, such as the random tokens of benchmarks."""

"""How documents stand in a stream of tokens: the one place that says what lies between two of them.

With a token that begins documents the stream is BOS document EOS, BOS document EOS, ... Many tokenizers have
none, or one that is also their EOS, as GPT-2's. Then a single token lies between two documents, EOS document
EOS document EOS: as a target it ends the one, and as an input it begins the other.
"""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Borders:
    """The tokens around documents.

    Attributes:
      bos_id: begins a document; None where EOS does that too.
      eos_id: ends a document.
      pad_id: fills up what is too short. It may be EOS: what is padding is known by its place.
    """

    bos_id: int | None
    eos_id: int
    pad_id: int

    @property
    def has_bos(self) -> bool:
        """Whether a token of its own begins documents."""
        return self.bos_id is not None and self.bos_id != self.eos_id

    @property
    def first_id(self) -> int:
        """What a model reads before a document's own first token."""
        return self.eos_id if self.bos_id is None else self.bos_id

    @property
    def opening(self) -> list[int]:
        """What a stream begins with, so that its first document has a token before it too."""
        return [] if self.has_bos else [self.eos_id]

    def lay_out(self, ids: Iterable[int]) -> list[int]:
        """What a document adds to a stream."""
        return [*self.begin(ids), self.eos_id] if self.has_bos else [*ids, self.eos_id]

    def begin(self, ids: Iterable[int]) -> list[int]:
        """A document that has not ended, as a prompt is one."""
        return [self.first_id, *ids]


NO_BORDERS = Borders(bos_id=None, eos_id=-1, pad_id=0)
"""Of a stream that is one document: random tokens, as benchmarks read them."""

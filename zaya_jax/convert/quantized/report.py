"""What quantization costs: the section of a model card, and the same table for the terminal."""

import dataclasses
import pathlib

from zaya_jax.convert.model_card import CARD
from zaya_jax.convert.quantized.export import Quantization
from zaya_jax.convert.quantized.layer_errors import LayerError, error_rows
from zaya_jax.files import durable

_HEADING = "## Quantization"
_COLUMNS = ("layer", "weight", "relative error", "largest error")


@dataclasses.dataclass(frozen=True)
class HeldOutLoss:
    """Loss on held-out text before and after quantization.

    Attributes:
      texts: names of the text files.
      num_tokens: number of tokens that were scored.
      before: nats per token with the weights that were quantized.
      after: nats per token with the quantized weights.
    """

    texts: tuple[str, ...]
    num_tokens: int
    before: float
    after: float

    def __str__(self) -> str:
        # The sign tells at once whether quantization cost anything.
        change = self.after - self.before
        return (
            f"held-out loss: {self.before:.4f} nats per token before, {self.after:.4f} after ({change:+.4f}, "
            f"{change / self.before:+.2%}) on {self.num_tokens:,} tokens of {', '.join(self.texts)}"
        )


def table(errors: list[LayerError]) -> str:
    """The errors by layer as a Markdown table."""
    # Markdown is readable on a terminal too, so that both show the same table.
    rows = (_COLUMNS, ("---",) * len(_COLUMNS), *error_rows(errors))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def card_section(quantization: Quantization, errors: list[LayerError], loss: HeldOutLoss | str) -> str:
    """The section of a model card: what is quantized, errors by layer, and the loss.

    Args:
      quantization: what was quantized.
      errors: errors by layer.
      loss: losses before and after, or why they were not measured.
    """
    # A reader of the card must know what is rounded before comparing figures.
    embedding = " and the embedding in int8 with one scale per token" if quantization.embedding else ""
    scales = "a scale for 32 inputs" if quantization.codec.group_size else "one scale per output"
    return (
        f"{_HEADING}\n\nThe experts' matrices are stored in {quantization.format} with {scales}{embedding}, "
        "in the form of [compressed-tensors](https://github.com/vllm-project/compressed-tensors); everything "
        "else is in floating point. The relative error is the root of the mean squared error by that of the "
        "weights.\n\n"
        f"{table(errors)}\n\n{str(loss)[:1].upper()}{str(loss)[1:]}.\n"
    )


def add_to_card(folder: pathlib.Path, section: str) -> None:
    """Adds a section to the model card of a folder, or replaces the earlier one, and updates its checksum."""
    file = folder / CARD
    card = file.read_text(encoding="utf-8") if file.is_file() else ""
    # Cut at the heading: a conversion that is repeated replaces its own section, which is the last one.
    before = card.partition(_HEADING)[0].rstrip("\n")
    durable.write(file, f"{before}\n\n{section}".lstrip("\n"))
    # Written after the card: a crash in between is found by the checksums.
    checksums = durable.read_checksums(folder)
    durable.write_checksums(folder, checksums | {CARD: durable.sha256_of_file(file)})

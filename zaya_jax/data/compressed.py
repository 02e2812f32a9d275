"""What general compressors make of a text, for a model to be measured by."""

import lzma
import zlib


class CompressedSize:
    """What concatenated documents come to under gzip -9 and xz -9, without keeping them."""

    def __init__(self):
        self._gzip = zlib.compressobj(level=9, wbits=31)  # 31: gzip's header and trailer
        self._xz = lzma.LZMACompressor(preset=9)
        self._gzip_bytes = self._xz_bytes = 0

    def append(self, raw: bytes) -> None:
        """Takes the bytes of a document."""
        self._gzip_bytes += len(self._gzip.compress(raw))
        self._xz_bytes += len(self._xz.compress(raw))

    def finish(self) -> tuple[int, int]:
        """Bytes under gzip -9 and under xz -9."""
        return self._gzip_bytes + len(self._gzip.flush()), self._xz_bytes + len(self._xz.flush())

"""Recognizes files whose content does not match their name: Git LFS pointers, web pages, archives."""

# Downloads often fail by saving an error page or a pointer under the name of the file.
_DESCRIPTIONS: dict[bytes, str] = {
    b"version https://git-lfs.github.com/spec/": "a Git LFS pointer, not the file itself; fetch that with "
    "`git lfs pull`, or download it again with `hf download`",
    b"<!doctype html": "a web page (HTML), not the file itself; download the file, not the page about it",
    b"<html": "a web page (HTML), not the file itself; download the file, not the page about it",
    b"<?xml": "an XML document, often the error message of a storage service; download the file again",
    b"<error>": "the error message of a storage service; download the file again",
    b"entry not found": "the error message of a server; download the file again",
    b"invalid username or password": "the error message of a server; log in and download the file again",
    b"access to model": "the error message of a server; log in and download the file again",
    b'{"error":': "the error message of a server; download the file again",
    b"\x1f\x8b": "compressed with gzip; unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed with Zstandard; unpack it first",
    b"\xfd7zxz\x00": "compressed with xz; unpack it first",
    b"bzh": "compressed with bzip2; unpack it first",
    b"\x04\x22\x4d\x18": "compressed with LZ4; unpack it first",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive; unpack it first",
    b"pk\x03\x04": "a ZIP archive, as torch.save writes; unpack it, or convert the weights to safetensors",
    b"\x80\x02": "a pickle; loading it would run the code in it, so convert the weights to safetensors",
    b"gguf": "a GGUF file; use the safetensors files of the same model",
    b"par1": "a Parquet file",
    b"arrow1": "an Arrow file",
    b"\xff\xfe": "text in UTF-16; save it as UTF-8",
    b"\xfe\xff": "text in UTF-16; save it as UTF-8",
}
"""Description of a file by its first bytes, in lower case."""
HEAD_BYTES = 512
"""Number of bytes at the start of a file that `describe_content` needs."""


def describe_content(head: bytes) -> str | None:
    """Describes a file with unexpected content, to complete a message "FILE is ..."; None if unknown.

    Args:
      head: first bytes of the file; `HEAD_BYTES` are enough.
    """
    # Web pages may begin with blank lines. No binary format of the table does.
    head = head[:HEAD_BYTES].removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n").lower()
    return next((text for start, text in _DESCRIPTIONS.items() if head.startswith(start)), None)

"""AMD GPU code objects: the kernels of an ELF file, their descriptors and their machine code.

Format: LLVM's "User Guide for AMDGPU Backend", sections "ELF Code Object", "Code Object Metadata" and
"Kernel Descriptor".
"""

import dataclasses
import struct
from collections.abc import Iterator
from typing import Any

import msgpack

NOTE_OWNER = b"AMDGPU\0\0"
"""Owner of the metadata note, padded to a multiple of four bytes."""
METADATA_NOTE = 32
SYMBOL_TABLES = (2, 11)
"""Section types of symbol tables: SHT_SYMTAB and SHT_DYNSYM."""
NO_BITS = 8
"""Section type without contents in the file: SHT_NOBITS."""
DESCRIPTOR_BYTES = 64


@dataclasses.dataclass(frozen=True)
class KernelCode:
    """A kernel's machine code and what its descriptor says about a launch.

    Attributes:
      name: name of the kernel.
      code: instructions, from `address` on.
      address: address of the first byte of `code` in the code object.
      entry: address of the first instruction that is executed.
      kernarg_bytes: size of the segment of arguments.
      lds_bytes: static local memory of a workgroup.
      scratch_bytes: private memory of a lane.
      resource2: register COMPUTE_PGM_RSRC2: which scalar registers receive workgroup ids.
      properties: KERNEL_CODE_PROPERTIES: which scalar registers are set up.
      preloaded: scalar registers of arguments that are loaded before the kernel starts.
    """

    name: str
    code: bytes
    address: int = 0
    entry: int = 0
    kernarg_bytes: int = 0
    lds_bytes: int = 0
    scratch_bytes: int = 0
    resource2: int = 0
    properties: int = 0
    preloaded: int = 0


@dataclasses.dataclass(frozen=True)
class _Section:
    kind: int
    address: int
    offset: int
    size: int
    link: int


def read_code_object(data: bytes) -> dict[str, KernelCode]:
    """Reads all kernels of a code object, by name.

    Args:
      data: contents of an ELF file (`*.hsaco`).

    Raises:
      ValueError: if the file is no AMD GPU code object.
    """
    if data[:4] != b"\x7fELF":
        raise ValueError("this is no ELF file; pass the contents of a .hsaco file")
    sections = list(_sections(data))
    symbols = dict(_symbols(data, sections))
    return {notes[".name"]: _kernel(data, sections, symbols, notes) for notes in kernel_notes(data)}


def kernel_notes(data: bytes) -> list[dict[str, Any]]:
    """Returns the metadata of all kernels of a code object.

    Raises:
      ValueError: if the file has no such note.
    """
    # A search for the owner finds the note, without a walk through the sections.
    owner = data.find(NOTE_OWNER)
    while owner >= 12:
        # Before the owner's name: its length, the length of the content, and the type.
        _, size, kind = struct.unpack_from("<III", data, owner - 12)
        start = owner + len(NOTE_OWNER)
        # The same owner has notes of other types too.
        if kind == METADATA_NOTE:
            # strict_map_key: msgpack would refuse keys that are not text.
            return msgpack.unpackb(data[start : start + size], strict_map_key=False)["amdhsa.kernels"]
        owner = data.find(NOTE_OWNER, start)
    raise ValueError("this code object has no AMDGPU metadata note")


def _kernel(
    data: bytes, sections: list[_Section], symbols: dict[str, tuple[int, int]], notes: dict[str, Any]
) -> KernelCode:
    # The descriptor is a symbol of its own, named after the kernel with the suffix ".kd".
    at, _ = symbols[notes[".symbol"]]
    descriptor = _bytes_at(data, sections, at, DESCRIPTOR_BYTES)
    lds_bytes, scratch_bytes, kernarg_bytes = struct.unpack_from("<III", descriptor, 0)
    # The entry is given relative to the descriptor.
    (entry_offset,) = struct.unpack_from("<q", descriptor, 16)
    (resource2,) = struct.unpack_from("<I", descriptor, 52)
    properties, preloaded = struct.unpack_from("<HH", descriptor, 56)
    address, size = symbols[notes[".name"]]
    return KernelCode(
        name=notes[".name"],
        code=_bytes_at(data, sections, address, size),
        address=address,
        entry=at + entry_offset,
        kernarg_bytes=kernarg_bytes,
        lds_bytes=lds_bytes,
        scratch_bytes=scratch_bytes,
        resource2=resource2,
        properties=properties,
        preloaded=preloaded,
    )


def _sections(data: bytes) -> Iterator[_Section]:
    # Fields e_shoff, e_shentsize and e_shnum of the ELF header.
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    for at in range(table, table + size * count, size):
        _, kind, _, address, offset, num_bytes, link = struct.unpack_from("<IIQQQQI", data, at)
        yield _Section(kind, address, offset, num_bytes, link)


def _symbols(data: bytes, sections: list[_Section]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields the name of each symbol with its address and size."""
    for section in sections:
        if section.kind not in SYMBOL_TABLES:
            continue
        # A symbol table links to the section that has its names.
        names = sections[section.link].offset
        for at in range(section.offset, section.offset + section.size, 24):
            name, _, _, _, address, size = struct.unpack_from("<IBBHQQ", data, at)
            yield data[names + name : data.index(b"\0", names + name)].decode(), (address, size)


def _bytes_at(data: bytes, sections: list[_Section], address: int, size: int) -> bytes:
    for section in sections:
        # Sections without an address are not loaded.
        if section.kind != NO_BITS and 0 < section.address <= address < section.address + section.size:
            start = section.offset + address - section.address
            return data[start : start + size]
    raise ValueError(f"no section of the code object has the address {address:#x}")

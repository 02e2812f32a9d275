"""Which operands are accumulators, by the words that llvm-mc-19 makes of the instructions for gfx942."""

import struct

import pytest

from pallas_kernels.emulator import KernelCode
from pallas_kernels.emulator.decode import decode

pytest.importorskip("tinygrad")
END = 0xBF810000
"""s_endpgm"""


@pytest.mark.parametrize(
    ("words", "destination", "source"),
    [
        pytest.param((0xD3D9401C, 0x18000124), 256 + 28, 36, id="v_accvgpr_write_b32 a28, v36"),
        pytest.param((0xD3D84003, 0x18000105), 3, 256 + 5, id="v_accvgpr_read_b32 v3, a5"),
        pytest.param((0x7E02A502,), 256 + 1, 256 + 2, id="v_accvgpr_mov_b32 a1, a2"),
        pytest.param(
            (0xD3E08000, 0x0A020500), 256, 256, id="v_mfma_f32_32x32x8_bf16 a[0:15], a[0:1], v[2:3], 0"
        ),
        pytest.param((0xDC5C8000, 0x04FF0000), 256 + 4, 0, id="global_load_dwordx4 a[4:7], v[0:1], off"),
        pytest.param((0xDBFE0000, 0x04000000), 256 + 4, 0, id="ds_read_b128 a[4:7], v0"),
    ],
)
def test_an_accumulator_is_decoded_as_one(words, destination, source):
    code = struct.pack(f"<{len(words) + 1}I", *words, END)
    instruction = decode(KernelCode("instructions", code))[0]
    assert instruction.destinations[0].register == destination
    assert instruction.sources[0].register == source

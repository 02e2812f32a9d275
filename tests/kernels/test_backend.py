"""Pallas' Triton backend: once it is removed, a test explains what to do; until then it causes no warning."""

import ast
import pathlib
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.sharding import AbstractDevice, AbstractMesh

import pallas_kernels
import zaya_jax
from pallas_kernels import backend
from pallas_kernels.blocks import KernelSettings, block_mask, valid_mask
from pallas_kernels.newton_schulz import newton_schulz

NAME = "jax.experimental.pallas.triton"
FOLDERS = [pathlib.Path(package.__path__[0]) for package in (pallas_kernels, zaya_jax)]
FOLDERS.append(pathlib.Path(__file__).parents[1])
MATRICES = jnp.ones((1, 32, 32)) / 32
STEPS = ((1.5, -0.5, 0.0),)


def lower_a_kernel():
    """Lowers a kernel with Triton's compiler for an AMD GPU that is not present."""
    mi300x = AbstractDevice(device_kind="gfx942", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("data",), abstract_device=mi300x)):
        steps = jax.jit(lambda x: newton_schulz(x, STEPS, implementation="pallas"))
        return steps.trace(MATRICES).lower(lowering_platforms=("rocm",)).as_text()


def canary(lower=lower_a_kernel):
    """Fails with advice instead of the error that a later jax raises for the missing backend."""
    try:
        program = lower()
    except Exception as error:
        pytest.fail(f"{backend.advice()}\n\nSeen: {error!r}")
    assert "triton" in program
    assert "newton_schulz_gram" in program


@pytest.fixture
def no_triton(monkeypatch):
    """Simulates a jax without the backend."""
    monkeypatch.delattr(pallas, "triton", raising=False)
    monkeypatch.setitem(sys.modules, NAME, None)  # makes Python's import of a module fail


def test_this_jax_compiles_kernels_with_triton():
    canary()


def test_a_missing_backend_fails_with_advice(no_triton):
    with pytest.raises(pytest.fail.Exception, match=r"for a move to jax-triton see .* in CONTRIBUTING.md"):
        canary()


def test_a_final_deprecation_fails_with_advice():
    def refuse():
        raise ValueError(f"{backend.DEPRECATION} and will be removed")

    with pytest.raises(pytest.fail.Exception, match=r"CONTRIBUTING.md\n\nSeen: ValueError\('The Pallas"):
        canary(refuse)


def test_the_advice_points_to_an_existing_section():
    assert f"\n## {backend.SECTION}\n" in (FOLDERS[-1].parent / "CONTRIBUTING.md").read_text()


def test_without_the_backend_kernels_raise_an_error_and_the_rest_runs(no_triton):
    with pytest.raises(ValueError, match=r'no longer compiles Pallas kernels.*use implementation="xla"'):
        newton_schulz(MATRICES, STEPS, implementation="pallas")
    assert newton_schulz(MATRICES, STEPS, implementation="xla").shape == MATRICES.shape


def test_a_launch_hides_only_the_deprecation_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lower_a_kernel()
        warnings.warn(f"{backend.DEPRECATION} and will be removed", DeprecationWarning, stacklevel=1)
        with pytest.raises(DeprecationWarning, match="another"):
            warnings.warn("another is deprecated", DeprecationWarning, stacklevel=1)


def rounded(bits):
    """Rounds float32 numbers to bfloat16 by their bits, as `narrow` does in a kernel."""
    x = np.asarray(bits, np.uint32).view(np.float32)
    # Blocks on a GPU have a power of 2 as their size.
    padded = np.pad(x, (0, (1 << (x.size - 1).bit_length()) - x.size))

    def kernel(x, out):
        at = slice(None)
        backend.store(out.at[at], backend.narrow(backend.load(x.at[at]), jnp.bfloat16))

    result = jax.ShapeDtypeStruct(padded.shape, jnp.bfloat16)
    operands = (jnp.asarray(padded),)
    (out,) = backend.launch(kernel, operands, [result], KernelSettings(), grid=(1,), name="round")
    return x, np.asarray(out, np.float32)[: x.size]


def test_narrow_rounds_to_the_nearest():
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    ties = bits & 0xFFFF0000 | 0x8000
    extremes = [0, 0x80000000, 1, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000]
    bits = np.concatenate([bits, ties, np.uint32(extremes)])
    x, found = rounded(bits[~np.isnan(bits.view(np.float32))])
    # Exactly half a unit of bfloat16's last place: twice that of the smallest normal number for denormal
    # ones.
    finite = np.isfinite(x) & np.isfinite(found)
    unit = np.ldexp(1.0, np.frexp(np.maximum(np.abs(x[finite]), 2.0**-126).astype(np.float64))[1] - 8)
    assert np.all(np.abs(np.float64(found[finite]) - x[finite]) <= unit / 2)
    # Results that are not finite were not finite, or are at least half a unit above the largest bfloat16.
    assert np.all(np.abs(x[~finite]) >= np.uint32(0x7F7F8000).view(np.float32))
    np.testing.assert_array_equal(np.signbit(found), np.signbit(x))


def test_narrow_keeps_a_nan():
    """NaNs of bfloat16 with any payload, and those that arithmetic produces on AMD GPUs and x86."""
    of_bfloat16 = np.arange(0x7F81, 0x8000, dtype=np.uint32) << 16
    bits = np.concatenate([of_bfloat16, of_bfloat16 | 0x80000000, np.uint32([0x7FC00000, 0xFFC00000])])
    assert np.all(np.isnan(rounded(bits)[1]))


def test_a_block_is_loaded_as_its_transpose():
    """Of the second of two matrices, 24 rows from row 4 on and 10 columns from column 6 on, of 16 each."""
    x = np.random.default_rng(0).standard_normal((2, 30, 16)).astype(np.float32)

    def kernel(x, out):
        rows, columns = 4 + jnp.arange(32), 6 + jnp.arange(16)
        block = backend.load_transposed(
            x, rows, columns, first=(1,), is_row=rows < 28, is_column=columns < 16
        )
        backend.store(out.at[:, :], block)

    result = jax.ShapeDtypeStruct((16, 32), jnp.float32)
    (out,) = backend.launch(
        kernel, (jnp.asarray(x),), [result], KernelSettings(), grid=(1,), name="transpose"
    )
    np.testing.assert_array_equal(out[:10, :24], x[1, 4:28, 6:].T)
    assert not out[10:].any()
    assert not out[:, 24:].any()


def imports(file):
    """Returns the full names that a file imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_one_file_names_the_backend():
    files = [file for folder in FOLDERS for file in folder.rglob("*.py")]
    naming = [file for file in files if any(name.startswith(NAME) for name in imports(file))]
    assert naming == [FOLDERS[0] / "backend.py"]


def test_invalid_settings_are_named():
    with pytest.raises(ValueError, match=r"it: part\.num_warps is 3; .* must be a power of 2, at least 1"):
        KernelSettings(num_warps=3).check("it", part="part")
    with pytest.raises(ValueError, match="it: num_stages is 0; it must be at least 1"):
        KernelSettings(num_stages=0).check("it")
    racing, sides = KernelSettings(num_warps=8, num_stages=2), (128, 256, 32)
    with pytest.raises(ValueError, match=r"it: part: Triton compiles .*\(128, 256, 32\).* with a race"):
        racing.check_schedule("it", "part", sides, 4)
    # Half of the bytes, one group of wavefronts, or no pipeline.
    racing.check_schedule("it", "part", sides, 2)
    KernelSettings(num_warps=4, num_stages=2).check_schedule("it", "part", sides, 4)
    KernelSettings(num_warps=8).check_schedule("it", "part", sides, 4)


@pytest.mark.parametrize(
    ("first", "size", "end", "there"),
    [(4, 4, 8, None), (4, 4, 7, [True, True, True, False]), (8, 4, 7, [False] * 4)],
)
def test_valid_mask(first, size, end, there):
    found = valid_mask(first, size, end)
    assert (found if found is None else found.tolist()) == there


def test_a_mask_of_rows_alone_covers_the_block():
    rows, columns = jnp.array([True, False]), jnp.array([True, True, False])
    assert block_mask(rows, None, (2, 3)).tolist() == [[True] * 3, [False] * 3]
    assert block_mask(rows, columns, (2, 3)).tolist() == [[True, True, False], [False] * 3]
    assert block_mask(None, None, (2, 3)) is None

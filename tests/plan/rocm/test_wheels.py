"""Search for the compiler for AMD GPUs, and occupancy from a kernel's resources, by hand."""

import pytest

from zaya_jax.plan.gpus import MI300X
from zaya_jax.plan.rocm import wheels
from zaya_jax.plan.rocm.code_objects import Kernel


def kernel(**resources):
    values = {
        "name": "k", "vgprs": 64, "sgprs": 16, "vgpr_spills": 0, "sgpr_spills": 0, "scratch_bytes": 0,
        "lds_bytes": 0, "threads": 256, "grid": 1, "matrix_instructions": 0,
    }  # fmt: skip
    return Kernel(**(values | resources))


@pytest.mark.parametrize(
    ("resources", "waves"),
    [
        ({"vgprs": 1}, 8),  # the maximum of a vector unit
        ({"vgprs": 64}, 8),
        ({"vgprs": 65}, 7),  # allocated in multiples of eight: 72
        ({"vgprs": 128}, 4),
        ({"vgprs": 257}, 1),
        ({"vgprs": 512}, 1),
        ({"lds_bytes": 16_384}, 4),  # four workgroups of four waves, on four vector units
        ({"lds_bytes": 32_769}, 1),
        ({"lds_bytes": 65_536, "threads": 1024}, 4),
        ({"lds_bytes": 65_537}, 0),
        ({"vgprs": 128, "lds_bytes": 16}, 4),
    ],
)
def test_waves_by_hand(resources, waves):
    assert kernel(**resources).waves_per_simd(MI300X) == waves


def test_problems_are_named():
    assert kernel().problems(MI300X) == []
    bad = kernel(vgpr_spills=3, scratch_bytes=12, lds_bytes=98_304)
    assert bad.problems(MI300X) == [
        "spills 3 vector and 0 scalar registers",
        "12 bytes of scratch per lane",
        "98,304 bytes of LDS, of 65,536",
    ]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ZAYA_ROCM_WHEELS", str(tmp_path))
    monkeypatch.setattr(wheels, "_library_beside_jax", lambda: None)
    return tmp_path


def put_plugin(folder, version):
    library = folder / "jax_plugins" / "xla_rocm7" / "xla_rocm_plugin.so"
    library.parent.mkdir(parents=True)
    library.touch()
    for package in ("jax_rocm7_plugin", "jax_rocm7_pjrt"):
        (folder / f"{package}-{version}.dist-info").mkdir()
    return library


def test_a_plugin_is_found_in_its_folder(folder):
    library = put_plugin(folder, wheels.VERSION)
    assert wheels.find_plugin() == wheels.Plugin(library, folder)
    assert wheels.install() == folder  # nothing to do


def test_a_patched_plugin_is_accepted(folder):
    put_plugin(folder, wheels.VERSION + ".post1")
    assert wheels.find_plugin().folder == folder


def test_without_a_plugin_the_error_names_the_command(folder):
    with pytest.raises(ValueError, match=r"which is not in .*; `zaya plan rocm-wheels` installs it"):
        wheels.find_plugin()


def test_another_version_is_refused(folder):
    put_plugin(folder, "0.1.2")
    with pytest.raises(ValueError, match=r"has the ROCm plugin of 0\.1\.2; jaxlib here is"):
        wheels.find_plugin()


def test_the_folder_is_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("ZAYA_ROCM_WHEELS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert wheels.default_folder().parent == tmp_path / "zaya_jax"
    assert wheels.VERSION in wheels.default_folder().name

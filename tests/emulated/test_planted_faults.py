"""Faults planted in the machine code of kernels are detected, and by the right check.

`pytest -n 0 -s -m campaign tests/emulated/test_planted_faults.py` plants 40 faults in five kernels, chosen
with a seed that it prints, and reports what detected each.
"""

import collections

import jax
import numpy as np
import pytest

from pallas_kernels.catalogue import SIZES, cases
from tests.emulated.planted_faults import KINDS, CapturedLaunch, capture, choose, judge
from zaya_jax.errors import UserError
from zaya_jax.plan.gpus import MI300X
from zaya_jax.plan.rocm.launches import execution as launch_execution
from zaya_jax.plan.rocm.launches.compiler import LaunchCompiler
from zaya_jax.plan.rocm.wheels import find_plugin

KERNELS = {
    "residual_rms_norm": "residual_rms_norm",
    "flash_attention": "flash_attention",
    "grouped_swiglu": "grouped_swiglu_few_rows",
    "cca": "cca_grad_latent",
    "decode_attention": "decode_attention",
}
"""Operations of the catalog, and the kernel of each into which faults are planted."""
SEED = 20261125
PER_KIND = 8
EXPECTED = {
    "wait removed": {"wait", "local race"},
    "barrier removed": {"local race"},
    "mask ignored": {"bounds", "read-only", "workgroup race", "local bounds", "uninitialized memory"},
    "device address shifted": {"bounds", "alignment", "workgroup race", "read-only", "unwritten"},
    "local address shifted": {"local race", "local bounds", "alignment", "values"},
}
"""What may notice each kind."""


@pytest.fixture(scope="module")
def launches():
    """One launch of each kernel, at the catalog's toy sizes in bfloat16."""
    pytest.importorskip("tinygrad")
    try:
        find_plugin()
    except UserError as error:
        pytest.skip(str(error))
    captured: dict[str, CapturedLaunch] = {}
    compiler = LaunchCompiler(MI300X)
    original = launch_execution.execute

    def keep(kernel, launch, buffers, **options):
        # The name of a compiled kernel may end with a number.
        name = next((each for each in KERNELS.values() if kernel.name.rstrip("_0123456789") == each), None)
        if name is not None and name not in captured:
            captured[name] = capture(name, kernel, launch, buffers)
        return original(kernel, launch, buffers, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_execution, "execute", keep)
        executor = launch_execution.EmulatedLaunches(compiler)
        for case in cases(SIZES["toy"]):
            if case.name in KERNELS:
                with executor.launches():
                    jax.block_until_ready(case.with_gradients("pallas")(*case.make(jax.random.key(0))))
    compiler.close()
    return [captured[name] for name in KERNELS.values()]


@pytest.mark.parametrize("kind", KINDS)
def test_faults_of_each_kind_are_noticed(launches, kind):
    chosen = [(launch, fault) for launch, fault in choose(launches, 2, SEED) if fault.kind == kind]
    noticed = {judge(launch, fault).noticed for launch, fault in chosen}
    assert noticed & EXPECTED[kind], noticed
    assert noticed <= EXPECTED[kind] | {"values", None}


def test_unchanged_kernels_pass_all_checks(launches):
    for launch in launches:
        again = launch_execution.execute(launch.kernel, launch.launch, launch.buffers)
        assert all(
            np.array_equal(a, b, equal_nan=True) for a, b in zip(again.outputs, launch.outputs, strict=True)
        )


@pytest.mark.campaign
def test_faults_in_five_kernels(launches):
    print(f"\nseed {SEED}")
    verdicts = collections.Counter()
    for launch, fault in choose(launches, PER_KIND, SEED):
        verdict = judge(launch, fault)
        verdicts[fault.kind, verdict.noticed] += 1
        place = f"{launch.name} {fault.instruction.pc:#x} {fault.instruction.text}"
        print(f"{fault.kind}: {place}: {verdict.noticed}: {verdict.detail}")
    print(dict(verdicts))
    assert sum(verdicts.values()) == PER_KIND * len(KINDS)
    unnoticed = sum(count for (_, noticed), count in verdicts.items() if noticed is None)
    # The remaining faults change no value, and no order on which a value depends, in this launch.
    assert unnoticed <= sum(verdicts.values()) // 4

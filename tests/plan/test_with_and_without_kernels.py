"""`zaya plan --kernels`: the compiled steps and their table; tests/rocm runs the real compiler."""

import json

from zaya_jax.plan import command
from zaya_jax.plan.rocm.compiler import Compilation, Memory

COPY = """\
HloModule jit_step, is_scheduled=true

ENTRY %main (x: f32[{size}]) -> f32[{size}] {
  %x = f32[{size}]{0} parameter(0)
  ROOT %copy = f32[{size}]{0} copy(%x), metadata={op_name="jit(step)/loss/copy"}
}
"""


def test_the_step_is_compiled_without_kernels_and_with(monkeypatch, tmp_path, capsys):
    asked = []

    def compile_program(job, **_):
        asked.append(job.arguments["config"].execution)
        size = {"xla": 2_000_000_000, "pallas": 500_000_000}[asked[-1].implementation]
        return Compilation(
            memory=Memory(arguments=2**30, outputs=2**30, aliased=2**30, temporaries=4 * size, code=0),
            kernels=(),
            hlo=COPY.replace("{size}", str(size)),
            buffers="",
            compile_seconds=2.0,
            wall_seconds=3.0,
        )

    monkeypatch.setattr(command, "compile_program", compile_program)
    monkeypatch.setattr(command, "find_plugin", lambda: None)
    options = [
        "--config=configs/tiny.py",
        "--gpus-per-node=1",
        "--kernels",
        f"--json={tmp_path / 'plan.json'}",
    ]
    command.main([*options, "--config.execution.attention_implementation=full"])
    assert [execution.attention_implementation for execution in asked] == ["full", "full"]
    result = json.loads((tmp_path / "plan.json").read_text())["kernels"]
    assert [result[name]["moved_bytes"] for name in ("xla", "pallas")] == [16e9, 4e9]
    printed = capsys.readouterr().out
    rows = {line.split("│")[1].strip(): line.split("│")[2:4] for line in printed.splitlines() if "│" in line}
    assert [float(cell) for cell in rows["loss"]] == [16.0, 4.0]
    assert [cell.strip() for cell in rows["temporaries"]] == ["7.45 GiB", "1.86 GiB"]

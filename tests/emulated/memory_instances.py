"""Random instances of loads, stores and moves between lanes, with the results of AMD's pseudocode."""

import random
import re
from typing import Any

from instances import EXEC, LANES, MASK32, Draw, Instance, find_opcode, formula
from pseudocode import State, Value, parse, run
from tinygrad.renderer.amd.dsl import EXEC_HI, s, v
from tinygrad.runtime.autogen.amd.cdna import ins

DEVICE = 0x7F12_0000_1000
"""Device address of the only buffer."""
WORDS = 2048
"""Words of the buffer, or of local memory."""
LANE_BYTES = 64
"""Bytes from one lane's part of memory to the next, so that lanes never write to one address."""


def _active(draw: Draw) -> list[int]:
    mask = draw.scalars[EXEC] | draw.scalars[EXEC + 1] << 32
    return [lane for lane in LANES if mask >> lane & 1]


def _as_bytes(words: list[int], start: int) -> dict[int, int]:
    return {start + 4 * i + k: word >> 8 * k & 0xFF for i, word in enumerate(words) for k in range(4)}


def _as_words(memory: dict[int, int], start: int, count: int) -> list[int]:
    return [sum(memory[start + 4 * i + k] << 8 * k for k in range(4)) for i in range(count)]


def _random_words(rng: random.Random, count: int) -> list[int]:
    return [rng.getrandbits(32) for _ in range(count)]


def _data(draw: Draw, words: int) -> tuple[int, list[int]]:
    """Draws consecutive vector registers: number of the first one, and a value per lane."""
    number = draw.next_vector + draw.next_vector % 2
    draw.next_vector = number + words + 2
    for i in range(words):
        draw.vectors[number + i] = _random_words(draw.rng, 64)
    return number, [sum(draw.vectors[number + i][lane] << 32 * i for i in range(words)) for lane in LANES]


def _registers(number: int, words: int) -> Any:
    return v[number] if words == 1 else v[number : number + words - 1]


def _put_result(instance: Instance, number: int, words: int, results: dict[int, int]) -> None:
    for i in range(words):
        values = list(instance.vectors[number + i])
        for lane, result in results.items():
            values[lane] = result >> 32 * i & MASK32
        instance.after_vectors[number + i] = values


def local_instance(name: str, rng: random.Random) -> Instance:
    """Draws a load from, or store to, local memory."""
    draw = Draw(rng)
    kind, pair, bits = re.match(r"ds_(read|write)(2st64|2)?_[bui](\d+)", name).groups()
    size = int(bits) // 8
    words = max(1, size // 4)
    # Each lane has its part of memory, in random order; some offsets lead into the parts of other lanes.
    parts = rng.sample(list(LANES), 64)
    inner = rng.randrange(0, LANE_BYTES // 4, max(1, size)) if not pair else 0
    draw.vectors[2] = [LANE_BYTES * part + inner for part in parts]
    if pair == "2st64":  # its second access is 64 elements later, so that lanes are adjacent
        draw.vectors[2] = [size * part for part in parts]
    draw.next_vector = 4
    offsets = (
        [rng.randrange(4), rng.randrange(4)]
        if pair
        else [rng.randrange(0, 256, max(1, size)), rng.randrange(4)]
    )
    if pair == "2" and kind == "write":
        offsets[1] = (offsets[0] + 1) % 4  # one lane must not write twice to one place
    elif pair and kind == "write":
        offsets[1] = (offsets[0] + rng.randrange(1, 4)) % 4
    fields: dict[str, Any] = {"addr": v[2], "offset0": offsets[0], "offset1": offsets[1]}
    result_words = words * (2 if pair else 1)
    data = [_data(draw, words) for _ in range(2 if pair else 1)] if kind == "write" else []
    for i, (number, _) in enumerate(data):
        fields[f"data{i}"] = _registers(number, words)
    result, old = _data(draw, result_words) if kind == "read" else (0, [0] * 64)
    if kind == "read":
        fields["vdst"] = _registers(result, result_words)
    local = _random_words(rng, WORDS)
    memory, results = _as_bytes(local, 0), {}
    for lane in _active(draw):
        address = draw.vectors[2][lane]
        whole = offsets[0] | offsets[1] << 8
        # Formulas without CalcDsAddr take ADDR with the offset added.
        added = 0 if "CalcDsAddr" in formula(name) else whole
        registers = {"ADDR": address + added, "OFFSET": whole, "OFFSET0": offsets[0], "OFFSET1": offsets[1]}
        registers |= {key: values[lane] for key, (_, values) in zip(("DATA", "DATA2"), data, strict=False)}
        state = State(registers | {"RETURN_DATA": old[lane]}, memory)
        state.functions["CalcDsAddr"] = lambda base, *_: Value(base.data & MASK32)
        run(parse(formula(name)), state)
        results[lane] = state.registers["RETURN_DATA"]
    instruction = ins.DS(find_opcode(name)["DS"], **fields)
    instance = Instance(
        name, "DS", instruction.to_bytes(), draw.vectors, draw.scalars, 0, text=repr(instruction)
    )
    instance.local, instance.after_local = local, _as_words(memory, 0, WORDS)
    if kind == "read":
        _put_result(instance, result, result_words, results)
    return instance


def device_instance(name: str, rng: random.Random) -> Instance:
    """Draws a global_ or buffer_ load or store."""
    draw = Draw(rng)
    form = "MUBUF" if name.startswith("buffer") else "GLOBAL"
    kind, unit = re.match(r"\w+?_(load|store)_(\w+?)(?:_d16_hi)?$", name).groups()
    size = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}.get(unit, 1 if "byte" in unit else 2)
    words = max(1, size // 4)
    parts = [LANE_BYTES * part + rng.randrange(0, 16, max(1, size)) for part in rng.sample(list(LANES), 64)]
    draw.next_vector = 6
    number, data = _data(draw, words)
    limit = 4 * WORDS if form == "GLOBAL" else rng.choice([4 * WORDS, 2048, 0])
    locate, fields = (_global_address if form == "GLOBAL" else _buffer_address)(draw, parts, limit)
    fields["vdst" if kind == "load" and form == "GLOBAL" else "vdata" if form == "MUBUF" else "data"] = (
        _registers(number, words)
    )
    device = _random_words(rng, WORDS)
    memory, results = _as_bytes(device, DEVICE), {}
    for lane in _active(draw):
        offset = locate(lane)
        if offset is None:  # beyond the end: loads return 0 and stores do nothing
            results[lane] = 0
            continue
        state = State({"VDATA": data[lane]}, memory)
        for function in ("CalcGlobalAddr", "CalcBufferAddr"):
            state.functions[function] = lambda *_, offset=offset: Value(DEVICE + offset, 64)
        state.registers |= dict.fromkeys(("ADDR", "SADDR", "OFFSET", "VADDR", "SRSRC", "SOFFSET"), 0)
        run(parse(formula(name)), state)
        results[lane] = state.registers["VDATA"]
    instruction = getattr(ins, form)(find_opcode(name)[form], **fields)
    instance = Instance(
        name, form, instruction.to_bytes(), draw.vectors, draw.scalars, 0, text=repr(instruction)
    )
    instance.device = device
    if kind == "load":
        _put_result(instance, number, words, results)
    else:
        instance.after_device = _as_words(memory, DEVICE, WORDS)
    return instance


def _global_address(draw: Draw, parts: list[int], limit: int) -> tuple[Any, dict[str, Any]]:
    """Draws 64-bit addresses in vector registers, or a scalar base and 32-bit offsets."""
    offset = draw.rng.choice([0, 16, 4095, -4096, -16]) & ~15
    if draw.rng.random() < 0.5:
        addresses = [DEVICE + part - offset for part in parts]
        draw.vectors[2] = [address & MASK32 for address in addresses]
        draw.vectors[3] = [address >> 32 for address in addresses]
        # The number 127 means no scalar address; the constructor then counts one address register.
        fields = {"addr": v[2], "saddr": EXEC_HI}
    else:
        base = DEVICE - 4096 - offset
        draw.set_scalar(60, base, 2)
        draw.vectors[2] = [part + 4096 for part in parts]
        fields = {"addr": v[2], "saddr": s[60:61]}
    return lambda lane: parts[lane], fields | {"offset": offset & 0x1FFF}


def _buffer_address(draw: Draw, parts: list[int], limit: int) -> tuple[Any, dict[str, Any]]:
    """Draws a buffer resource without a stride, a scalar offset and an offset per lane."""
    offset, scalar = draw.rng.choice([0, 4, 64, 2032]), draw.rng.choice([0, 64])
    # Sums of 32 bits wrap around: an offset of -4 with 4 more is 0.
    draw.vectors[2] = [part - offset & MASK32 for part in parts]
    draw.set_scalar(60, DEVICE, 2)
    draw.set_scalar(62, limit, 1)
    draw.set_scalar(63, 0x00027000, 1)
    draw.set_scalar(70, scalar, 1)
    fields = {"vaddr": v[2], "offen": 1, "offset": offset, "srsrc": s[60:63], "soffset": s[70]}

    def locate(lane: int) -> int | None:
        inside = draw.vectors[2][lane] + offset & MASK32
        # The compiler aligns accesses, so that none crosses the end.
        return inside + scalar if inside + 16 <= limit - scalar else None

    return locate, fields


def scalar_load_instance(name: str, rng: random.Random) -> Instance:
    """Draws s_load_dword and its wider forms."""
    draw = Draw(rng)
    words = int(re.search(r"\d*$", name)[0] or 1)
    draw.set_scalar(2, DEVICE + 1024, 2)
    for i in range(words):
        draw.set_scalar(16 + i, rng.getrandbits(32), 1)
    offset = 4 * rng.randrange(-64, 64)
    scalar_offset = rng.choice([0, 0, 4 * rng.randrange(64)])
    draw.set_scalar(4, scalar_offset, 1)
    device = _random_words(rng, WORDS)
    state = State(dict.fromkeys(("SBASE", "SOFFSET", "OFFSET", "SDATA"), 0), _as_bytes(device, DEVICE))
    state.functions["CalcScalarGlobalAddr"] = lambda *_: Value(DEVICE + 1024 + offset + scalar_offset, 64)
    run(parse(formula(name)), state)
    target = s[16] if words == 1 else s[16 : 15 + words]
    opcode = find_opcode(name)["SMEM"]
    register = {"soffset": s[4], "soffset_en": 1} if scalar_offset else {}
    instruction = ins.SMEM(opcode, sdata=target, sbase=s[2:3], offset=offset & 0x1FFFFF, imm=1, **register)
    after = {16 + i: state.registers["SDATA"] >> 32 * i & MASK32 for i in range(words)}
    instance = Instance(
        name, "SMEM", instruction.to_bytes(), {}, draw.scalars, 0, {}, after, text=repr(instruction)
    )
    instance.device = device
    return instance


def permute_instance(name: str, rng: random.Random) -> Instance:
    """Draws ds_bpermute_b32 or ds_permute_b32."""
    draw = Draw(rng)
    draw.vectors[2] = [4 * rng.randrange(64) + rng.choice([0, 0, 1, 256]) for _ in LANES]
    draw.next_vector = 4
    data, _ = _data(draw, 1)
    result, _ = _data(draw, 1)
    offset = rng.choice([0, 0, 4, 1000])
    registers: dict[str, Any] = {"ADDR": Value(2), "DATA0": Value(data), "VDST": Value(result)}
    registers |= {"OFFSET": offset, "EXEC": draw.scalars[EXEC] | draw.scalars[EXEC + 1] << 32}
    state = State(registers, vector=lambda lane, number: draw.vectors[number][lane])
    run(parse(formula(name)), state)
    opcode = find_opcode(name)["DS"]
    instruction = ins.DS(
        opcode, vdst=v[result], addr=v[2], data0=v[data], offset0=offset & 255, offset1=offset >> 8
    )
    instance = Instance(
        name, "DS", instruction.to_bytes(), draw.vectors, draw.scalars, 0, text=repr(instruction)
    )
    _put_result(instance, result, 1, {lane: value for (lane, _), value in state.written.items()})
    return instance


def swizzle_instance(rng: random.Random) -> Instance:
    """Draws ds_swizzle_b32. The document has prose: a mask within 32 lanes, or an order of four."""
    draw = Draw(rng)
    draw.next_vector = 2
    data, values = _data(draw, 1)
    result, _ = _data(draw, 1)
    pattern = rng.choice([rng.randrange(0x8000), 0x8000 | rng.randrange(256)])
    active = _active(draw)
    results = {}
    for lane in active:
        if pattern & 0x8000:
            source = lane & ~3 | pattern >> 2 * (lane & 3) & 3
        else:
            source = lane & 32 | ((lane & 31 & pattern | pattern >> 5 & 31) ^ (pattern >> 10 & 31))
        results[lane] = values[source] if source in active else 0
    opcode = find_opcode("ds_swizzle_b32")["DS"]
    instruction = ins.DS(opcode, vdst=v[result], addr=v[data], offset0=pattern & 255, offset1=pattern >> 8)
    instance = Instance(
        "ds_swizzle_b32", "DS", instruction.to_bytes(), draw.vectors, draw.scalars, 0, text=repr(instruction)
    )
    _put_result(instance, result, 1, results)
    return instance

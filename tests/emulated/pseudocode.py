"""An interpreter of the pseudocode in AMD's ISA documents, as tinygrad's wheel keeps it for each opcode.

    program = parse("tmp = 64'U(S0.u32) + 64'U(S1.u32);\nD0.u32 = tmp.u32")
    state = State(registers={"S0": 3, "S1": 4, "D0": 0})
    run(program, state)
    state.registers["D0"]  # 7

Registers are Python integers of unlimited width; a suffix such as `.i32` says how to read their lowest bits.
Integers are unlimited while they are computed, and are cut to a width where they are stored or cast.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import float_bits

TOKEN = re.compile(
    r"""\s*(?:
      (?P<comment>//[^\n]*)
    | (?P<cast>\d+'[UIFB](?=\s*\())
    | (?P<type>\d+'[UIFB])
    | (?P<number>(?:\d+')?(?:0x[0-9a-fA-F]+|\d+\.\d+|\d+)(?:ULL|LL|U|F)?)
    | (?P<name>[A-Za-z_]\w*)
    | (?P<operator>\*\*|<<|>>|<=|>=|==|!=|<>|&&|\|\||\+=|-=|[-+*/%&|^~!<>=?:;,.(){}\[\]])
    )""",
    re.VERBOSE,
)
LEVELS = [["||"], ["&&"], ["|"], ["^"], ["&"], ["==", "!=", "<>"], ["<", "<=", ">", ">="], ["<<", ">>"]]
LEVELS += [["+", "-"], ["*", "/", "%"], ["**"]]
"""Binary operators, from the loosest to the tightest."""


@dataclasses.dataclass(frozen=True)
class Value:
    """An integer, or the bits of a floating-point number.

    Attributes:
      data: the integer, with its sign; or the bits of the number.
      width: bits.
      kind: "int", "float", "power" (an exact power of two, whose logarithm is `data`), "class" (the set of
        denormal numbers) or "zero" (a zero whose sign matters when it is compared).
    """

    data: int
    width: int = 32
    kind: str = "int"

    def read_as(self, suffix: str) -> "Value":
        """The lowest bits as the type that a suffix such as `u32`, `i16`, `f32` or `b8` names."""
        kind, width = re.fullmatch(r"(bf|[uifb])(\d+)", suffix).groups()
        width = int(width)
        if self.kind == "class":
            return Value(0, width, "class")
        bits = self.data & ((1 << width) - 1)
        if kind == "f":
            return Value(bits, width, "float")
        return Value(bits - (bits >> (width - 1) << width) if kind == "i" else bits, width)

    def cast(self, suffix: str) -> "Value":
        """Converts: numbers keep their value, unlike in `read_as`."""
        width, kind = suffix.split("'")
        width = int(width)
        if kind == "F":
            if self.kind == "float":
                return Value(float_bits.converted(self.data, self.width, width), width, "float")
            if self.kind in ("class", "zero"):
                return self
            return Value(self.data & ((1 << width) - 1), width, "float")
        return self.read_as({"U": "u", "I": "i", "B": "b"}[kind] + str(width))


@dataclasses.dataclass
class State:
    """Everything that a formula reads and writes.

    Attributes:
      registers: registers and variables by name: integers, or values with a type.
      memory: bytes by address.
      vector: reads a vector register: `vector(lane, number)`.
      written: vector registers that were written, by lane and number.
      functions: functions that the formula may call in addition to the usual ones.
    """

    registers: dict[str, Any]
    memory: dict[int, int] = dataclasses.field(default_factory=dict)
    vector: Callable[[int, int], int] = lambda lane, number: 0
    written: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    functions: dict[str, Callable[..., Value]] = dataclasses.field(default_factory=dict)


class _Break(Exception):
    """Leaves the innermost loop."""


class _Return(Exception):
    """Carries the result of a function."""


# ---------------------------------------------------------------- parser


class _Parser:
    """Recursive descent; nodes are tuples that start with their kind."""

    def __init__(self, text: str):
        self.tokens = list(_tokens(text))
        self.at = 0

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ""

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if expected is not None and token != expected:
            raise SyntaxError(f"{expected!r} is missing before {self.tokens[self.at : self.at + 6]}")
        self.at += 1
        return token

    def block(self, *ends: str) -> tuple:
        statements = []
        while self.peek() not in ends:
            if self.peek() in (";", ","):
                self.take()
                continue
            statements.append(self.statement())
        return ("block", statements)

    def statement(self) -> tuple:
        keyword = self.peek()
        if keyword == "declare":
            return self.declaration()
        if keyword == "if":
            return self.condition()
        if keyword == "for":
            return self.loop()
        if keyword in ("break", "return"):
            self.take()
            return (keyword,) if keyword == "break" else ("return", self.expression())
        target = self.expression()
        if self.peek() not in ("=", "+=", "-="):
            return ("discard", target)
        operator = self.take()
        if self.peek() == "lambda":
            return self.function(target)
        value = self.expression()
        if operator != "=":
            value = ("binary", operator[0], target, value)
        return ("assign", target, value)

    def declaration(self) -> tuple:
        self.take("declare")
        name = self.take()
        self.take(":")
        width = int(self.take().split("'")[0])
        count = None
        if self.peek() == "[":
            self.take()
            count = int(self.take())
            self.take("]")
        return ("declare", name, width, count)

    def condition(self) -> tuple:
        branches = []
        while self.take() in ("if", "elsif"):
            test = self.expression()
            self.take("then")
            branches.append((test, self.block("elsif", "else", "endif")))
        # The keyword just taken ended the last branch.
        otherwise = self.block("endif") if self.tokens[self.at - 1] == "else" else ("block", [])
        if self.tokens[self.at - 1] != "endif":
            self.take("endif")
        return ("if", branches, otherwise)

    def loop(self) -> tuple:
        self.take("for")
        name = self.take()
        self.take("in")
        first = self.expression()
        self.take(":")
        last = self.expression()
        self.take("do")
        body = self.block("endfor")
        self.take("endfor")
        return ("for", name, first, last, body)

    def function(self, target: tuple) -> tuple:
        self.take("lambda")
        self.take("(")
        names = [self.take()]
        while self.take() == ",":
            names.append(self.take())
        self.take("(")
        body = self.block(")")
        self.take(")")
        return ("function", target[1], names, body)

    def expression(self) -> tuple:
        test = self.binary(0)
        if self.peek() != "?":
            return test
        self.take("?")
        yes = self.expression()
        self.take(":")
        return ("choose", test, yes, self.expression())

    def binary(self, level: int) -> tuple:
        if level == len(LEVELS):
            return self.unary()
        left = self.binary(level + 1)
        while self.peek() in LEVELS[level]:
            operator = self.take()
            left = ("binary", operator, left, self.binary(level + 1))
        return left

    def unary(self) -> tuple:
        if self.peek() in ("-", "+", "!", "~"):
            operator = self.take()
            return ("unary", operator, self.unary())
        return self.suffixes(self.primary())

    def primary(self) -> tuple:
        token = self.take()
        if token == "(":
            inner = self.expression()
            self.take(")")
            return inner
        if token == "{":
            parts = [self.expression()]
            while self.take() == ",":
                parts.append(self.expression())
            return ("join", parts)
        if re.fullmatch(r"\d+'[UIFB]", token):
            self.take("(")
            inner = self.expression()
            self.take(")")
            return ("cast", token, inner)
        if token[0].isdigit():
            return ("constant", _number(token))
        if self.peek() == "(":
            return ("call", token, self.arguments())
        return ("name", token)

    def arguments(self) -> list[tuple]:
        self.take("(")
        arguments = [self.expression()]
        while self.take() == ",":
            arguments.append(self.expression())
        return arguments

    def suffixes(self, node: tuple) -> tuple:
        while self.peek() in (".", "["):
            if self.take() == ".":
                node = ("type", node, self.take())
                continue
            first = self.expression()
            if self.peek() == ":":
                self.take()
                node = ("slice", node, first, self.expression())
            else:
                node = ("index", node, first)
            self.take("]")
        return node


def _tokens(text: str) -> Iterator[str]:
    at = 0
    text = text.rstrip()
    while at < len(text):
        match = TOKEN.match(text, at)
        if not match:
            raise SyntaxError(f"cannot read {text[at : at + 30]!r}")
        at = match.end()
        if match.lastgroup != "comment":
            yield match[match.lastgroup]


def _number(token: str) -> Value:
    width, _, digits = token.rpartition("'")
    floating = "." in digits
    size = int(width or (32 if not floating or digits.endswith("F") else 64))
    if floating:
        return Value(float_bits.from_float(float(digits.rstrip("F")), size), size, "float")
    hexadecimal = digits.startswith("0x")
    value = int(digits.rstrip("UL"), 16) if hexadecimal else int(digits.rstrip("ULF"))
    return Value(value, 64 if digits.endswith("LL") else size)


@functools.cache
def parse(text: str) -> tuple:
    """Parses a formula.

    Raises:
      SyntaxError: if the text is not in the language, such as prose.
    """
    return _Parser(text).block("")


# ---------------------------------------------------------------- evaluation


def run(program: tuple, state: State) -> None:
    """Executes a parsed formula."""
    _STATEMENTS[program[0]](program, state)


def _run_block(node: tuple, state: State) -> None:
    for statement in node[1]:
        run(statement, state)


def _run_declare(node: tuple, state: State) -> None:
    _, name, width, count = node
    if name not in state.registers:  # operands of the encoding are declared too
        state.registers[name] = Value(0, width) if count is None else [Value(0, width)] * count


def _run_if(node: tuple, state: State) -> None:
    for test, body in node[1]:
        if evaluate(test, state).data:
            return run(body, state)
    return run(node[2], state)


def _run_for(node: tuple, state: State) -> None:
    _, name, first, last, body = node
    try:
        for i in range(evaluate(first, state).data, evaluate(last, state).data + 1):
            state.registers[name] = Value(i)
            run(body, state)
    except _Break:
        pass


def _run_break(node: tuple, state: State) -> None:
    raise _Break


def _run_return(node: tuple, state: State) -> None:
    raise _Return(evaluate(node[1], state))


def _run_function(node: tuple, state: State) -> None:
    _, name, names, body = node

    def call(*arguments: Value) -> Value:
        inner = State({**state.registers, **dict(zip(names, arguments, strict=True))}, state.memory)
        try:
            run(body, inner)
        except _Return as result:
            return result.args[0]
        raise SyntaxError(f"{name} returns nothing")

    state.functions[name] = call


def _run_assign(node: tuple, state: State) -> None:
    _assign(node[1], evaluate(node[2], state), state)


_STATEMENTS = {
    "block": _run_block,
    "declare": _run_declare,
    "if": _run_if,
    "for": _run_for,
    "break": _run_break,
    "return": _run_return,
    "function": _run_function,
    "assign": _run_assign,
    "discard": lambda node, state: evaluate(node[1], state),
}


def _assign(target: tuple, value: Value, state: State) -> None:
    if target[0] == "name" and not isinstance(state.registers.get(target[1]), int):
        state.registers[target[1]] = value
        return
    if target[0] == "index" and target[1][0] == "index" and target[1][1] == ("name", "VGPR"):
        lane, number = (evaluate(node, state).data for node in (target[1][2], target[2]))
        state.written[lane, number] = value.data
        return
    if target[0] == "join":  # from the last part on, which has the lowest bits
        for part in reversed(target[1]):
            width = int(part[2][1:])
            _assign(part, Value(value.data & ((1 << width) - 1), width), state)
            value = Value(value.data >> width, value.width)
        return
    base, low, width = _place(target, state)
    if value.kind == "float" and value.width > width:
        raise SyntaxError(f"{value.width} bits are stored in {width} without a conversion")
    bits = _power_as_bits(value) & ((1 << width) - 1)
    if base[0] == "memory":
        for i in range(width // 8):
            state.memory[base[1] + i] = bits >> 8 * i & 0xFF
    elif base[0] == "element":
        state.registers[base[1]][base[2]] = Value(bits, width)
    else:
        old = state.registers.get(base[1], 0)
        number = old if isinstance(old, int) else old.data
        number = number & ~(((1 << width) - 1) << low) | bits << low
        state.registers[base[1]] = number if isinstance(old, int) else Value(number, max(old.width, width))


def _place(target: tuple, state: State) -> tuple[tuple, int, int]:
    """Base, lowest bit and width of what an assignment changes."""
    kind = target[0]
    if kind == "name":
        return ("register", target[1]), 0, 64
    if kind == "type":
        base, low, _ = _place(target[1], state)
        return base, low, int(re.sub(r"\D", "", target[2]))
    if kind == "slice":
        base, low, _ = _place(target[1], state)
        high, last = evaluate(target[2], state).data, evaluate(target[3], state).data
        return base, low + last, high - last + 1
    index = evaluate(target[2], state).data
    if target[1] == ("name", "MEM"):
        return ("memory", index), 0, 32
    if target[1][0] == "name" and isinstance(state.registers.get(target[1][1]), list):
        return ("element", target[1][1], index), 0, 32
    base, low, _ = _place(target[1], state)
    return base, low + index, 1


def evaluate(node: tuple, state: State) -> Value:
    """Evaluates an expression."""
    return _EXPRESSIONS[node[0]](node, state)


def _name(node: tuple, state: State) -> Any:
    name = node[1]
    if name in state.registers:
        value = state.registers[name]
        return Value(value, 64) if isinstance(value, int) else value
    if name in _CONSTANTS:
        return _CONSTANTS[name]
    if name in ("MEM", "VGPR"):
        return name
    raise SyntaxError(f"unknown name {name}")


def _type(node: tuple, state: State) -> Value:
    if node[1] == ("name", "WAVE_MODE"):
        return Value(1)  # XLA's kernels set the bit IEEE
    if node[1][0] == "index" and node[1][1] == ("name", "MEM"):
        address, size = evaluate(node[1][2], state).data, int(node[2][1:]) // 8
        return Value(sum(state.memory[address + i] << 8 * i for i in range(size)), 8 * size).read_as(node[2])
    if node[1] in (("name", "INF"), ("name", "NAN")):
        width = int(node[2][1:])
        constant = float_bits.infinity if node[1][1] == "INF" else float_bits.quiet_nan
        return Value(constant(width), width, "float")
    return evaluate(node[1], state).read_as(node[2])


def _slice(node: tuple, state: State) -> Value:
    value = evaluate(node[1], state).data
    high, low = evaluate(node[2], state).data, evaluate(node[3], state).data
    if high < low:  # the bits in reverse
        return Value(sum((value >> i & 1) << (low - i) for i in range(high, low + 1)), low - high + 1)
    width = high - low + 1
    return Value(value >> low & ((1 << width) - 1), width)


def _index(node: tuple, state: State) -> Any:
    base, index = evaluate(node[1], state), evaluate(node[2], state).data
    if base == "VGPR":
        return ("lane", index)
    if isinstance(base, tuple):
        return Value(state.vector(base[1], index))
    if isinstance(base, list):
        return base[index]
    return Value(base.data >> index & 1, 1)


def _join(node: tuple, state: State) -> Value:
    result = Value(0, 0)
    for part in (evaluate(part, state) for part in node[1]):
        bits = part.data & ((1 << part.width) - 1)
        result = Value(result.data << part.width | bits, result.width + part.width)
    return result


def _unary(node: tuple, state: State) -> Value:
    operator = node[1]
    value = evaluate(node[2], state)
    if operator == "!":
        return Value(int(not value.data), 1)
    if operator == "~":
        return Value(~value.data, value.width)
    if value.kind != "float":
        return value if operator == "+" else Value(-value.data, value.width, value.kind)
    flipped = value.data ^ (1 << (value.width - 1)) if operator == "-" else value.data
    # A zero that is written with a sign is compared with its sign: max(-0, +0) depends on it.
    signed_zero = node[2][0] == "constant" and not value.data
    return Value(flipped, value.width, "zero" if signed_zero else "float")


def _power_as_bits(value: Value) -> int:
    if value.kind == "power":
        raise SyntaxError("a power of two is not rounded to a register's format")
    return value.data


def _binary(node: tuple, state: State) -> Value:
    _, operator, first, second = node
    left = evaluate(first, state)
    if operator == "&&" and not left.data:
        return Value(0, 1)
    if operator == "||" and left.data:
        return Value(1, 1)
    right = evaluate(second, state)
    if operator in ("&&", "||"):
        return Value(int(bool(right.data)), 1)
    if operator in _COMPARISONS:
        return Value(int(_compare(operator, left, right)), 1)
    if operator == "**":
        return Value(right.data, 32, "power")
    if "power" in (left.kind, right.kind):
        number, power = (left, right) if right.kind == "power" else (right, left)
        return Value(float_bits.scale(number.data, power.data, number.width), number.width, "float")
    if "float" in (left.kind, right.kind):
        return _float_arithmetic(operator, left, right)
    return Value(_INTEGERS[operator](left.data, right.data), max(left.width, right.width))


_COMPARISONS: dict[str, Callable] = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<>": lambda a, b: a < b or a > b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}
_INTEGERS: dict[str, Callable[[int, int], int]] = {
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "&": lambda a, b: a & b,
    "<<": lambda a, b: a << b,
    ">>": lambda a, b: a >> b,
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
    "%": lambda a, b: a % b,
}


def _compare(operator: str, left: Value, right: Value) -> bool:
    if right.kind == "class":  # the numbers below the normal ones of the class's format
        smallest = 2.0 ** (2 - (1 << (float_bits.FORMATS[right.width][0] - 1)))
        return 0 < abs(float_bits.to_float(left.data, left.width)) < smallest
    if right.kind == "zero":
        return left.data == right.data & ((1 << left.width) - 1) if left.width == right.width else False
    numbers = [float_bits.to_float(v.data, v.width) if v.kind == "float" else v.data for v in (left, right)]
    return _COMPARISONS[operator](*numbers)


def _float_arithmetic(operator: str, left: Value, right: Value) -> Value:
    width = max(left.width, right.width) if left.kind == right.kind else 32
    a, b = (v.cast(f"{width}'F").data for v in (left, right))
    if operator == "-":
        b ^= 1 << (width - 1)
    function = {"+": float_bits.add, "-": float_bits.add, "*": float_bits.multiply, "/": float_bits.divide}
    return Value(function[operator](a, b, width), width, "float")


def _call(node: tuple, state: State) -> Value:
    _, name, arguments = node
    values = [evaluate(argument, state) for argument in arguments]
    function = state.functions.get(name) or _FUNCTIONS.get(name) or _shared_formula(name)
    return function(*values)


def _shared_formula(name: str) -> Callable[..., Value]:
    """Another instruction's formula as a function, such as `v_max_f32(a, b)`."""

    def call(*arguments: Value) -> Value:
        registers: dict[str, Any] = {f"S{i}": value.data for i, value in enumerate(arguments)}
        inner = State({**registers, "D0": 0, "WAVE_MODE": Value(1)})
        run(parse(formula_of(name)), inner)
        return Value(inner.registers["D0"], 32).read_as(name[-3:])

    return call


@functools.cache
def _formulas() -> dict[str, str]:
    # Late: the language itself needs no tables.
    from tinygrad.runtime.autogen.amd.cdna.str_pcode import PCODE

    formulas: dict[str, str] = {}
    for opcode, text in PCODE.items():
        formulas.setdefault(re.sub(r"_e(32|64)$", "", opcode.name.lower()), text)
    return formulas


def formula_of(name: str) -> str:
    """The document's text for an instruction.

    Raises:
      KeyError: if the document has none.
    """
    return _formulas()[name]


def _sign_extended(value: Value, width: Value) -> Value:
    bits = width.data
    if not bits:
        return Value(0)
    data = value.data & ((1 << bits) - 1)
    return Value(data - (data >> (bits - 1) << bits))


def _truncate(value: Value) -> Value:
    return Value(float_bits.truncated(value.data, value.width), value.width, "float")


def _absolute(value: Value) -> Value:
    return Value(value.data & ~(1 << (value.width - 1)), value.width, "float")


def _approximation(function: Callable[[float], float]) -> Callable[..., Value]:
    """A function that the document defines to one unit of the last place, in Python's float."""

    def call(*arguments: Value) -> Value:
        value = arguments[-1]
        try:
            result = function(float_bits.to_float(value.data, value.width))
        except OverflowError:
            result = math.inf
        except ValueError:  # outside of the function's domain
            result = math.nan
        return Value(float_bits.from_float(result, value.width), value.width, "float")

    return call


def _log2(number: float) -> float:
    return -math.inf if number == 0 else math.log2(number)


def _lowest_one(value: Value) -> Value:
    return Value((value.data & -value.data).bit_length() - 1)


_CONSTANTS = {
    "INF": Value(float_bits.infinity(64), 64, "float"),
    "DENORM": Value(0, 64, "class"),
    # The document names them without a value; rounding to nearest reaches zero and infinity.
    "UNDERFLOW_F32": Value(0, 32, "float"),
    "OVERFLOW_F32": Value(float_bits.infinity(32), 32, "float"),
}
_FUNCTIONS: dict[str, Callable[..., Value]] = {
    "signext": lambda v: v,
    "signext_from_bit": _sign_extended,
    "isNAN": lambda v: Value(int(float_bits.is_nan(v.data, v.width)), 1),
    "isSignalNAN": lambda v: Value(int(float_bits.is_signaling(v.data, v.width)), 1),
    "cvtToQuietNAN": lambda v: Value(v.data | 1 << (float_bits.FORMATS[v.width][1] - 1), v.width, "float"),
    "isQuietNAN": lambda v: Value(
        int(float_bits.is_nan(v.data, v.width) and not float_bits.is_signaling(v.data, v.width)), 1
    ),
    "sign": lambda v: Value(int(float_bits.is_negative(v.data, v.width)), 1),
    "exponent": lambda v: Value(float_bits.biased_exponent(v.data, v.width)),
    "abs": _absolute,
    "trunc": _truncate,
    "floor": lambda v: _shared_formula("v_floor_f32")(v),
    "fma": lambda a, b, c: Value(float_bits.fma(a.data, b.data, c.data, a.width), a.width, "float"),
    "ldexp": lambda v, n: Value(float_bits.scale(v.data, n.data, v.width), v.width, "float"),
    "f32_to_i32": lambda v: Value(float_bits.to_integer(v.data, 32, -(1 << 31), (1 << 31) - 1)),
    "f32_to_u32": lambda v: Value(float_bits.to_integer(v.data, 32, 0, (1 << 32) - 1)),
    "f32_to_f16": lambda v: v.cast("16'F"),
    "f16_to_f32": lambda v: v.cast("32'F"),
    "i32_to_f32": lambda v: Value(float_bits.from_float(float(v.data), 32), 32, "float"),
    "u32_to_f32": lambda v: Value(float_bits.from_float(float(v.data), 32), 32, "float"),
    "sqrt": _approximation(lambda x: x if x == 0 else math.sqrt(x)),
    "pow": _approximation(lambda x: math.pow(2.0, x)),
    "log2": _approximation(_log2),
    "s_ff1_i32_b64": _lowest_one,
}
_EXPRESSIONS: dict[str, Callable[[tuple, State], Any]] = {
    "name": _name,
    "constant": lambda node, state: node[1],
    "type": _type,
    "slice": _slice,
    "index": _index,
    "join": _join,
    "unary": _unary,
    "binary": _binary,
    "cast": lambda node, state: evaluate(node[2], state).cast(node[1]),
    "choose": lambda node, state: evaluate(node[2] if evaluate(node[1], state).data else node[3], state),
    "call": _call,
}

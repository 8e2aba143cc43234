"""Writing BPF programs in Python: each operation appends a line of LLVM IR, and llvmlite compiles the lines.

Numbers are unsigned 64-bit integers, loads extend with zeros, and shifts and comparisons are unsigned. There are no
variables: values that change in a loop are carried by it. That is what the kernel's verifier understands best. Loops
have constant counts, so the verifier can follow each of them to its end.

    code = Assembler("xdp")
    data, end = code.load(code.context, 0, 4).as_pointer(), code.load(code.context, 4, 4).as_pointer()
    with code.when(data.at(14) > end):
        code.leave(XDP_PASS)

Guarantees: `compile` returns an ELF object for the BPF architecture, or raises `AssertionError` if a program was not
ended. It does not say whether the kernel accepts the program; `gradwire.aggregator.xdp.loader` does.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import llvmlite.binding as llvm

_PROLOGUE = """target triple = "bpfel"
target datalayout = "e-m:e-p:64:64-i64:64-i128:128-n32:64-S128"
"""
_MAX = (1 << 64) - 1
_CPU = "v3"  # 32-bit comparisons and atomic operations, since Linux 5.12


@dataclass(frozen=True, eq=False)
class Register:
    """A number, a pointer (`ptr`) or a truth value (`i1`) of a program."""

    code: Assembler
    name: str
    kind: str = "i64"

    def __add__(self, other: Register | int) -> Register:
        return self.code.binary("add", self, other)

    def __sub__(self, other: Register | int) -> Register:
        return self.code.binary("sub", self, other)

    def __mul__(self, other: Register | int) -> Register:
        return self.code.binary("mul", self, other)

    def __and__(self, other: Register | int) -> Register:
        return self.code.binary("and", self, other)

    def __or__(self, other: Register | int) -> Register:
        return self.code.binary("or", self, other)

    def __xor__(self, other: Register | int) -> Register:
        return self.code.binary("xor", self, other)

    def __lshift__(self, other: Register | int) -> Register:
        return self.code.binary("shl", self, other)

    def __rshift__(self, other: Register | int) -> Register:
        return self.code.binary("lshr", self, other)

    def __lt__(self, other: Register | int) -> Register:
        return self.code.compare("ult", self, other)

    def __gt__(self, other: Register | int) -> Register:
        return self.code.compare("ugt", self, other)

    def __ge__(self, other: Register | int) -> Register:
        return self.code.compare("uge", self, other)

    def equals(self, other: Register | int) -> Register:
        """Whether two numbers or pointers are the same."""
        return self.code.compare("eq", self, other)

    def differs(self, other: Register | int) -> Register:
        """Whether two numbers or pointers differ."""
        return self.code.compare("ne", self, other)

    def at(self, offset: Register | int) -> Register:
        """Pointer that is `offset` bytes further."""
        if isinstance(offset, int) and offset == 0:
            return self
        return self.code.emit(f"getelementptr i8, ptr {self.name}, i64 {self.code.operand(offset)}", "ptr")

    def as_pointer(self) -> Register:
        """The number as a pointer."""
        return self.code.emit(f"inttoptr i64 {self.name} to ptr", "ptr")

    def as_number(self) -> Register:
        """The truth value as 0 or 1."""
        return self.code.emit(f"zext i1 {self.name} to i64")

    def otherwise(self, yes: Register | int, no: Register | int) -> Register:
        """`yes` if the truth value holds, else `no`."""
        operand = self.code.operand
        return self.code.emit(f"select i1 {self.name}, i64 {operand(yes)}, i64 {operand(no)}")


class Loop:
    """A loop in progress: its index, and the values that it carries."""

    def __init__(self, index: Register, carried: list[Register]) -> None:
        self.index, self.carried = index, carried
        self.results = carried

    def carry(self, *values: Register) -> None:
        """Set the values with which the next turn begins. After the loop, `results` holds those of the last turn."""
        assert len(values) == len(self.carried), "a loop carries as many values as it began with"
        self.results = list(values)


class Assembler:
    """One program of one argument, the context.

    Args:
        section: Section of the object, and name of the program.

    Attributes:
        context: Pointer to the kernel's description of the packet.
    """

    def __init__(self, section: str) -> None:
        self.section = section
        self.context = Register(self, "%context", "ptr")
        self._maps: dict[str, None] = {}
        self._stack: list[str] = []
        self._lines: list[str] = []
        self._numbers = itertools.count()
        self._block = "entry"
        self._ended = False

    # -- values ----------------------------------------------------------------------------------------------

    def number(self, value: int) -> Register:
        """Return a constant."""
        return Register(self, str(value & _MAX))

    def map(self, name: str) -> Register:
        """Return a pointer to a map, which the loader puts there."""
        self._maps[name] = None
        return Register(self, f"@{name}", "ptr")

    def room(self, num_bytes: int) -> Register:
        """Return a pointer to bytes on the stack. All together, a program has 512."""
        name = f"%room{len(self._stack)}"
        self._stack.append(f"  {name} = alloca [{num_bytes} x i8], align 8")
        return Register(self, name, "ptr")

    def load(self, pointer: Register, offset: int = 0, num_bytes: int = 8) -> Register:
        """Return a little-endian number of 1, 2, 4 or 8 bytes."""
        kind = f"i{8 * num_bytes}"
        found = self.emit(f"load {kind}, ptr {pointer.at(offset).name}, align {num_bytes}", kind)
        return found if num_bytes == 8 else self.emit(f"zext {kind} {found.name} to i64")

    def store(self, pointer: Register, offset: int, value: Register | int, num_bytes: int = 8) -> None:
        """Write the low bytes of a number, little-endian."""
        kind, name = f"i{8 * num_bytes}", self.operand(value)
        if num_bytes < 8 and isinstance(value, Register) and not value.name.isdigit():
            name = self.emit(f"trunc i64 {name} to {kind}", kind).name
        elif num_bytes < 8:
            name = str(int(name) & ((1 << 8 * num_bytes) - 1))
        self._line(f"store {kind} {name}, ptr {pointer.at(offset).name}, align {num_bytes}")

    def increase(self, pointer: Register, offset: int, by: Register | int = 1) -> None:
        """Add to a number of 8 bytes in memory. Other processors may come between."""
        self.store(pointer, offset, self.load(pointer, offset) + by)

    def draw(self, pointer: Register, offset: int) -> Register:
        """Return a number of 8 bytes in memory, and add 1 to it there. No processor draws the same."""
        # With the weaker "monotonic", LLVM takes an instruction that does not return the number.
        return self.emit(f"atomicrmw add ptr {pointer.at(offset).name}, i64 1 seq_cst")

    def call(self, helper: int, *arguments: Register | int) -> Register:
        """Call a function of the kernel by its number, and return its number."""
        return self.emit(f"call i64 inttoptr (i64 {helper} to ptr)({self._arguments(arguments)})")

    def find(self, helper: int, *arguments: Register | int) -> Register:
        """Call a function of the kernel that returns a pointer, null if there is nothing."""
        return self.emit(f"call ptr inttoptr (i64 {helper} to ptr)({self._arguments(arguments)})", "ptr")

    def swapped(self, value: Register, num_bytes: int) -> Register:
        """Return a number of 2 or 4 bytes in the other byte order."""
        kind = f"i{8 * num_bytes}"
        narrow = self.emit(f"trunc i64 {value.name} to {kind}", kind)
        turned = self.emit(f"call {kind} @llvm.bswap.{kind}({kind} {narrow.name})", kind)
        return self.emit(f"zext {kind} {turned.name} to i64")

    # -- control ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def when(self, condition: Register) -> Iterator[None]:
        """Run the lines of the block if a truth value holds."""
        number = next(self._numbers)
        self._line(f"br i1 {condition.name}, label %then{number}, label %rest{number}")
        self._begin(f"then{number}")
        yield
        if not self._ended:
            self._line(f"br label %rest{number}")
        self._begin(f"rest{number}")

    @contextlib.contextmanager
    def loop(self, count: int, *initial: Register | int) -> Iterator[Loop]:
        """Run the lines of the block `count` times, at least once, carrying values from turn to turn."""
        assert count > 0, "a loop has at least one turn"
        number, before = next(self._numbers), self._block
        index = Register(self, f"%index{number}")
        carried = [Register(self, f"%carried{number}_{place}") for place in range(len(initial))]
        starts = [self.operand(value) for value in initial]
        self._line(f"br label %turn{number}")
        self._begin(f"turn{number}")
        place = len(self._lines)
        loop = Loop(index, carried)
        yield loop
        following = index + 1
        latch = self._block
        pairs = [(index.name, "0", following.name)]
        pairs += [(old.name, start, new.name) for old, start, new in zip(carried, starts, loop.results)]
        self._lines[place:place] = [
            f"  {name} = phi i64 [{start}, %{before}], [{new}, %{latch}]" for name, start, new in pairs
        ]
        again = following < count
        self._line(f"br i1 {again.name}, label %turn{number}, label %after{number}")
        self._begin(f"after{number}")

    def label(self) -> str:
        """Return a new place, for `jump` and `place`."""
        return f"place{next(self._numbers)}"

    def jump(self, label: str) -> None:
        """Continue at a label."""
        self._line(f"br label %{label}")
        self._ended = True

    def place(self, label: str) -> None:
        """Begin the lines of a label."""
        if not self._ended:
            self._line(f"br label %{label}")
        self._begin(label)

    def leave(self, verdict: Register | int) -> None:
        """End the program with a verdict on the packet."""
        value = verdict if isinstance(verdict, Register) else self.number(verdict)
        name = self.emit(f"trunc i64 {value.name} to i32", "i32").name
        self._line(f"ret i32 {name}")
        self._ended = True

    # -- text ------------------------------------------------------------------------------------------------

    def emit(self, text: str, kind: str = "i64") -> Register:
        """Append an instruction of LLVM IR, and return its value."""
        value = Register(self, f"%v{next(self._numbers)}", kind)
        self._line(f"{value.name} = {text}")
        return value

    def binary(self, operation: str, left: Register, right: Register | int) -> Register:
        """Append an arithmetic instruction."""
        return self.emit(f"{operation} i64 {left.name}, {self.operand(right)}")

    def compare(self, relation: str, left: Register, right: Register | int) -> Register:
        """Append a comparison."""
        other = "null" if left.kind == "ptr" and isinstance(right, int) else self.operand(right)
        return self.emit(f"icmp {relation} {left.kind} {left.name}, {other}", "i1")

    def operand(self, value: Register | int) -> str:
        """Return how an instruction names a value."""
        return value.name if isinstance(value, Register) else str(value & _MAX)

    def text(self) -> str:
        """Return the program as LLVM IR."""
        assert self._ended, "the last line of a program must leave it"
        maps = [f"@{name} = external global i8" for name in self._maps]
        swaps = [f"declare i{bits} @llvm.bswap.i{bits}(i{bits})" for bits in (16, 32)]
        head = f'define i32 @program(ptr %context) section "{self.section}" {{'
        return "\n".join([_PROLOGUE, *maps, *swaps, head, "entry:", *self._stack, *self._lines, "}", ""])

    def compile(self) -> bytes:
        """Return the program as an ELF object of the BPF architecture."""
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        machine = llvm.Target.from_triple("bpfel").create_target_machine(cpu=_CPU)
        found: bytes = machine.emit_object(llvm.parse_assembly(self.text()))
        return found

    def _arguments(self, arguments: tuple[Register | int, ...]) -> str:
        kinds = [(value.kind if isinstance(value, Register) else "i64", self.operand(value)) for value in arguments]
        return ", ".join(f"{kind} {name}" for kind, name in kinds)

    def _line(self, text: str) -> None:
        assert not self._ended, "nothing follows in a block that has left the program"
        self._lines.append(f"  {text}")

    def _begin(self, block: str) -> None:
        self._lines.append(f"{block}:")
        self._block, self._ended = block, False

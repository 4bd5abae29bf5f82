"""Run the machine code of kernels in Triton on a CPU: compiled for a GPU that need not be there, executed in NumPy.

The code is PTX, which a driver of NVIDIA takes. All threads of all programs execute it together, one instruction after
the other. Beside results, this finds what a GPU may not show for long: an address outside of the tensors of the launch,
or one that is not aligned; a value that another warp wrote or still reads without a barrier between, or that another
program did; a barrier that only some threads of a program reach.

It knows the instructions of this project's kernels and refuses all others by name. Instructions that approximate are
exact here. Each `Machine` counts its work: instructions of warps, and sectors of 32 bytes that they read or write.

Shapes: N threads of all programs, K values of a vector.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from triton.backends.compiler import GPUTarget

Array = npt.NDArray[Any]
WARP: Final = 32  # threads
SECTOR: Final = 32  # bytes
_BASE: Final = 1 << 40  # the address of the first tensor
_GAP: Final = 4096  # bytes between tensors
_WIDTHS: Final = {"p": 1, "rs": 16, "r": 32, "f": 32, "rd": 64, "fd": 64}  # of registers, in bits
_COMPARISONS: Final = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_ROUNDINGS: Final = {"rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil, "rni": np.rint}
_OF_TWO: Final[Mapping[str, Callable[[Array, Array], Array]]] = {
    "add": operator.add,
    "sub": operator.sub,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "min": np.fmin,
    "max": np.fmax,
}
_OF_ONE: Final[Mapping[str, Callable[[Array], Array]]] = {
    "mov": np.array,
    "not": operator.invert,
    "neg": operator.neg,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x.astype(np.float64)),
    "ex2": np.exp2,
    "lg2": np.log2,
}


class KernelError(Exception):
    """An access that a GPU does not allow, or whose result depends on the order of its warps."""


@dataclass(frozen=True)
class Instruction:
    """`@predicate name.modifiers operands;`"""

    predicate: str | None
    negated: bool
    name: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]


def parse(ptx: str) -> tuple[list[str], int, list[Instruction], dict[str, int], dict[str, list[str]]]:
    """Return the names of a kernel's parameters, its threads, its code, and its labels and tables of labels."""
    head, body = re.sub(r"//[^\n]*", "", ptx).split(".entry", 1)[1].split("{", 1)
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    tables: dict[str, list[str]] = {}
    label = ""
    # Inline assembly may be inside braces of its own, but declares nothing there.
    for statement in re.findall(r"[$\w]+:|\.loc[^\n]*|[^;:\s][^;]*;", body.split("\n}", 1)[0]):
        words = statement.rstrip(";").split(None, 1)
        if statement.endswith(":"):
            label = statement[:-1]
            labels[label] = len(code)
        elif words[0] == ".branchtargets":
            tables[label] = re.findall(r"[$\w]+", words[1])
        elif not words[0].startswith("."):
            found = re.match(r"(?:@(!?)(%p\d+)\s+)?([\w.:]+)\s*(.*)", " ".join(words))
            assert found, statement
            name, *modifiers = found[3].replace("::", "_").split(".")
            operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", found[4])
            code.append(Instruction(found[2], found[1] == "!", name, tuple(modifiers), tuple(operands)))
    threads = re.search(r"\.reqntid (\d+)", head)
    assert threads
    return re.findall(r"\w+_param_\d+", head), int(threads[1]), code, labels, tables


def _decoded(bits: Array, kind: str) -> Array:
    """Return numbers from the bits of registers (N,): (N,), or (N, 2) if the kind has two."""
    if kind == "pred":
        return bits.astype(bool)
    letters, size, pair = re.fullmatch(r"([a-z]+)(\d+)(x2)?", kind).groups()  # type: ignore[union-attr]
    bits = bits.astype(f"u{int(size) // 8 * (2 if pair else 1)}")
    if pair:
        bits = bits[:, None].view(f"u{int(size) // 8}")
    if letters == "bf":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(f"{'u' if letters == 'b' else letters.replace('s', 'i')}{int(size) // 8}")


def _encoded(numbers: Array, kind: str, width: int) -> Array:
    """Return the bits of registers of so many bits, from numbers that are not yet rounded to their kind."""
    if kind == "pred":
        return numbers.astype(bool)
    single, *pair = kind.split("x")
    if kind.startswith("bf"):
        bits = numbers.astype(np.float32).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
        numbers = np.where(np.isnan(numbers), np.uint32(0x7FFF), rounded).astype(np.uint16)
    elif kind.startswith("f"):
        numbers = numbers.astype(f"f{int(single[1:]) // 8}")
    if pair:
        return np.ascontiguousarray(numbers).view(f"u{2 * numbers.itemsize}")[:, 0]
    if numbers.dtype.kind == "f":
        numbers = numbers.view(f"u{numbers.itemsize}")
    return numbers.astype(f"{numbers.dtype.kind}{width // 8}").view(f"u{width // 8}")  # with its sign


class _Memory:
    """Bytes, which of them there are, and which warp wrote and read each last, since which barrier of its program."""

    def __init__(self, name: str, size: int, warps: int, *, orders: bool) -> None:
        self.name = name
        self.bytes = np.full(size, 0xFF, np.uint8)
        self.exists = np.ones(size, bool)
        self.orders = orders
        self._warps = warps  # of a program
        self._last = [np.full((2, size if orders else 0), -1, np.int32) for _ in range(2)]  # write and read

    def places(self, address_K: Array, num_bytes: int) -> Array:
        """Return the places (K, num_bytes) behind addresses. Raises `KernelError` unless they are there and aligned."""
        places = address_K[:, None] + np.arange(num_bytes)
        if (address_K % num_bytes).any():
            raise KernelError(f"{self.name} memory: an address is not a multiple of {num_bytes} bytes")
        if (places < 0).any() or (places >= len(self.bytes)).any() or not self.exists[places].all():
            raise KernelError(f"{self.name} memory: an address is outside of what there is")
        return places

    def note(self, places: Array, warp_K: Array, barrier_K: Array, data: Array | None) -> None:
        """Note a read, or a write of data. Raises `KernelError` if its order among others is not sure and matters."""
        if not self.orders:
            return
        unsure = np.zeros(places.shape, bool)
        for last in self._last if data is not None else self._last[:1]:
            warp, barrier = last[:, places]
            elsewhere = warp // self._warps != warp_K[:, None] // self._warps
            other = (warp >= 0) & (warp != warp_K[:, None])
            unsure |= other & (elsewhere | (barrier == barrier_K[:, None]))
        if data is not None:
            unsure &= self.bytes[places] != data
        if unsure.any():
            raise KernelError(f"{self.name} memory: a value that another warp or program uses with no barrier between")
        self._last[data is None][:, places] = np.stack([warp_K, barrier_K])[:, :, None]


class Machine:
    """Programs of a launch.

    Args:
        ptx: the code of a kernel.
        programs: the size of the grid.
        parameters: the bits of each argument; an address of a tensor is one of `tensors`.
        tensors: the bytes of tensors by address; `run` changes them.
        shared: bytes of memory that the threads of a program share.
        chosen: the numbers of the programs that run; None for all.
        orders: whether to raise `KernelError` if the result depends on the order of warps.
    """

    def __init__(
        self,
        ptx: str,
        programs: Sequence[int],
        parameters: Sequence[int],
        tensors: Mapping[int, Array],
        shared: int,
        *,
        chosen: Sequence[int] | None = None,
        orders: bool = True,
    ) -> None:
        names, threads, self._code, self._labels, self._tables = parse(ptx)
        self._parameters = dict(zip(names, parameters, strict=True))
        self._grid = [*programs, 1, 1][:3]
        number = np.arange(np.prod(self._grid)) if chosen is None else np.array(chosen)
        self._program = np.repeat(np.arange(len(number)), threads)
        self._threads, self._N = threads, len(self._program)
        self._thread = np.tile(np.arange(threads), len(number))
        self._warp = np.arange(self._N) // WARP
        self._of_grid = np.unravel_index(number[self._program], self._grid, order="F")
        self._barriers = np.zeros(len(number), np.int64)  # that each program has passed
        warps = threads // WARP
        self._shared = _Memory("shared", len(number) * shared, warps, orders=orders)
        self._bytes_of_a_program = shared
        end = max((address + len(each) for address, each in tensors.items()), default=_BASE)
        self._global = _Memory("global", end - _BASE, warps, orders=orders)
        self._global.exists[:] = False
        self._tensors = [(slice(start - _BASE, start - _BASE + len(each)), each) for start, each in tensors.items()]
        for part, each in self._tensors:
            self._global.bytes[part], self._global.exists[part] = each, True
        self._registers: dict[str, Array] = {}
        self._num_groups = np.zeros(self._N, np.int64)  # of asynchronous copies that a thread has begun
        self._copies: list[tuple[Array, Array, Array, Array]] = []  # that wait: threads, group, places, data
        self.work: Counter[str] = Counter()

    def run(self) -> None:
        """Execute the code to its end. Raises `KernelError`, and `NotImplementedError` for an unknown instruction."""
        place = np.zeros(self._N, np.int64)  # of each thread's next instruction
        while (now := int(place.min())) < len(self._code):
            here = place == now
            one = self._code[now]
            place[here] += 1
            self.work["instructions"] += int(here.reshape(-1, WARP).any(1).sum())
            does = here & (self._registers[one.predicate] ^ one.negated) if one.predicate else here
            if not does.any():
                continue
            if one.name == "bra":
                place[does] = self._labels[one.operands[-1]]
            elif one.name == "brx":
                targets = np.array([self._labels[each] for each in self._tables[one.operands[1]]])
                place[does] = targets[self._read(one.operands[0], "u32")[does]]
            elif one.name == "ret":
                place[does] = len(self._code)
            else:
                try:
                    with np.errstate(all="ignore"):
                        self._execute(one, does)
                except KernelError as error:
                    raise KernelError(
                        f"{error}, in {one.name}.{'.'.join(one.modifiers)} {', '.join(one.operands)}"
                    ) from None
        for part, each in self._tensors:
            each[:] = self._global.bytes[part]

    def _execute(self, one: Instruction, does: Array) -> None:
        kind, given = one.modifiers[-1] if one.modifiers else "", one.operands
        if one.name in _OF_TWO:
            self._write(given[0], _OF_TWO[one.name](*(self._read(each, kind) for each in given[1:])), kind, does)
        elif one.name in _OF_ONE and not any(each.startswith("{") for each in given):
            self._write(given[0], _OF_ONE[one.name](self._read(given[1], kind)), kind, does)
        elif (method := getattr(self, f"_{one.name}", None)) is not None:
            method(one, does)
        else:
            raise NotImplementedError(f"the instruction {one}")

    def _bits(self, operand: str) -> Array:
        if operand in self._registers:
            return self._registers[operand]
        if operand == "%tid.x":
            return self._thread
        if operand.startswith(("%ctaid.", "%nctaid.")):
            axis = "xyz".index(operand[-1])
            return self._of_grid[axis] if operand[1] == "c" else np.full(self._N, self._grid[axis])
        if operand == "global_smem":
            return np.zeros(self._N, np.int64)
        if operand.startswith("%"):  # nothing was written to it
            return np.full(self._N, (1 << 64) - 1, np.uint64)
        number = int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)
        return np.full(self._N, number)

    def _read(self, operand: str, kind: str) -> Array:
        return _decoded(self._bits(operand), kind)

    def _write(self, register: str, numbers: Array, kind: str, does: Array) -> None:
        width = _WIDTHS[re.match("%([a-z]+)", register)[1]]  # type: ignore[index]
        bits = _encoded(numbers, kind, width)
        before = self._registers.get(register, bits)
        self._registers[register] = bits if does.all() else np.where(does, bits, before)

    def _mul(self, one: Instruction, does: Array) -> None:
        form, kind = one.modifiers[0], one.modifiers[-1]
        x, y = (self._read(each, kind) for each in one.operands[1:3])
        to, product = kind, x * y
        if form == "wide":
            to = f"{kind[0]}{16 * x.itemsize}"
            product = np.multiply(x, y, dtype=f"{x.dtype.kind}{2 * x.itemsize}")
        elif form == "hi":
            product = (x.astype(object) * y.astype(object) >> 8 * x.itemsize).astype(x.dtype)
        if one.name == "mad":
            product = product + self._read(one.operands[3], to)
        self._write(one.operands[0], product, to, does)

    _mad = _mul

    def _fma(self, one: Instruction, does: Array) -> None:
        x, y, z = (self._read(each, one.modifiers[-1]).astype(np.float64) for each in one.operands[1:])
        self._write(one.operands[0], x * y + z, one.modifiers[-1], does)

    def _div(self, one: Instruction, does: Array) -> None:
        x, y = (self._read(each, one.modifiers[-1]) for each in one.operands[1:])
        if x.dtype.kind == "f":
            quotient = x / y
        else:  # rounded to zero
            y = np.where(y == 0, 1, y).astype(y.dtype)
            quotient = (x - np.fmod(x, y)) // y
        self._write(one.operands[0], quotient, one.modifiers[-1], does)

    def _rem(self, one: Instruction, does: Array) -> None:
        x, y = (self._read(each, one.modifiers[-1]) for each in one.operands[1:])
        self._write(one.operands[0], np.fmod(x, np.where(y == 0, 1, y).astype(y.dtype)), one.modifiers[-1], does)

    def _shl(self, one: Instruction, does: Array) -> None:
        x, by = self._read(one.operands[1], one.modifiers[-1]), self._read(one.operands[2], "u32")
        most = 8 * x.itemsize - 1
        shift = np.left_shift if one.name == "shl" else np.right_shift
        near = shift(x, np.minimum(by, most).astype(x.dtype))
        beyond = -(x < 0).astype(x.dtype) if one.modifiers[-1].startswith("s") else np.zeros_like(x)
        self._write(one.operands[0], np.where(by > most, beyond, near), one.modifiers[-1], does)

    _shr = _shl

    def _bfe(self, one: Instruction, does: Array) -> None:
        x, start, length = (self._read(each, "u32").astype(np.int64) for each in one.operands[1:])
        field = (x >> start) & ((1 << length) - 1)
        if one.modifiers[-1] == "s32":
            field -= (field >> np.maximum(length - 1, 0)) << length  # its first bit is a sign
        self._write(one.operands[0], field.astype(np.uint32), "u32", does)

    def _selp(self, one: Instruction, does: Array) -> None:
        x, y = (self._read(each, one.modifiers[-1]) for each in one.operands[1:3])
        self._write(one.operands[0], np.where(self._read(one.operands[3], "pred"), x, y), one.modifiers[-1], does)

    def _setp(self, one: Instruction, does: Array) -> None:
        x, y = (self._read(each, one.modifiers[-1]) for each in one.operands[1:])
        name = one.modifiers[0]
        holds = _COMPARISONS[name[:2]](x, y) if name != "nan" else np.zeros(self._N, bool)
        unordered = np.isnan(x) | np.isnan(y) if x.dtype.kind == "f" else np.zeros(self._N, bool)
        self._write(one.operands[0], np.where(unordered, name[2:] in {"u", "n"}, holds), "pred", does)

    def _cvt(self, one: Instruction, does: Array) -> None:
        *how, to, source = one.modifiers
        numbers = [self._read(each, source) for each in one.operands[1:]]
        x = np.stack(numbers[::-1], 1) if to.endswith("x2") else numbers[0]
        for each in how:
            x = _ROUNDINGS[each](x) if each in _ROUNDINGS else x
        if to[0] in "sub" and not to.startswith("bf"):
            dtype = np.dtype(f"{'i' if to[0] == 's' else 'u'}{int(to[1:]) // 8}")
            if x.dtype.kind == "f":
                limits = np.iinfo(dtype)
                x = np.nan_to_num(np.clip(x.astype(np.float64), limits.min, limits.max))
            x = x.astype(dtype)
        self._write(one.operands[0], x, to, does)

    def _mov(self, one: Instruction, does: Array) -> None:
        """Take a value apart into several registers, or put it together."""
        target, source = one.operands
        parts = re.findall(r"[%\w]+", target if target.startswith("{") else source)
        width = int(one.modifiers[-1][1:]) // len(parts)
        if target.startswith("{"):
            of_parts = self._read(source, one.modifiers[-1])[:, None].view(f"u{width // 8}")
            for part, numbers in zip(parts, of_parts.T, strict=True):
                if part != "_":
                    self._write(part, numbers, f"b{width}", does)
        else:
            together = np.stack([self._read(each, f"b{width}") for each in parts], 1)
            self._write(target, together.view(f"u{width * len(parts) // 8}")[:, 0], one.modifiers[-1], does)

    def _shfl(self, one: Instruction, does: Array) -> None:
        self._check_whole(does, WARP)
        lane, other = np.arange(self._N) % WARP, self._read(one.operands[2], "u32").astype(np.int64)
        source = {"bfly": lane ^ other, "idx": other % WARP}[one.modifiers[1]]
        self._write(
            one.operands[0], self._read(one.operands[1], "b32")[np.arange(self._N) - lane + source], "b32", does
        )

    def _redux(self, one: Instruction, does: Array) -> None:
        """Give all threads of a warp the sum, or the least or greatest, of their whole numbers."""
        self._check_whole(does, WARP)
        numbers = self._read(one.operands[1], one.modifiers[-1]).reshape(-1, WARP)
        of_warps = {"add": np.add, "min": np.minimum, "max": np.maximum}[one.modifiers[1]].reduce(numbers, 1)
        self._write(one.operands[0], np.repeat(of_warps.astype(numbers.dtype), WARP), one.modifiers[-1], does)

    def _bar(self, one: Instruction, does: Array) -> None:
        self._check_whole(does, self._threads)
        self._barriers[np.unique(self._program[does])] += 1

    def _check_whole(self, does: Array, size: int) -> None:
        parts = does.reshape(-1, size)
        if (parts.any(1) != parts.all(1)).any():
            raise KernelError(f"only a part of {size} threads gets here")

    def _access(
        self, memory: _Memory, address: Array, num_bytes: int, does: Array, data: Array | None = None
    ) -> tuple[Array, Array]:
        """Note a read, or a write of `data` (N, bytes). Returns the threads (K,) and their places (K, bytes)."""
        threads = np.flatnonzero(does)
        first = address[threads]
        if memory is self._shared:
            if (first < 0).any() or (first + num_bytes > self._bytes_of_a_program).any():
                raise KernelError("shared memory: an address is outside of what there is")
            first = first + self._program[threads] * self._bytes_of_a_program
        places = memory.places(first, num_bytes)
        barriers = self._barriers[self._program[threads]]
        memory.note(places, self._warp[threads], barriers, None if data is None else data[threads])
        if memory is self._global:
            sectors = np.unique(np.stack([self._warp[threads], first // SECTOR]), axis=1).shape[1]
            self.work["sectors read" if data is None else "sectors written"] += sectors
        return threads, places

    def _load(self, memory: _Memory, address: Array, num_bytes: int, does: Array) -> Array:
        threads, places = self._access(memory, address, num_bytes, does)
        data = np.zeros((self._N, num_bytes), np.uint8)
        data[threads] = memory.bytes[places]
        return data

    def _store(self, memory: _Memory, address: Array, data: Array, does: Array) -> None:
        threads, places = self._access(memory, address, data.shape[1], does, data)
        memory.bytes[places] = data[threads]
        if (memory.bytes[places] != data[threads]).any():
            raise KernelError(f"{memory.name} memory: threads write different values to one place")

    def _address(self, operand: str) -> Array:
        register, offset = re.fullmatch(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand).groups()  # type: ignore[union-attr]
        return self._bits(register).astype(np.int64) - (_BASE if register.startswith("%rd") else 0) + int(offset or 0)

    def _ld(self, one: Instruction, does: Array) -> None:
        kind, registers = one.modifiers[-1], re.findall(r"%\w+", one.operands[0])
        if one.modifiers[0] == "param":
            bits = np.full(self._N, self._parameters[one.operands[1].strip("[]")], np.uint64)
            self._write(registers[0], _decoded(bits, kind), kind, does)
            return
        memory = self._shared if one.modifiers[0] == "shared" else self._global
        size = int(kind[1:]) // 8
        data = self._load(memory, self._address(one.operands[1]), size * len(registers), does).view(f"u{size}")
        for register, numbers in zip(registers, data.T, strict=True):
            self._write(register, numbers, kind, does)

    def _st(self, one: Instruction, does: Array) -> None:
        memory = self._shared if one.modifiers[0] == "shared" else self._global
        numbers = [self._read(each, one.modifiers[-1]) for each in re.findall(r"[%\w]+", one.operands[1])]
        self._store(memory, self._address(one.operands[0]), np.stack(numbers, 1).view(np.uint8), does)

    def _atom(self, one: Instruction, does: Array) -> None:
        """Add to global memory, one thread after the other, in an order that makes no difference for integers."""
        kind, what = one.modifiers[-1], one.modifiers[-2]
        if what != "add" or kind.startswith("f"):
            raise NotImplementedError(f"the instruction {one}")
        address, numbers = self._address(one.operands[-2]), self._read(one.operands[-1], kind)
        before = np.zeros_like(numbers)
        for thread in np.flatnonzero(does):
            entry = self._global.bytes[self._global.places(address[[thread]], numbers.itemsize)].view(numbers.dtype)
            before[thread] = entry[0, 0]
            self._global.bytes[address[thread] :][: numbers.itemsize] = (entry + numbers[thread]).view(np.uint8)
        if one.name == "atom":
            self._write(one.operands[0], before, kind, does)

    _red = _atom

    def _cp(self, one: Instruction, does: Array) -> None:
        """Copy from global to shared memory: begun now, and there when its group has been waited for."""
        if one.modifiers[1] == "commit_group":
            self._num_groups[does] += 1
        elif one.modifiers[1] == "wait_group":
            waiting, self._copies = self._copies, []
            for threads, group, places, data in waiting:
                done = does[threads] & (group < self._num_groups[threads] - int(one.operands[0]))
                self._shared.bytes[places[done]] = data[done]
                left = tuple(each[~done] for each in (threads, group, places, data))
                self._copies += [left] if len(left[0]) else []  # type: ignore[list-item]
        else:
            size = int(one.operands[2], 0)
            is_read = does & (self._read(one.operands[3], "u32") > 0) if len(one.operands) > 3 else does
            data = self._load(self._global, self._address(one.operands[1]), size, is_read)
            threads, places = self._access(self._shared, self._address(one.operands[0]), size, does, data)
            self._copies.append((threads, self._num_groups[threads], places, data[threads]))

    def _ldmatrix(self, one: Instruction, does: Array) -> None:
        """Exchange matrices of 8 x 8 halves with memory: a thread gives the address of a row, and has two entries."""
        self._check_whole(does, WARP)
        loads = one.name == "ldmatrix"
        registers = re.findall(r"%\w+", one.operands[0 if loads else 1])
        address = self._address(one.operands[1 if loads else 0])
        gives = does & (np.arange(self._N) % WARP < 8 * len(registers))
        order = (0, 1, 3, 2) if "trans" in one.modifiers else (0, 1, 2, 3)
        if loads:
            rows = self._load(self._shared, address, 16, gives).view(np.uint16).reshape(-1, 4, 8, 8)
            entries = np.ascontiguousarray(rows.transpose(order)).view(np.uint32)
            for number, register in enumerate(registers):
                self._write(register, entries[:, number].reshape(-1), "b32", does)
        else:
            numbers = [self._read(each, "b32").reshape(-1, 8, 4) for each in registers]
            numbers += [np.zeros_like(numbers[0])] * (4 - len(numbers))
            rows = np.ascontiguousarray(np.stack(numbers, 1).view(np.uint16).transpose(order))
            self._store(self._shared, address, rows.reshape(-1, 8).view(np.uint8), gives)

    _stmatrix = _ldmatrix


class _Driver:
    """A driver of Triton for a GPU that is not there. Its number is not that of a GPU that may be there."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, WARP)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, _: int) -> int:
        return 0


def compiled_for(capability: int, kernel: Any, programs: Sequence[int], *arguments: Any, **constants: Any) -> Any:
    """Return what Triton compiles for a launch on a GPU, such as 90 for an H100, whatever is there."""
    with mock.patch.object(triton.runtime.driver, "_active", _Driver(capability)):
        return kernel.warmup(*arguments, grid=tuple(programs), **constants)


def machine_of(
    kernel: Any,
    programs: Sequence[int],
    *arguments: Any,
    chosen: Sequence[int] | None = None,
    capability: int = 90,
    **constants: Any,
) -> Machine:
    """Return the machine of a launch on tensors of a CPU, whose memory it changes when it runs.

    With `chosen`, only those programs run, to count their work, and no order is checked.
    """
    compiled = compiled_for(capability, kernel, programs, *arguments, **constants)
    given = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
    tensors: dict[int, Array] = {}
    addresses: dict[int, int] = {}  # of a storage here, and there
    parameters, free = [], _BASE
    for name, kind in compiled.src.signature.items():
        value = given[name]
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            if storage.data_ptr() not in addresses:
                addresses[storage.data_ptr()] = free
                tensors[free] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
                free += -(-(storage.nbytes() + _GAP) // _GAP) * _GAP
            parameters.append(addresses[storage.data_ptr()] + value.data_ptr() - storage.data_ptr())
        elif kind != "constexpr":
            parameters.append(int(np.float32(value).view(np.uint32)) if kind == "fp32" else int(value) % (1 << 64))
    parameters += [0, 0]  # two addresses of memory that Triton may ask for
    shared = compiled.metadata.shared
    return Machine(compiled.asm["ptx"], programs, parameters, tensors, shared, chosen=chosen, orders=chosen is None)


def launch(kernel: Any, programs: Sequence[int], *arguments: Any, **constants: Any) -> None:
    """Do what `trainer.triton_works.launch` does, on tensors of a CPU."""
    if not isinstance(arguments[0], FakeTensor):
        machine_of(kernel, programs, *arguments, **constants).run()

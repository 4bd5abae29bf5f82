"""Machine code runs on a CPU as on a GPU, and what a GPU would not allow, or not do in a sure order, is found."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from benchmarks.ptx import KernelError, Machine, launch, machine_of

pytestmark = pytest.mark.pinned  # each version of Triton writes other code


@triton.jit
def _whole_numbers(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, SIZE)
    x, y = tl.load(x_ptr + place), tl.load(y_ptr + place)
    tl.store(out_ptr + place, x // y)
    tl.store(out_ptr + SIZE + place, x % y)
    tl.store(out_ptr + 2 * SIZE + place, x >> 3)
    tl.store(out_ptr + 3 * SIZE + place, tl.minimum(x, y) ^ (x * y))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_whole_numbers_are_divided_as_in_c(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-30_000, 30_000, (128,), generator=generator).to(dtype)
    y = torch.randint(1, 50, (128,), generator=generator).to(dtype) * torch.tensor([1, -1], dtype=dtype).repeat(64)
    out = torch.empty(4, 128, dtype=dtype)
    launch(_whole_numbers, (1,), x, y, out, SIZE=128)
    expected = [torch.div(x, y, rounding_mode="trunc"), torch.fmod(x, y), x >> 3, torch.minimum(x, y) ^ (x * y)]
    assert torch.equal(out, torch.stack(expected))


@triton.jit
def _numbers(x_ptr, y_ptr, out_ptr, half_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, SIZE)
    at = place[:, None] * SIZE + place[None, :]
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(out_ptr + at, tl.dot(x, tl.trans(y), input_precision="ieee"))
    tl.store(half_ptr + at, (tl.where(x > y, x, -y) * 3 + libdevice.rsqrt(tl.abs(x))).to(tl.bfloat16))


def test_floats_are_those_of_torch() -> None:
    x, y = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(0))
    out, half = torch.empty(32, 32), torch.empty(32, 32, dtype=torch.bfloat16)
    launch(_numbers, (1,), x, y, out, half, SIZE=32)
    torch.testing.assert_close(out, x @ y.T)
    exact = (torch.where(x > y, x, -y) * 3 + x.abs().rsqrt()).bfloat16()
    torch.testing.assert_close(half, exact, rtol=2.0**-7, atol=0)
    assert (half == exact).float().mean() > 0.95  # the sum may be rounded once instead of twice


@triton.jit
def _reverse(x_ptr, LENGTH: tl.constexpr, STEP: tl.constexpr, WAITS: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, LENGTH)
    x_ptr += tl.program_id(0) * STEP
    x = tl.load(x_ptr + place)
    if WAITS:
        tl.debug_barrier()
    tl.store(x_ptr + LENGTH - 1 - place, x)


def reversed_by(x: Tensor, *, programs: int, step: int, waits: bool) -> Tensor:
    x = x.clone()
    launch(_reverse, (programs,), x, LENGTH=128, STEP=step, WAITS=waits)
    return x


def test_an_order_that_is_not_sure_is_found() -> None:
    x = torch.arange(256.0)
    assert torch.equal(reversed_by(x, programs=2, step=128, waits=True), x.view(2, 128).flip(1).flatten())
    with pytest.raises(KernelError, match=r"no barrier between, in st\.global"):
        reversed_by(x, programs=2, step=128, waits=False)
    with pytest.raises(KernelError, match="another warp or program"):
        reversed_by(x, programs=2, step=64, waits=True)


def test_an_address_outside_of_the_tensors_is_found() -> None:
    with pytest.raises(KernelError, match=r"outside of what there is, in ld\.global"):
        reversed_by(torch.arange(250.0), programs=2, step=128, waits=True)


def code(body: str, threads: int = 64) -> str:
    return f".visible .entry kernel(\n.param .u64 kernel_param_0\n)\n.reqntid {threads}\n{{\n{body}\nret;\n}}\n"


SHARED = """
    mov.u32 %r1, %tid.x;
    mov.b32 %r2, global_smem;
    shl.b32 %r3, %r1, 2;
    add.s32 %r4, %r2, %r3;
    st.shared.b32 [%r4], %r1;
    {barrier}
    xor.b32 %r5, %r4, 128;
    ld.shared.b32 %r6, [%r5];
    ld.param.b64 %rd1, [kernel_param_0];
    mad.wide.u32 %rd2, %r1, 4, %rd1;
    st.global.b32 [%rd2], {{ %r6 }};
"""


def test_threads_that_share_memory_wait_for_each_other() -> None:
    out = np.zeros(64, np.uint32)
    address = 1 << 40
    Machine(code(SHARED.format(barrier="bar.sync 0;")), (1,), [address], {address: out.view(np.uint8)}, 256).run()
    assert out.tolist() == [*range(32, 64), *range(32)]
    with pytest.raises(KernelError, match="shared memory: a value that another warp"):
        Machine(code(SHARED.format(barrier="")), (1,), [address], {address: out.view(np.uint8)}, 256).run()
    with pytest.raises(KernelError, match="shared memory: an address is outside"):
        Machine(code(SHARED.format(barrier="")), (1,), [address], {address: out.view(np.uint8)}, 128).run()


def test_a_barrier_that_only_some_threads_reach_is_found() -> None:
    part = "mov.u32 %r1, %tid.x;\nsetp.lt.u32 %p1, %r1, 32;\n@%p1 bra $L1;\nbar.sync 0;\n$L1:"
    with pytest.raises(KernelError, match="only a part of 64 threads"):
        Machine(code(part), (1,), [0], {}, 0).run()


def test_an_unknown_instruction_is_named() -> None:
    with pytest.raises(NotImplementedError, match="wgmma"):
        Machine(code("wgmma.fence.sync.aligned;"), (1,), [0], {}, 0).run()


def test_work_is_counted_for_the_programs_that_are_chosen() -> None:
    x = torch.arange(512.0)
    machine = machine_of(_reverse, (4,), x, LENGTH=128, STEP=128, WAITS=True, chosen=[1])
    machine.run()
    assert machine.work["sectors read"] == machine.work["sectors written"] == 128 * 4 // 32
    assert 4 * 10 < machine.work["instructions"] < 4 * 60  # of four warps
    assert torch.equal(x.view(4, 128)[1], torch.arange(128.0, 256.0).flip(0))
    assert torch.equal(x.view(4, 128)[[0, 2, 3]], torch.arange(512.0).view(4, 128)[[0, 2, 3]])

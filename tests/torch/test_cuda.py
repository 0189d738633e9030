"""Copies of CUDA tensors into pinned memory, with a double of CUDA."""

from __future__ import annotations

import pytest
import torch

from rankdump._frameworks.torch.device_tensors import (
    CudaCopier,
    CudaTensor,
    TorchCudaRuntime,
    find_accelerator,
)


class FakeCuda(TorchCudaRuntime):
    """Streams as a list of requests; a copy happens when the test runs it."""

    def __init__(self, *, registers: bool = True) -> None:
        self.registers = registers
        self.pinned: dict[int, int] = {}
        self.asked: list[str] = []
        self.pending: list[FakeCudaEvent] = []

    def register(self, address: int, byte_count: int) -> bool:
        if self.registers:
            self.pinned[address] = byte_count
        return self.registers

    def unregister(self, address: int) -> None:
        del self.pinned[address]

    def copy(self, tensor: torch.Tensor, target: torch.Tensor) -> FakeCudaEvent:
        return self._begin("in order", tensor, target)

    def copy_aside(self, tensor: torch.Tensor, target: torch.Tensor) -> FakeCudaEvent:
        return self._begin("aside", tensor.clone(), target)

    def _begin(self, how: str, tensor: torch.Tensor, target: torch.Tensor) -> FakeCudaEvent:
        self.asked.append(how)
        self.pending.append(FakeCudaEvent(tensor, target))
        return self.pending[-1]


class FakeCudaEvent:
    def __init__(self, tensor: torch.Tensor, target: torch.Tensor) -> None:
        self._tensor, self._target = tensor, target
        self._over = self.fails = False

    def happen(self) -> None:
        self._target.copy_(self._tensor)
        self._over = True

    def query(self) -> bool:
        if self.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self._over


def into(tensor: torch.Tensor) -> memoryview:
    return memoryview(bytearray(tensor.numel() * tensor.element_size()))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12, dtype=torch.float32).reshape(3, 4).t(),
        torch.arange(6).to(torch.bfloat16)[::2],
        torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn),
        torch.tensor([True, False, True]),
        torch.tensor(3.5),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.nn.Parameter(torch.ones(2, 2)),
    ],
    ids=["transposed", "bfloat16", "float8", "bool", "0-d", "conjugated", "parameter"],
)
def test_copier_packs_elements(tensor: torch.Tensor):
    runtime = FakeCuda()
    target = into(tensor)
    transfer = CudaTensor(tensor, CudaCopier(runtime)).copy_into(target)
    assert not transfer.is_done()
    runtime.pending[0].happen()
    assert transfer.is_done()
    expected = tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
    assert bytes(target) == bytes(expected.tolist())


def test_copier_uses_the_stream_of_the_job_beyond_its_limit():
    """Device memory of waiting copies is bounded, and released."""
    runtime = FakeCuda()
    tensor = torch.zeros(100, dtype=torch.uint8)
    copier = CudaCopier(runtime, max_bytes=250)
    transfers = [copier.begin(tensor, into(tensor)) for _ in range(3)]
    assert runtime.asked == ["aside", "aside", "in order"]
    for event in runtime.pending:
        event.happen()
    assert all(each.is_done() and each.is_done() for each in transfers)
    copier.begin(tensor, into(tensor))
    copier.begin(tensor, into(tensor))
    assert runtime.asked[3:] == ["aside", "aside"]


def test_copier_releases_the_bytes_of_a_failed_device():
    runtime = FakeCuda()
    tensor = torch.zeros(100, dtype=torch.uint8)
    copier = CudaCopier(runtime, max_bytes=100)
    transfer = copier.begin(tensor, into(tensor))
    runtime.pending[0].fails = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        transfer.is_done()
    copier.begin(tensor, into(tensor))
    assert runtime.asked == ["aside", "aside"]


def test_copier_pins_and_unpins_memory():
    runtime = FakeCuda()
    memory = memoryview(bytearray(4096))
    unpin = CudaCopier(runtime).pin(memory)
    assert list(runtime.pinned.values()) == [4096]
    assert unpin is not None
    unpin()
    assert runtime.pinned == {}
    memory.release()  # nobody holds on to it


def test_copier_reports_memory_that_cannot_be_pinned():
    assert CudaCopier(FakeCuda(registers=False)).pin(memoryview(bytearray(4096))) is None


def test_host_tensor_has_no_accelerator():
    assert find_accelerator(torch.zeros(3)) is None

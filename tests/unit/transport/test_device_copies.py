"""Copies by accelerators: entries are published in order when their copies are complete."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.send_buffer_rig import SIZE, SendBufferRig

from rankdump._core.recorder_protocol import PlacementResult


class FakeDevice:
    """Memory of an accelerator, whose copies end when the test says so."""

    def __init__(self, *, pins: bool = True, fails_to: str = "") -> None:
        self.pins = pins
        self.fails_to = fails_to
        self.pinned: list[int] = []
        self.unpinned = 0
        self.begun: list[FakeTransfer] = []

    def may(self, what: str) -> None:
        if what == self.fails_to:
            raise RuntimeError(f"this driver cannot {what}")

    def tensor(self, byte: int) -> DeviceTensor:
        return DeviceTensor(self, bytes([byte]) * SIZE)


class FakeTransfer:
    def __init__(self, data: bytes, target: memoryview) -> None:
        self._data, self._target = data, target
        self._done = False
        self.fails = False

    def end(self) -> None:
        self._target[:] = self._data
        self._done = True

    def is_done(self) -> bool:
        if self.fails:
            raise RuntimeError("the device is lost")
        return self._done


class DeviceTensor:
    """A source with an accelerator."""

    def __init__(self, device: FakeDevice, data: bytes) -> None:
        self._device, self._data = device, data

    def accelerator(self) -> FakeCopier:
        return FakeCopier(self._device, self._data)

    def copy_into(self, target: memoryview) -> None:
        target[:] = self._data


class FakeCopier:
    def __init__(self, device: FakeDevice, data: bytes) -> None:
        self._device, self._data = device, data

    def pin(self, memory: memoryview) -> Callable[[], None] | None:
        self._device.may("pin")
        if not self._device.pins:
            return None
        self._device.pinned.append(memory.nbytes)

        def unpin() -> None:
            self._device.unpinned += 1

        return unpin

    def copy_into(self, target: memoryview) -> FakeTransfer:
        self._device.may("copy")
        self._device.begun.append(FakeTransfer(self._data, target))
        return self._device.begun[-1]


@pytest.fixture
def rig(tmp_path: Path) -> SendBufferRig:
    return SendBufferRig(tmp_path)


def data(byte: int) -> bytes:
    return bytes([byte]) * SIZE


def test_entry_is_published_when_its_copy_is_complete(rig: SendBufferRig):
    """In the order of the records, whichever copy ends first; the slab is pinned once."""
    device = FakeDevice()
    for byte in (1, 2, 3):
        assert rig.place(device.tensor(byte)) is PlacementResult.DONE
    assert len(device.pinned) == 1
    device.begun[1].end()
    rig.buffer.publish_finished_copies()
    assert rig.read() == []
    device.begun[0].end()
    rig.buffer.publish_finished_copies()
    assert rig.read() == [data(1), data(2)]
    assert rig.buffer.has_pending_copies
    device.begun[2].end()
    rig.buffer.publish_finished_copies()
    assert rig.read() == [data(3)]
    assert not rig.buffer.has_pending_copies


def test_failed_copy_is_reported_and_keeps_its_number(rig: SendBufferRig):
    device = FakeDevice()
    rig.place(device.tensor(1))
    rig.place(device.tensor(2))
    device.begun[0].fails = True
    device.begun[1].end()
    rig.buffer.publish_finished_copies()
    assert rig.read() == [None, data(2)]
    assert len(rig.torn) == 1


def test_copy_is_made_at_once_without_pinned_memory(rig: SendBufferRig):
    device = FakeDevice(pins=False)
    rig.place(device.tensor(1))
    assert rig.read() == [data(1)]
    assert device.begun == []


@pytest.mark.parametrize("fails_to", ["pin", "copy"])
def test_failing_device_loses_no_tensor(rig: SendBufferRig, fails_to: str):
    """The plain copy is made instead, for this tensor and for those after it."""
    device = FakeDevice(fails_to=fails_to)
    for byte in (1, 2):
        assert rig.place(device.tensor(byte)) is PlacementResult.DONE
    assert rig.read() == [data(1), data(2)]
    assert device.begun == []
    assert rig.torn == []


def test_slab_is_abandoned_after_the_last_copy(rig: SendBufferRig):
    """Copied data is carried over; the memory is unpinned before it is unmapped."""
    device = FakeDevice()
    rig.place(device.tensor(1))
    giving_up = threading.Thread(target=rig.buffer.abandon_ring)
    giving_up.start()
    assert device.unpinned == 0
    device.begun[0].end()
    giving_up.join(60)
    assert device.unpinned == 1
    assert [each.tensors for each in rig.buffer.items.numbered] == [1]


def test_hanging_copy_does_not_hold_up_close(rig: SendBufferRig):
    device = FakeDevice()
    rig.place(device.tensor(1))
    rig.buffer.wait_for_copies(rig.ring, 0.05)
    assert rig.ring.open_entries == 1
    assert rig.read() == []

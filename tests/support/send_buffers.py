"""Send buffers without a sender, for tests of their producers."""

from __future__ import annotations

from rankdump._core.recorder_protocol import PlacementResult, StagedRecord, TensorSource
from rankdump._core.session_protocol import MetadataItem, RecordHead
from rankdump._transport.send_buffer import SendBuffer


class SendBufferDouble(SendBuffer):
    """Keeps what is submitted, and places every tensor with the same result."""

    def __init__(self, result: PlacementResult = PlacementResult.ELSEWHERE) -> None:
        super().__init__(on_release=lambda _: None, on_copy_failed=lambda _: None)
        self._result = result
        self.submitted: list[StagedRecord | MetadataItem] = []

    def submit(self, item: StagedRecord | MetadataItem) -> None:
        self.submitted.append(item)

    def place_record(self, head: RecordHead, source: TensorSource) -> PlacementResult:
        return self._result

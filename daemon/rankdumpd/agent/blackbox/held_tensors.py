"""Tensors in full of the steps in one ring, within the bytes that the plan of its session allows:
the oldest ones leave first, and those about a fault after all others.
"""

from __future__ import annotations

from collections import deque

from rankdump._core.black_box import StepTensor, compute_tensor_bytes


class HeldTensors:
    """The tensors of one session; `StepRings` guards them with a lock."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.byte_count = 0
        """With what each takes besides its elements."""
        self._ranked: dict[bool, dict[int, deque[tuple[int, StepTensor]]]] = {False: {}, True: {}}
        """By whether they are about a fault, and by iteration, in the order of their arrival; each
        with the number of its arrival."""

    def __len__(self) -> int:
        return sum(len(held) for steps in self._ranked.values() for held in steps.values())

    @property
    def element_bytes(self) -> int:
        """Of their elements alone."""
        return self.byte_count - compute_tensor_bytes(0) * len(self)

    @property
    def oldest(self) -> tuple[bool, int] | None:
        """What orders the tensor that leaves next among those of all rings; None without any."""
        for about_fault, steps in self._ranked.items():
            for held in steps.values():
                return about_fault, held[0][0]
        return None

    def put(self, tensor: StepTensor, number: int) -> None:
        """Add a tensor of a step that is held, and that arrived as so manyth."""
        steps = self._ranked[tensor.about_fault]
        steps.setdefault(tensor.iteration, deque()).append((number, tensor))
        self.byte_count += compute_tensor_bytes(len(tensor.data))
        while self.byte_count > self._max_bytes:
            self.drop_oldest()

    def drop_oldest(self) -> None:
        """Drop the tensor that leaves next."""
        for steps in self._ranked.values():
            for iteration, held in steps.items():
                self._count_off(held.popleft()[1])
                if not held:
                    del steps[iteration]
                return

    def remove_step(self, iteration: int) -> int:
        """Remove the tensors of a step; return how many there were."""
        removed = [
            tensor for steps in self._ranked.values() for _, tensor in steps.pop(iteration, ())
        ]
        for tensor in removed:
            self._count_off(tensor)
        return len(removed)

    def list_step(self, iteration: int) -> tuple[StepTensor, ...]:
        """Return the tensors of a step, in the order of their arrival."""
        found = [each for steps in self._ranked.values() for each in steps.get(iteration, ())]
        return tuple(tensor for _, tensor in sorted(found, key=lambda each: each[0]))

    def _count_off(self, tensor: StepTensor) -> None:
        self.byte_count -= compute_tensor_bytes(len(tensor.data))

"""Job of two models configured as on Ascend; it also writes the tensors that its layers received.

ascend_models.py FOLDER steps | "model calls" | config | acl
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rankdump

FOLDER, MODE = Path(sys.argv[1]), sys.argv[2]
RANK = int(os.environ.get("RANK", "0"))
ITERATIONS = 4


class Encoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3)
        self.act = torch.nn.ReLU()

    def forward(self, image):
        return self.act(self.conv(image))


class Head(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(8 * 6 * 6, 4).to(torch.bfloat16)

    def forward(self, features):
        return self.fc(features.flatten(1).to(torch.bfloat16))


def watched(seen, model):
    """Record what every layer of a model reads and writes, by call."""
    for name, layer in model.named_modules():
        its_place = f"{type(model).__name__}/{name}"

        def note(_, inputs, output, place=its_place):
            calls = sum(key.startswith(f"{place}|") for key in seen) // 2
            for side, value in (("input", inputs[0]), ("output", output)):
                seen[f"{place}|{calls}|{side}"] = value.detach().float().numpy().copy()

        layer.register_forward_hook(note)


def main() -> None:
    torch.manual_seed(RANK)
    encoder, head = Encoder(), Head()
    seen: dict[str, Any] = {}
    watched(seen, encoder)
    watched(seen, head)
    images = [torch.randn(2, 3, 8, 8) for _ in range(ITERATIONS)]
    if MODE == "acl":
        two_configurations(encoder, head, images)
    else:
        session = config_session() if MODE == "config" else None
        session = rankdump.attach(encoder, session)
        rankdump.attach(head, session)
        for number, image in enumerate(images):
            if MODE != "model calls":
                session.step(number)
            head(encoder(image))
        session.close()
    np.savez(FOLDER / f"seen_{RANK}.npz", **seen)


def config_session():
    config = rankdump.tf.DumpConfig(True, str(FOLDER), "1-2", "output", dump_layer="conv fc")
    return rankdump.Session(config)


def two_configurations(encoder, head, images):
    """Dump two models one after the other, and run the first one again without a dump."""
    for model, file in ((encoder, "first.json"), (head, "second.json")):
        assert rankdump.acl.set_dump(str(FOLDER / file)) == 100045
        assert rankdump.acl.init_dump() == 0
        assert rankdump.acl.init_dump() == 100002
        assert rankdump.acl.set_dump(str(FOLDER / file)) == 0
        rankdump.attach(model)
        for image in images:
            head(encoder(image))
        assert rankdump.acl.finalize_dump() == 0
    head(encoder(images[0]))


if __name__ == "__main__":
    main()

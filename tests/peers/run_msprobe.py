"""Runs msprobe on one step of a small net: `run_msprobe.py FOLDER TASK MODE`.

Beside the dump it writes what torch reads of each tensor, as `{folder}/arrays.npz`, in float32
where numpy has no such type. Runs under the Python of a virtual environment that has it.
"""

# pyright: basic, reportMissingImports=false, reportCallIssue=false

import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    """Calls of torch with numbers, lists, keywords and several results, some in bfloat16."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.norm = nn.LayerNorm(8)
        self.fc = nn.Linear(8, 6)

    def forward(self, ids, *, scale=1.0):
        """Return one loss."""
        x = self.norm(self.embed(ids)) * scale
        first, rest = torch.split(self.fc(x), [2, 4], dim=-1)
        y = torch.cat([rest, first], dim=-1).to(torch.bfloat16)
        return functional.softmax(y.float().transpose(0, 1), dim=-1).square().sum()


def main(folder, task, mode):
    """Dump one step."""
    from msprobe.pytorch import PrecisionDebugger

    torch.manual_seed(0)
    torch.set_num_threads(1)
    folder.mkdir(parents=True)
    own = {"scope": [], "list": [], "data_mode": ["all"]}
    body = {"task": task, "dump_path": str(folder / "dump"), "rank": [], "step": []}
    body |= {"level": "mix", "risk_level": "ALL", task: own}
    if task == "statistics":
        own["summary_mode"] = mode
    config = folder / "config.json"
    config.write_text(json.dumps(body))
    net, debugger = Net(), PrecisionDebugger(config_path=str(config))
    debugger.start(model=net)
    net(torch.tensor([[0, 3, 1], [6, 2, 2]]), scale=0.5).backward()
    debugger.stop()
    debugger.step()
    arrays = {}
    for path in (folder / "dump").rglob("*.pt"):
        tensor = torch.load(path).detach()
        wide = tensor.float() if tensor.dtype is torch.bfloat16 else tensor
        arrays[path.name] = wide.numpy()
    np.savez(folder / "arrays.npz", **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

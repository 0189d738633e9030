"""First corpus files of the targets that read files and configurations."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from fuzz import samples
from support import native_tree, overflow_files
from support.api_dumps import call
from support.foreign_dumps import write_dump

from rankdump._binfile.overflow_record import parse_overflow_record
from rankdump._codec.file_codec import ZstdCodec
from rankdump._core.execution_order import format_finding_line, format_order_line
from rankdump._core.graph import GraphPart
from rankdump._core.manifest import Manifest, ManifestRecord
from rankdump._core.run_card import format_card
from rankdump._core.timeouts import format_hints
from rankdump._layout import statistic_tables
from rankdump._layout.api_files import format_stack_entry
from rankdump._layout.profile import DEFAULT_PROFILE
from rankdumpd.agent.storage.graph_files import render_graph
from rankdumpd.coordinator.hints.spread_history import HintState

_REPOSITORY = Path(__file__).parents[2]
_NPY = native_tree.npy_bytes(samples.VALUES)
_BIN = native_tree.bin_bytes(samples.VALUES, samples.VALUES)
_NAME = samples.NAME.replace("/", "_")
_ITEMS = ("max", "min", "avg")
_STACK = ("File a.py, line 7, in main, \n x + y",)
_OLD = overflow_files.old(core=overflow_files.CORE, status=(0, 0, 0x20))
_FILE = f"Add.{_NAME}.0.0.{samples.STAMP}.output.1.DefaultFormat.npy"
_RECORD = ManifestRecord(
    path=f"rank_0/Net/0/3/{_FILE}",
    timestamp_us=samples.STAMP,
    op_type="Add",
    op_name=samples.NAME,
    argument="args.0",
    dtype="float32",
    shape=(2, 3),
    bytes_in=24,
    bytes_stored=80,
    digest="d",
)


_CARD = json.loads(format_card(samples.CARD))


def _packed(data: bytes) -> bytes:
    return b"".join(ZstdCodec().encode([data]))


def _dialects() -> list[bytes]:
    examples = _REPOSITORY / "examples"
    acl = json.loads((examples / "acl.json").read_bytes())
    acl["dump"]["dump_path"] = "/tmp"
    config = {"dump_path": "/tmp", "dump_step": "0|5-8", "dump_layer": "a b"}
    return [
        b"\0" + (examples / "data_dump.json").read_bytes(),
        b"\0" + json.dumps(acl).encode(),
        b"\1" + json.dumps(config).encode(),
        b'\2{"a": "b"}',
        b"\2# names\na, b\n",
    ]


def _tables() -> list[bytes]:
    row = statistic_tables.format_statistic_line(samples.HEAD, ("5", "0", "2.5"), DEFAULT_PROFILE)
    whole = f"{statistic_tables.format_statistic_header(_ITEMS)}\n{row}\n"
    line = statistic_tables.format_operator_line(samples.KIND, "ND", "5,0,2.5")
    return [
        b"\0" + whole.encode(),
        f"\1{statistic_tables.format_operator_header(_ITEMS)}\n{line}\n".encode(),
    ]


def _apis() -> list[bytes]:
    lines = [line.text(extended=True) for line in call("NN_Conv2d_0", recomputed=True)]
    stack = f"{{\n{format_stack_entry('torch.nn.Conv2d(0) forward', _STACK)}\n}}"
    return [b"\0" + "\n".join(lines).encode() + b"\n", b"\1" + stack.encode()]


def _graphs() -> list[bytes]:
    [part] = [each for each in samples.DECLARATIONS if isinstance(each, GraphPart)]
    files = render_graph(part.graph, DEFAULT_PROFILE)
    return [data for name, data in files.items() if name.endswith(".ir")]


def _foreigns() -> dict[str, list[bytes]]:
    with tempfile.TemporaryDirectory() as folder:
        names = ("msprobe-tensor", "msprobe-md5", "debug-mode-text", "debug-mode", "flight")
        roots = [write_dump(name, Path(folder)) for name in (*names, "flight-json")]
        probed, checked, text, log, *flights = roots
        archive = next(probed.rglob("Tensor.to.0.forward.output.0.pt")).read_bytes()
        linear = json.loads(next(checked.rglob("dump.json")).read_bytes())
        calls = dict(list(linear["data"].items())[:4])
        stacks = dict(list(json.loads(next(probed.rglob("stack.json")).read_bytes()).items())[:2])
        logs = json.loads((log / "rank_0.json").read_bytes())
        logs["logs"] = [{**each, "fwd_stack_trace": None} for each in logs["logs"][:6]]
        return {
            "archives": [archive],
            "flights": [
                bytes([at]) + sorted(root.iterdir())[0].read_bytes()
                for at, root in enumerate(flights)
            ],
            "foreigns": [
                b"\0" + json.dumps({**linear, "data": calls}).encode(),
                b"\1" + json.dumps(stacks).encode(),
                b"\2" + (text / "rank_0.log").read_bytes()[:3000].rpartition(b"\n")[0],
                b"\2" + json.dumps(logs).encode(),
            ],
        }


FILES: dict[str, list[bytes]] = {
    "dialects": _dialects(),
    "paths": [
        b"\0rank_0/Net/0/3/Add.%s.0.0.%d.output.1.DefaultFormat.npy"
        % (_NAME.encode(), samples.STAMP),
        b"123.npy,Add.a.0.0.5.input.0.DefaultFormat.npy\n\0rank_0/Net/0/3/123.npy",
        b"\0" + b"20261121175901/0/Net/1/3/Add.Default_Add-op0.7.3.1700000000000000",
        b"\0rank0/torch_api_dump/NN_Conv2d_0_forward_input.0.npy",
        b"\0rank0/torch_api_dump/LAYER_stem_forward_input.npy",
    ],
    "places": [
        bytes([which]) + samples.STAMP.to_bytes(8, "little") + b"Add\0%s\0args.0\0" % name
        for which in range(0, 10, 3)
        for name in (samples.NAME.encode(), b"NN_Conv2d_0_forward")
    ],
    "npys": [
        _NPY,
        native_tree.npy_bytes(samples.VALUES.astype(np.float16), descr="<T2"),
        (_REPOSITORY / "tests/golden/npy/2.0.0-float32-empty.npy").read_bytes(),
    ],
    "packed": [b"\0" + _packed(_NPY), b"\1" + _packed(_NPY), b"\0" + _packed(b"") + _packed(b"ab")],
    "bins": [b"\0" + _BIN, b"\1" + _packed(_BIN), b"\0" + overflow_files.debug_file(_OLD)],
    "manifests": [Manifest(samples.BALANCE, 2, 0, "host", (_RECORD,)).to_json()],
    "cards": [
        b"\0" + format_card(samples.CARD),
        b"\1" + Manifest(samples.BALANCE, 2, 0, "host", (), card=_CARD).to_json(),
    ],
    "opdebugs": [
        b"\1" + _OLD,
        b"\1" + overflow_files.new(0, *range(15), version=1, size=200),
        b"\0" + parse_overflow_record(_OLD).to_json().encode(),
        b"\0" + parse_overflow_record(overflow_files.new(3, *range(14))).to_json().encode(),
    ],
    "statistics": _tables(),
    "apis": _apis(),
    "orders": [
        b"\0" + format_order_line(samples.ENTRY).encode(),
        b"\1" + format_finding_line(samples.FINDING).encode(),
        b"\2" + format_hints([samples.HINT]).encode(),
        b"\3" + HintState(3, {0: 5}, {0: 1}).to_json().encode(),
    ],
    "graphs": _graphs(),
    **_foreigns(),
}
"""By target; the first byte of some says which of its decoders it is for."""

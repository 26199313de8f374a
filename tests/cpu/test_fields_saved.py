"""Field case F39: saved graphs, in another process and damaged."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sums import Guarded, refused, run_child

import opgraph
from opgraph import SerializationError, data_type

FLOAT = data_type.FLOAT
HEAD = struct.Struct("<8sIQ")  # magic, format version, bytes of the body; then 32 bytes of checksum


def added(engine: Any) -> Any:
    """C = A + B, padded, with names, uids and alignment."""
    graph = opgraph.pygraph("sum", io_data_type=FLOAT)
    a = graph.tensor((2,), (3,), name="A", uid=10, alignment_value=4)
    b = graph.tensor((2,), name="B", uid=20)
    graph.add(a, b, name="plus").set_output(True).set_name("C").set_uid(30).set_stride((2,))
    return engine.build(graph)


def run_saved(path: str, computes: bool) -> None:
    graph = opgraph.pygraph("loaded")
    graph.deserialize(Path(path).read_bytes())
    assert [(t.name, t.uid, t.stride, t.alignment_value) for t in graph.tensors.values()] == [
        ("A", 10, (3,), 4),
        ("B", 20, (1,), 1),
        ("C", 30, (2,), 1),
    ]
    a = np.array([1, 9, 9, 2], np.float32)[::3]
    for keys in ((10, 20, 30), ("A", "B", "C")):
        out = Guarded((2,), (2,))
        graph.execute(dict(zip(keys, (a, np.array([3, 4], np.float32), out.view), strict=True)))
        out.check()
        assert out.view.tolist() == ([4, 6] if computes else [-1, -1])


def resealed(data: bytes, change: Any) -> bytes:
    """The file with another body and a checksum that fits it: what someone may write by hand."""
    body = json.loads(data[HEAD.size + 32 :])
    text = change(body)
    text = json.dumps(body if text is None else text).encode() if not isinstance(text, bytes) else text
    magic, version, _ = HEAD.unpack_from(data)
    head = HEAD.pack(magic, version, len(text))
    return head + hashlib.sha256(head + text).digest() + text


def bad(data: Any, *words: str) -> None:
    """Refused, by the right class, and the graph is as empty as before."""
    graph = opgraph.pygraph("empty")
    error = refused(lambda: graph.deserialize(data), "deserialize", *words, error=ValueError)
    assert type(error) is SerializationError
    assert not graph.nodes and not graph.tensors and not graph.plans
    graph.tensor((1,))  # still one that can be filled by hand


class TestF39SavedGraph:
    def test_in_a_new_process(self, any_engine, tmp_path):
        path = tmp_path / "graph"
        path.write_bytes(added(any_engine).serialize(as_bytes=True))
        run_child(run_saved, str(path), any_engine.computes)

    def test_list_of_ints(self, engine, tmp_path):
        graph = added(engine)
        data = graph.serialize()
        assert isinstance(data, list) and bytes(data) == graph.serialize(as_bytes=True, include_kernels=False)
        for form in (data, tuple(data), bytearray(data), memoryview(bytes(data))):
            opgraph.pygraph().deserialize(form)

    def test_empty_cut_off_and_foreign(self, engine):
        data = added(engine).serialize(as_bytes=True)
        bad(b"", "empty")
        bad([], "empty")
        bad(data[: len(data) // 2], "cut off")
        bad(data + b"\0", "too long")
        for count in range(1, 60):
            bad(data[:count], "cut off")
        for text in (b"plain text", b"plain text" * 50, b"\x80\x04]\x94.", b"{}"):
            bad(text, "no saved graph")
        bad("plain text", "text")
        bad([1, 2, 300], "0 to 255")

    def test_one_byte_flipped(self, engine):
        data = added(engine).serialize(as_bytes=True)
        graph = opgraph.pygraph("empty")
        for place in range(len(data)):
            for mask in (0x01, 0xFF):
                damaged = bytearray(data)
                damaged[place] ^= mask
                with pytest.raises(SerializationError):
                    graph.deserialize(bytes(damaged))
        graph.deserialize(data)  # it stayed empty

    def test_another_format_version(self, engine):
        data = bytearray(added(engine).serialize(as_bytes=True))
        for version in (0, 2, 2**32 - 1):
            data[8:12] = version.to_bytes(4, "little")
            bad(bytes(data), f"format version {version}", "reads version 1")

    @pytest.mark.parametrize("change", [
        lambda body: b"",
        lambda body: b"[]",
        lambda body: b"1e5",
        lambda body: b'{"a": NaN}',
        lambda body: b"\xff\xfe",
        lambda body: b"[" * 100_000,
        lambda body: {},
        lambda body: body.pop("plan") and None,
        lambda body: body["plan"].update(engine=5),
        lambda body: body["plan"].update(knobs={"precision": {"enum": ["data_type", "NO"]}}),
        lambda body: body["tensors"].pop(0) and None,
        lambda body: body["tensors"].append(body["tensors"][0]),
        lambda body: body["tensors"][0].update(uid="10"),
        lambda body: body["tensors"][0].update(uid=True),
        lambda body: body["tensors"][0].update(uid=-5),
        lambda body: body["tensors"][0].update(uid=2**70),
        lambda body: body["tensors"][0].update(dim=[-2]),
        lambda body: body["tensors"][0].update(dim=["2"]),
        lambda body: body["tensors"][0].update(dim=[3]),
        lambda body: body["tensors"][0].update(data_type="FLOAT17"),
        lambda body: body["tensors"][0].update(ragged_offset=77),
        lambda body: body["tensors"][0].update(pass_by_value={"float": "0x1.z"}),
        lambda body: body["tensors"][0].update(pass_by_value={"object": "os.system"}),
        lambda body: body["tensors"][0].update(pass_by_value={"array": ["FLOAT", [10**9], "00"]}),
        lambda body: body["tensors"][2].update(dim=[4]),
        lambda body: body["tensors"][2].update(data_type="HALF"),
        lambda body: body["nodes"][0].update(op="os.system"),
        lambda body: body["nodes"][0].update(inputs={"IN_0": 10}),
        lambda body: body["nodes"][0].update(inputs={"IN_0": 10, "IN_1": 30}),
        lambda body: body["nodes"][0].update(outputs={}),
        lambda body: body["nodes"].append(body["nodes"][0]),
        lambda body: body["options"].update(sm_count="many"),
        lambda body: body["options"].pop("sm_version"),
        lambda body: body.update(tensors={}),
        lambda body: body.update(next_uid=None),
    ])  # fmt: skip
    def test_a_body_that_is_no_graph(self, engine, change):
        bad(resealed(added(engine).serialize(as_bytes=True), change))

    def test_other_kinds(self):
        graph = opgraph.pygraph()
        for data in (None, 5, 1.5, {}, object(), ["a"], [None]):
            refused(lambda d=data: graph.deserialize(d), "deserialize", error=TypeError)

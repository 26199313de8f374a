"""Dims, strides and refusals of attention on FP8 data, and the spelling of its arguments."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import opgraph
from opgraph import cudnnGraphNotSupportedError, data_type, diagonal_alignment
from opgraph.ir import NodeType

D = data_type
NOT_SUPPORTED = cudnnGraphNotSupportedError
BOTTOM_RIGHT = diagonal_alignment.BOTTOM_RIGHT
FORWARD = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
BACKWARD = (
    "descale_q", "descale_k", "descale_v", "descale_o", "descale_dO", "descale_s", "descale_dP",
    "scale_s", "scale_dQ", "scale_dK", "scale_dV", "scale_dP",
)  # fmt: skip


def refuse(graph: Any, error: type[Exception], *texts: str) -> None:
    with pytest.raises(error) as caught:
        graph.validate()
    for text in texts:
        assert text in str(caught.value), (text, str(caught.value))


class Call:
    """`sdpa_fp8` or its backward with tensors of the right dims, but for what is given."""

    def __init__(
        self,
        backward: bool = False,
        q: Any = (2, 6, 5, 32),
        k: Any = (2, 2, 7, 32),
        v: Any = (2, 3, 7, 16),
        io: Any = D.FP8_E4M3,
        types: Any = None,
        dims: Any = None,
        strides: Any = None,
        **options: Any,
    ) -> None:
        self.graph = opgraph.pygraph(io_data_type=io, intermediate_data_type=D.FLOAT, compute_data_type=D.FLOAT)
        shapes = {"q": q, "k": k, "v": v}
        if backward:
            o = (*q[:3], v[-1])
            shapes.update({"o": o, "dO": o, "stats": (*q[:3], 1)})
        shapes.update(dict.fromkeys(BACKWARD if backward else FORWARD, (1, 1, 1, 1)))
        shapes.update(dims or {})
        kinds = dict.fromkeys(("q", "k", "v", "o", "dO"), D.FP8_E4M3) | (types or {})
        self.tensors = {
            name: None
            if dim is None
            else self.graph.tensor(dim, (strides or {}).get(name), kinds.get(name, D.FLOAT), name=name)
            for name, dim in shapes.items()
        }
        for port in ("seq_len_q", "seq_len_kv", "sink_token"):
            if isinstance(options.get(port), tuple):
                kind = D.FLOAT if port == "sink_token" else D.INT32
                options[port] = self.graph.tensor(options[port], data_type=kinds.get(port, kind), name=port)
        method = self.graph.sdpa_fp8_backward if backward else self.graph.sdpa_fp8
        self.outputs = method(*self.tensors.values(), **options)


def test_arguments():
    parameters = inspect.signature(opgraph.pygraph.sdpa_fp8).parameters
    assert list(parameters)[1:10] == ["q", "k", "v", *FORWARD]
    assert {"left_bound", "right_bound", "sliding_window", "fn", "sf_o"} <= set(parameters)
    assert not {"bias", "diagonal_band_left_bound", "sliding_window_length", "score_mod"} & set(parameters)
    parameters = inspect.signature(opgraph.pygraph.sdpa_fp8_backward).parameters
    assert list(parameters)[1:19] == ["q", "k", "v", "o", "dO", "stats", *BACKWARD]
    assert {"left_bound", "right_bound"} <= set(parameters)
    with pytest.raises(TypeError, match="did you mean 'left_bound'"):
        Call(diagonal_band_left_bound=1)
    with pytest.raises(TypeError, match="diagonal_alignment"):
        Call(diagonal_alignment=1)
    with pytest.raises(TypeError):
        Call(left_bound=1.5)


@pytest.mark.parametrize(
    ("options", "stats"),
    [
        ({}, False),
        ({"generate_stats": True}, True),
        ({"generate_stats": False}, False),
        ({"is_inference": False}, True),
        ({"is_inference": True}, False),
    ],
)
def test_outputs(options, stats):
    call = Call(name="attend", **options)
    o, statistics, top_s, top_o = call.outputs
    assert call.graph.get_node("attend").node_type is NodeType.SDPA_FP8 and o.name == "attend::O"
    o.set_output(True)
    call.graph.validate()
    assert o.get_dim() == [2, 6, 5, 16] and o.get_stride() == [480, 80, 16, 1]
    assert o.get_data_type() is D.FP8_E4M3
    assert (statistics is not None) is stats
    if stats:
        assert statistics.get_dim() == [2, 6, 5, 1] and statistics.get_data_type() is D.FLOAT
    for top in (top_s, top_o):
        assert top.get_dim() == [1, 1, 1, 1] and top.get_data_type() is D.FLOAT and top.get_is_virtual()


def test_gradients():
    call = Call(backward=True, name="attend")
    call.graph.validate()
    assert call.graph.get_node("attend").node_type is NodeType.SDPA_FP8_BACKWARD
    dims = [(2, 6, 5, 32), (2, 2, 7, 32), (2, 3, 7, 16)]
    assert [tuple(each.get_dim()) for each in call.outputs] == [*dims, *[(1, 1, 1, 1)] * 4]
    assert [each.get_stride() for each in call.outputs[:3]] == [
        [960, 160, 32, 1], [448, 224, 32, 1], [336, 112, 16, 1],
    ]  # fmt: skip
    assert [each.get_data_type() for each in call.outputs[3:]] == [D.FLOAT] * 4
    names = ["dQ", "dK", "dV", "amax_dQ", "amax_dK", "amax_dV", "amax_dP"]
    assert [each.name for each in call.outputs] == [f"attend::{name}" for name in names]


def test_numbers_as_scales():
    graph = opgraph.pygraph(io_data_type=D.FP8_E5M2)
    q = graph.tensor([1, 1, 4, 16])
    o, *_ = graph.sdpa_fp8(q, q, q, 1, 0.5, 2.0, 1 / 448, 448, 1, attn_scale=0.25)
    graph.validate()
    assert o.get_dim() == [1, 1, 4, 16]


BOTH = [
    (ValueError, {"dims": {"descale_q": None}}, "descale_q not set"),
    (ValueError, {"dims": {"scale_s": (1, 2, 1, 1)}}, "scale_s is a scalar"),
    (ValueError, {"dims": {"v": None}}, "v not set"),
    (ValueError, {"q": (6, 5, 32)}, "4 axes"),
    (ValueError, {"dims": {"k": (1, 2, 7, 32)}}, "2 at axis 0"),
    (ValueError, {"dims": {"k": (2, 2, 7, 16)}}, "32 at axis 3"),
    (ValueError, {"dims": {"v": (2, 3, 8, 16)}}, "7 at axis 2"),
    (NOT_SUPPORTED, {"dims": {"k": (2, 4, 7, 32)}}, "divisor of 6"),
    (NOT_SUPPORTED, {"q": (2, 6, 5, 24), "dims": {"k": (2, 2, 7, 24)}}, "multiple of 16"),
    (NOT_SUPPORTED, {"dims": {"v": (2, 3, 7, 8)}}, "multiple of 16"),
    (NOT_SUPPORTED, {"strides": {"q": (960, 1, 6, 30)}}, "last stride"),
    (NOT_SUPPORTED, {"types": {"k": D.HALF}}, "FP8_E4M3, FP8_E5M2"),
    (ValueError, {"left_bound": 0}, "1 or more"),
    (ValueError, {"right_bound": -1}, "0 or more"),
    (ValueError, {"sliding_window": 3, "left_bound": 2}, "contradict"),
    (ValueError, {"use_causal_mask": True, "diagonal_alignment": BOTTOM_RIGHT}, "TOP_LEFT"),
    (ValueError, {"use_causal_mask": True, "use_causal_mask_bottom_right": True}, "TOP_LEFT"),
    (ValueError, {"use_causal_mask": True, "right_bound": 1}, "right bound 0"),
    (NOT_SUPPORTED, {"q": (2, 6, 9, 32), "left_bound": 2}, "Sq <= Skv"),
    (NOT_SUPPORTED, {"q": (2, 6, 9, 32), "use_causal_mask_bottom_right": True}, "Sq 9, Skv 7"),
    (ValueError, {"use_padding_mask": True}, "lengths of both sides"),
    (ValueError, {"seq_len_q": (2, 1, 1, 1), "use_padding_mask": True}, "lengths of both sides"),
    (ValueError, {"seq_len_q": (2, 1, 1, 1), "seq_len_kv": (2, 1, 1, 1)}, "use_padding_mask=False"),
    (ValueError, {"seq_len_q": (3,), "seq_len_kv": (2,), "use_padding_mask": True}, "(2, 1, 1, 1) or (2,)"),
    (
        ValueError,
        {"seq_len_q": (2,), "seq_len_kv": (2,), "use_padding_mask": True, "types": {"seq_len_q": D.FLOAT}},
        "INT32",
    ),
    (NOT_SUPPORTED, {"max_total_seq_len_q": 8}, "ragged q"),
    (NOT_SUPPORTED, {"dropout": (0.5, None, None)}, "option dropout is not served"),
    (NOT_SUPPORTED, {"fn": lambda graph, score: score}, "option fn is not served"),
]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("error", "given", "text"), BOTH, ids=[case[2] for case in BOTH])
def test_refusals(error, given, text, backward):
    if backward and "q" in given and len(given["q"]) == 3:
        given = {**given, "dims": {"o": (1,), "dO": (1,), "stats": (1,)}}
    refuse(Call(backward, **given).graph, error, text)


@pytest.mark.parametrize(
    ("error", "given", "text"),
    [
        (ValueError, {"generate_stats": True, "is_inference": True}, "contradict"),
        (ValueError, {"dims": {"scale_o": None}}, "scale_o not set"),
        (ValueError, {"sink_token": (1, 5, 1, 1)}, "one sink per head"),
        (NOT_SUPPORTED, {"io": D.INT8}, "INT8"),
        (NOT_SUPPORTED, {"sf_o": 1}, "option sf_o"),
        (NOT_SUPPORTED, {"paged_attention_max_seq_len_kv": 4}, "not served"),
        (NOT_SUPPORTED, {"out_dims": [2, 6, 5, 32]}, "(2, 6, 5, 16)"),
    ],
)
def test_forward_refusals(error, given, text):
    call = Call(**given)
    if "io" in given:
        call.outputs[0].set_output(True).set_data_type(given["io"])
    refuse(call.graph, error, text)


@pytest.mark.parametrize(
    ("error", "given", "text"),
    [
        (ValueError, {"dims": {"stats": None}}, "stats not set"),
        (ValueError, {"dims": {"stats": (2, 6, 5, 16)}}, "(2, 6, 5, 1)"),
        (ValueError, {"dims": {"o": (2, 6, 5, 32)}}, "(2, 6, 5, 16)"),
        (ValueError, {"dims": {"scale_dP": None}}, "scale_dP not set"),
        (NOT_SUPPORTED, {"types": {"dO": D.HALF}}, "FP8_E4M3, FP8_E5M2"),
        (NOT_SUPPORTED, {"types": {"stats": D.HALF}}, "expected FLOAT"),
        (NOT_SUPPORTED, {"out_dims": {"dK": [2, 6, 7, 32]}}, "(2, 2, 7, 32)"),
    ],
)
def test_backward_refusals(error, given, text):
    refuse(Call(True, **given).graph, error, text)


def test_statistics_are_float():
    call = Call(generate_stats=True)
    call.outputs[1].set_data_type(D.HALF)
    refuse(call.graph, NOT_SUPPORTED, "expected FLOAT")


def test_lengths_and_ragged_rows():
    call = Call(seq_len_q=(2,), seq_len_kv=(2, 1, 1, 1), use_padding_mask=True, left_bound=2, q=(2, 6, 9, 32))
    call.graph.validate()
    call = Call(generate_stats=True)
    offsets = call.graph.tensor([3, 1, 1, 1], data_type=D.INT32)
    call.tensors["q"].set_ragged_offset(offsets)
    refuse(call.graph, NOT_SUPPORTED, "ragged", "padding mask")

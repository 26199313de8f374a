"""What the contents of a call do to an attention: lengths, page tables, tiles, dropout and score functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .base import Array, ContentsError
from .philox import keep_mask

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .base import RefCall
    from .score_mod import ScoreMod

__all__ = ["Options", "check_contents", "keys_of", "lengths_of", "unpaged"]

_TILE = 128
Part = tuple[slice, slice, slice, slice]
# Elements of a random mask made at a time: a few words of 64 bits each.
_DUMPED = 1 << 18


def check_contents(params: Mapping[str, Any], inputs: Mapping[str, Array]) -> None:
    """Raises `ContentsError` for lengths that q and k do not have, and for pages that do not exist."""
    if "q" in inputs:
        lengths_of(inputs, "q", inputs["q"].shape[2])
    keys = keys_of(params, inputs)
    if keys is None:
        return
    lengths = lengths_of(inputs, "kv", keys)
    for side in ("k", "v"):
        port = f"paged_attention_{side}_table"
        if port in inputs and side in inputs and lengths is not None:
            blocks, size, _ = _used_pages(inputs[port], inputs[side], lengths)
            pages = inputs[side].shape[0]
            wrong = (blocks < 0) | (blocks >= pages)
            if wrong.any():
                entry, place = (int(i) for i in np.argwhere(wrong)[0])
                raise ContentsError(
                    port, f"the pages of the first {lengths[entry]} keys exist, {size} keys a page",
                    f"0 to {pages - 1} at entry {entry}, page {place}", int(blocks[entry, place]),
                )  # fmt: skip


def keys_of(params: Mapping[str, Any], inputs: Mapping[str, Array]) -> int | None:
    """The number of keys, valid or not; None when k is not there to tell."""
    tables = {side: inputs.get(f"paged_attention_{side}_table") for side in ("k", "v")}
    for side, table in tables.items():
        if table is None and side in inputs:
            return inputs[side].shape[2]
    most: int | None = params.get("paged_attention_max_seq_len_kv")
    if most is None and tables["k"] is not None and "k" in inputs:
        return int(tables["k"].shape[2] * inputs["k"].shape[2])
    return most


def lengths_of(inputs: Mapping[str, Array], side: str, most: int) -> list[int] | None:
    """The lengths of each batch entry, or None without; `ContentsError` for one outside 0 to `most`."""
    port = f"seq_len_{side}"
    if port in inputs:
        array = inputs[port].reshape(-1)
    elif f"cu_{port}" in inputs:
        port = f"cu_{port}"
        array = np.diff(inputs[port].reshape(-1).astype(np.int64))
    else:
        return None
    lengths: list[int] = array.tolist()
    for entry, length in enumerate(lengths):
        if not 0 <= length <= most:
            raise ContentsError(port, "lengths are in range", f"0 to {most} at entry {entry}", length)
    return lengths


def unpaged(container: Array, table: Array | None, lengths: Sequence[int] | None, keys: int) -> Array:
    """Keys or values [B, H, keys, D] of pages [pages, H, size, D]; those beyond a length are any."""
    if table is None or lengths is None:
        return container
    blocks, _, _ = _used_pages(table, container, lengths)
    _, heads, size, width = container.shape
    if not container.size or not blocks.size:
        return np.zeros((len(blocks), heads, keys, width), container.dtype)
    found = container[blocks].swapaxes(1, 2)  # [B, H, blocks, size, D]
    return found.reshape(len(blocks), heads, blocks.shape[1] * size, width)[:, :, :keys]


def _used_pages(table: Array, container: Array, lengths: Sequence[int]) -> tuple[Array, int, Array]:
    """Page numbers [B, blocks], 0 where no valid key lies; keys per page; which ones are used."""
    size = container.shape[2]
    blocks = table.reshape(table.shape[0], -1)
    used = np.arange(blocks.shape[1]) * size < np.reshape(lengths, (-1, 1))
    return np.where(used, blocks, 0), size, used


class Options:
    """What a call does to blocks of its scores and probabilities, beside bias, ALiBi and band.

    A block is an array [entries, heads, rows, columns], and its part four slices into [B, Hq, Sq, Skv].
    `modifies`: scores change before the softmax; `drops`: probabilities are multiplied with factors after it.
    """

    __slots__ = ("_dropout", "_full", "_heads", "_mask", "_mod", "_scale", "_tiles", "drops", "modifies")

    def __init__(self, call: RefCall, full: tuple[int, int, int, int]) -> None:
        params, inputs = call.params, call.inputs
        self._full = full
        self._heads = np.arange(full[0] * full[1]).reshape(full[:2])
        mod: ScoreMod | None = params["score_mod"]
        self._mod = None if mod is None else mod.bound(inputs, full, call.math.precise)
        self._tiles = self._mask = None
        if "block_mask" in inputs:
            bits = np.unpackbits(np.ascontiguousarray(inputs["block_mask"]), axis=3, bitorder="little")
            self._tiles = bits.astype(np.bool_)
        self._dropout: tuple[float, int, int] | None = None
        self._scale = 1.0
        if "dropout_mask" in inputs:
            self._mask = np.broadcast_to(inputs["dropout_mask"], full)
            self._scale = float(inputs["dropout_scale"].reshape(-1)[0])
        elif params["dropout_probability"] is not None:
            probability = params["dropout_probability"]
            seed, offset = (int(inputs[f"dropout_{port}"].reshape(-1)[0]) for port in ("seed", "offset"))
            self._dropout = probability, seed, offset
            self._scale = 1 / (1 - probability)
        self.modifies = self._mod is not None or self._tiles is not None
        self.drops = self._mask is not None or self._dropout is not None

    def modify(self, scores: Array, part: Part) -> Any:
        """Replaces scaled scores by those of the score function; returns what `gradient` needs."""
        return None if self._mod is None else self._mod.scores(scores, part)

    def gradient(self, grad: Array, part: Part, kept: Any) -> None:
        """Replaces the gradient of the scores by that of the scores before `modify`."""
        if self._mod is not None:
            self._mod.gradient(grad, part, kept)

    def hide(self, scores: Array, part: Part) -> None:
        """-inf in tiles that are masked."""
        if self._tiles is None:
            return
        rows, columns = (np.arange(s.start, s.stop) // _TILE for s in part[2:])
        keep = self._tiles[part[0], part[1]][:, :, rows][:, :, :, columns]
        np.copyto(scores, -np.inf, where=~keep)

    def factors(self, part: Part, dtype: Any) -> Array:
        """What the probabilities of a block are multiplied with."""
        kept = self._mask[part] if self._mask is not None else self._kept(part)
        return np.multiply(kept, self._scale, dtype=dtype)

    def _kept(self, part: Part) -> Array:
        assert self._dropout is not None
        entries, heads, rows, columns = part
        numbers = self._heads[entries, heads]
        spans = (range(rows.start, rows.stop), range(columns.start, columns.stop))
        return keep_mask(*self._dropout, numbers.reshape(-1), *spans).reshape(*numbers.shape, *map(len, spans))

    def dump(self, dtype: Any) -> Array:
        """The whole random mask, 1 where kept."""
        batch, heads, rows, keys = self._full
        out = np.zeros(self._full, dtype)
        step = max(_DUMPED // max(keys, 1), 1)
        for b in range(batch):
            for h in range(heads):
                for i in range(0, rows, step):
                    part = (slice(b, b + 1), slice(h, h + 1), slice(i, min(i + step, rows)), slice(0, keys))
                    out[part] = self._kept(part)
        return out

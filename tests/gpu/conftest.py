"""Tests that need a CUDA device; all are skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest

from opgraph.engines.device import cuda_absence


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absence = cuda_absence()
    if not absence:
        return
    mark = pytest.mark.skip(reason=f"needs a CUDA device: {absence}")
    for item in items:
        if "/gpu/" in item.path.as_posix():
            item.add_marker(mark)

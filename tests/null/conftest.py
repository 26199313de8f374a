"""These tests mean the same on every machine: no CUDA driver answers, whatever the machine has."""

from __future__ import annotations

from importlib import import_module

import pytest


@pytest.fixture(autouse=True)
def no_cuda_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("opgraph.graph_plans", "opgraph.handle"):
        monkeypatch.setattr(import_module(name), "current_cuda_device", lambda: None)

"""The documentation says what the code does: README examples run, every operator is listed, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from opgraph.ops import OPS

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_the_examples_of_the_readme_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert len(blocks) >= 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    assert "cpu[precision=native]" in capsys.readouterr().out


def test_every_operator_is_listed():
    page = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`(\w+)`", page))
    assert set(OPS) <= listed, sorted(set(OPS) - listed)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name}: {target}"

"""`python -m opgraph`: what it prints, and that it imports no framework."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import opgraph
from opgraph.__main__ import main
from opgraph.report import collect


def test_info_in_a_process_of_its_own() -> None:
    code = (
        "import sys, opgraph.__main__ as m; code = m.main(['info']);"
        "loaded = {'torch', 'jax', 'cupy', 'tvm_ffi', 'ml_dtypes'} & set(sys.modules);"
        "assert code == 0 and not loaded, loaded"
    )
    switches = ["-S"] if sys.flags.no_site else []
    done = subprocess.run([sys.executable, *switches, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wanted = ("versions:", f"  opgraph: {opgraph.__version__}", "engines:", "  cpu: ids 20000, 20001; knobs precision")
    assert set(wanted) <= set(done.stdout.splitlines()), done.stdout


def test_help_and_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0 and "info" in capsys.readouterr().out
    for wrong in ([], ["inform"], ["info", "--yaml"]):
        with pytest.raises(SystemExit) as ended:
            main(wrong)
        assert ended.value.code == 2
        assert "usage: python -m opgraph" in capsys.readouterr().err


def test_sections(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    monkeypatch.setenv("OPGRAPH_CACHE", str(tmp_path))
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == collect()
    assert found["folders"]["kernel cache"] == found["environment"]["OPGRAPH_CACHE"] == str(tmp_path)
    assert found["devices"][0] == "cpu" and len(found["devices"]) >= 2  # the others, or why there are none
    assert {"python", "numpy", "opgraph", "native module"} <= set(found["versions"])
    assert any(line.startswith("null: ids 20100") for line in found["engines"])
    assert set(found["machine"]) == {"system", "cpu"}

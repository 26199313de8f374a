"""`python -m opgraph info`: what a bug report needs to know of this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m opgraph", description="Operator graphs on the buffers you hold.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    info = commands.add_parser(
        "info", help="print versions, devices and engines, for a bug report", description="Prints versions of opgraph "
        "and of the packages it works with, devices, engines and folders. Imports no framework.",
    )  # fmt: skip
    info.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)

    from opgraph.report import collect, text

    found = collect()
    if options.json:
        import json

        print(json.dumps(found, indent=2))
    else:
        print(text(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

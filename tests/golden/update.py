"""Rewrite all golden files: `make golden`, after a deliberate change of formats or generated code."""

from __future__ import annotations

from gradwire import compressors
from tests.golden.generated import golden as generated
from tests.golden.payloads import golden as payloads
from tests.wire import golden as frames


def main() -> None:
    frames.main()
    print(f"wrote {len(frames.FRAMES)} frames to {frames.FOLDER}")
    for name in compressors.names():
        (payloads.FOLDER / f"{name}.txt").write_text(payloads.render(name))
        print(f"wrote {name}.txt to {payloads.FOLDER}")
    generated.main()


if __name__ == "__main__":
    main()

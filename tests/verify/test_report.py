"""Reports can be sent in: they hold no paths and no hosts."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from megatron_hybrid.verify.report import Report, differs, not_checked, ok


def test_what_is_private_is_left_out(tmp_path: Path) -> None:
    report = Report(private=["my-secret-model"])
    report.about = {"device": "H200", "where": str(Path.home() / "models/x")}
    report.checks = [
        ok("one", f"read from my-secret-model on {socket.gethostname()}."),
        not_checked("two", "/data/models/some-model/config.json is not there."),
        differs("three", "tokens/second and 1/2 stay as they are; ./a/b does not.", worst=0.5),
    ]
    report.write(tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text()
    for private in ("my-secret", socket.gethostname(), str(Path.home()), "/data", "some-model"):
        assert private not in text
    found = json.loads(text)
    assert found["differs"] is True
    assert found["checks"][2]["figures"] == {"worst": 0.5}
    assert "tokens/second and 1/2 stay" in found["checks"][2]["says"]
    assert report.summary() == "3 checks, 1 differ, 1 not checked: three."
    assert report.line(report.checks[1]).startswith("not checked two: ...")

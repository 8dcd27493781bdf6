"""Running the tests of a module with both kinds of runner, and which of its cases CI leaves out."""

from __future__ import annotations

import pytest

from tests.engine import symbolic
from tests.thorough import thorough


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as thorough what the module's `is_thorough(test, **parameters)` says."""
    for item in items:
        asked = getattr(getattr(item, "module", None), "is_thorough", None)
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if asked is not None and asked(item.originalname, **parameters):  # type: ignore[attr-defined]
            item.add_marker(thorough)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def asynchronous(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether engines of `make_engine` keep a step in flight."""
    monkeypatch.setattr(symbolic, "default_asynchronous", request.param)
    return bool(request.param)

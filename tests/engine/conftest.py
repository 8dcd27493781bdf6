"""Running the tests of a module with both kinds of runner."""

from __future__ import annotations

import pytest

from tests.engine import symbolic


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def asynchronous(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether engines of `make_engine` keep a step in flight."""
    monkeypatch.setattr(symbolic, "default_asynchronous", request.param)
    return bool(request.param)

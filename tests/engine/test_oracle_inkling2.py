"""Attention with sinks beside a bias by distance, convolutions with taps that tokens give, and
attention residuals."""

from __future__ import annotations

import pytest

from tests.engine.oracle_tests import *  # noqa: F403
from tests.engine.oracle_tests import KINDS, Oracle, make_oracle


@pytest.fixture(scope="module", params=KINDS["inkling2"])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_oracle(request.param, tmp_path_factory.mktemp(request.param))

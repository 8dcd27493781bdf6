"""Several residual streams, embeddings of n-grams that are added to them, and attention with an
index."""

from __future__ import annotations

import pytest

from tests.engine.oracle_tests import *  # noqa: F403
from tests.engine.oracle_tests import KINDS, Oracle, make_oracle


@pytest.fixture(scope="module", params=KINDS["streams"])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_oracle(request.param, tmp_path_factory.mktemp(request.param))

"""Long random runs of engines that sleep now and then."""

from __future__ import annotations

import pytest

from megatron_hybrid.engine.sleep import TAGS
from megatron_hybrid.errors import SleepError
from tests.engine.test_fuzz import Crowd
from tests.engine.test_sleep import sleepy
from tests.thorough import usually


class SleepyCrowd(Crowd):
    """Which sleeps now and then, with whatever is under way."""

    slept = 0

    def act(self) -> None:
        rng, engine = self.rng, self.engine
        if not engine.sleeper._arenas:
            sleepy(engine)
        if rng.random() > 0.08:
            super().act()
            return
        tags = [tag for tag in TAGS if rng.random() < 0.7]
        engine.sleep(tags)
        self.slept += "kv_cache" in tags
        for _ in range(3):
            super().act()
        while engine.has_work():
            self.step()
        engine.check_integrity()
        if tags:
            with pytest.raises(SleepError):
                engine.step()
        engine.wake_up(tags[::-1])


@pytest.mark.parametrize("host_pages", [0, 300])
@pytest.mark.parametrize("seed", range(202, usually(204, 240)))
def test_a_crowd_is_answered_right_although_the_engine_sleeps(seed: int, host_pages: int):
    crowd = SleepyCrowd(seed, 120, host_pages=host_pages, slowest_copy=3)
    assert crowd.slept
    crowd.engine.context.transfers.finish()
    crowd.check()

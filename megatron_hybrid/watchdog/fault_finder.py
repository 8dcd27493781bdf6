"""Which rank of a lockstep group is dead or hangs, from what the ranks tell one another.

No thread, no store and no clock here: `now` is handed in, in seconds. Ages are measured between
looks that succeeded, by this process's clock alone: clocks of several machines are never compared,
and a store that does not answer makes nobody look dead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hybrid.watchdog.rank_beat import RankBeat, Stage

LOADING_SILENCE = 300.0  # seconds; reading weights and compiling hold the interpreter for long
STANDSTILL = 5.0  # seconds between two looks: this process, or the machine, stood still itself


@dataclass(slots=True)
class _Seen:
    beat: RankBeat
    count_changed: float  # when a look found another count of beats
    turn_changed: float  # when a look found another turn, or another stage


class FaultFinder:
    """What one rank knows of `size` ranks, itself among them.

    limit: seconds after which a rank that says nothing, or whose loop makes no turn, is at fault.
    """

    def __init__(self, size: int, limit: float) -> None:
        self._limit = limit
        self._seen: list[_Seen | None] = [None] * size
        self._last_look: float | None = None

    def look(self, beats: Sequence[RankBeat | None], now: float) -> None:
        """Note the ranks' beats, None where there is none yet, in the order of the ranks."""
        last, self._last_look = self._last_look, now
        stood_still = last is not None and now - last > max(STANDSTILL, self._limit / 2)
        for rank, beat in enumerate(beats):
            if beat is None:
                continue
            seen = self._seen[rank]
            if seen is None or stood_still:
                self._seen[rank] = _Seen(beat, now, now)
                continue
            if beat.count != seen.beat.count:
                seen.count_changed = now
            if (beat.turn, beat.stage) != (seen.beat.turn, seen.beat.stage):
                seen.turn_changed = now
            seen.beat = beat
        present = self._present()
        if any(seen.beat.stage is Stage.LOADING for seen in present):
            for seen in present:  # it holds up the others by right
                seen.turn_changed = now

    def beats(self) -> list[RankBeat]:
        """Everybody's last ones, as far as they are known."""
        return [seen.beat for seen in self._seen if seen is not None]

    def death(self, rank: int) -> str | None:
        """What to say of a rank whose process has ended; None if it ended in order."""
        seen = self._seen[rank]
        if seen is None or seen.beat.stage is Stage.LEFT:
            return None
        beat = seen.beat
        return f"{beat.name} is gone: its process has ended. It was {beat.doing}."

    def fault(self) -> tuple[str, list[int]] | None:
        """What to say of the ranks that hang, and which they are; None if none does."""
        if (silent := self.silence(self._limit)) is not None:
            return silent
        now, ranks = self._last_look, self._present()
        if now is None:
            return None
        if all(now - seen.turn_changed <= self._limit for seen in ranks):
            return None
        return self._hang(ranks, now)

    def silence(
        self, seconds: float, *, even_loading: bool = False
    ) -> tuple[str, list[int]] | None:
        """As `fault`, of the ranks that have said nothing for longer than that. One that loads, as
        far as is known, may be silent for long, unless `even_loading`: a connection broke."""
        now = self._last_look
        if now is None:
            return None
        loading = seconds if even_loading else max(seconds, LOADING_SILENCE)
        silent = [
            seen
            for seen in self._present()
            if now - seen.count_changed > (loading if seen.beat.stage is Stage.LOADING else seconds)
        ]
        if not silent:
            return None
        names = "; ".join(
            f"{seen.beat.name} has said nothing for {now - seen.count_changed:.0f} s, when it "
            f"was {seen.beat.doing}"
            for seen in silent
        )
        return f"{names}.", [seen.beat.rank for seen in silent]

    def _hang(self, ranks: list[_Seen], now: float) -> tuple[str, list[int]]:
        """The loop stands still: whom do the others wait for?"""
        soon = min(self._limit / 2, STANDSTILL)
        found = [seen for seen in ranks if now - seen.count_changed > soon]
        if not found:
            behind = min(seen.beat.turn for seen in ranks)
            last = [seen for seen in ranks if seen.beat.turn == behind]
            found = [seen for seen in last if not seen.beat.waits] or last
        names = "; ".join(
            f"{seen.beat.name} has been in turn {seen.beat.turn} for "
            f"{now - seen.turn_changed:.0f} s, {seen.beat.doing}"
            for seen in found
        )
        if len(found) > 1:
            names = f"one of these hangs, or the connection between them: {names}"
        return f"{names}.", [seen.beat.rank for seen in found]

    def table(self) -> str:
        """A line for each rank, for the log."""
        return "\n".join(
            f"    {seen.beat.name}: {seen.beat.stage}, turn {seen.beat.turn}, {seen.beat.doing}"
            for seen in self._seen
            if seen is not None
        )

    def _present(self) -> list[_Seen]:
        return [seen for seen in self._seen if seen and seen.beat.stage is not Stage.LEFT]

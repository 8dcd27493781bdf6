"""Whether drafts are worth what they cost, and how many: the most tokens a second."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_hybrid.engine.step_costs import Option, StepCosts, TimedStep

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# By so much more tokens a second are to be expected for drafts to begin. They end only where no
# more are, so that chance does not end them.
MARGIN = 0.02
# The account, in steps without drafts: what drafts have lost lately and may lose. What there is at
# first is not 2 % of 128 tokens, together with what steps add and what two in flight lose besides;
# what drafts have gained may be lost again by chance, but not all of it later, nor by batches of
# another size.
ALLOWANCE = 0.005  # added by every step
FIRST_CREDIT, MOST_CREDIT = 1.3, 6.0
# Steps without drafts, after which some may be made to see whether they hold; more where that takes
# more than TRIAL_SHARE of these steps.
TRIAL_EVERY = 64
TRIAL_SHARE = 0.007
TRIAL_MARGIN = 0.1  # by which more tokens a second there would have to be if all of them held
# Drafts that are remembered: of a row, of a row behind so many steps without, of all rows. Nothing
# is known of those behind the first one that did not hold.
ROW_MEMORY, OLD_MEMORY, MEMORY = 24.0, 2.0, 32.0
ROW_WEIGHT = 2.0  # drafts that what all rows have seen counts as much as in a row's chance
# Before anything was seen: how likely a draft holds, and of how many drafts that counts as much as.
FIRST_CHANCE, FIRST_WEIGHT = 0.7, 0.25
UNSEEN_CHANCE = 0.35  # at least, of a request that had none: its text may be of another kind
HIGHEST_CHANCE = 0.995
RESULT_AFTER = 2  # steps, of which one is in flight


class Acceptance:
    """How likely the next draft of each row holds, if those before it do."""

    def __init__(self, rows: int) -> None:
        self._held = np.zeros(rows)
        self._failed = np.zeros(rows)
        self._all_held = self._all_failed = 0.0

    def begin(self, row: int) -> None:
        """It has a new request, for which what was seen of all the others counts."""
        self._held[row] = self._failed[row] = 0.0

    def chance(self, rows: Ints) -> Floats:
        """[n], of these rows [n]."""
        weight = self._all_held + self._all_failed + FIRST_WEIGHT
        common = (self._all_held + FIRST_WEIGHT * FIRST_CHANCE) / weight
        held = self._held[rows]
        seen = held + self._failed[rows]
        chance = (held + ROW_WEIGHT * common) / (seen + ROW_WEIGHT)
        return np.where(seen > 0, chance, max(common, UNSEEN_CHANCE)).clip(max=HIGHEST_CHANCE)

    def age(self, rows: Ints) -> None:
        """What was seen of these rows [n] was long ago."""
        self._remember(rows, OLD_MEMORY)

    def note(self, rows: Ints, drafted: Ints, accepted: Ints, between: Ints) -> None:
        """What has become of the drafts [n], at least one, of rows [n]. between [n]: guesses that
        had to be right for the drafts to count, because they stood for tokens in flight."""
        held = np.where(accepted > 0, between + accepted, self._right_before(rows, between))
        failed = (accepted < drafted).astype(np.float64)
        self._held[rows] += held
        self._failed[rows] += failed
        self._remember(rows, ROW_MEMORY)
        self._all_held += float(held.sum())
        self._all_failed += float(failed.sum())
        kept = min(1.0, MEMORY / (self._all_held + self._all_failed))
        self._all_held *= kept
        self._all_failed *= kept

    def _remember(self, rows: Ints, most: float) -> None:
        kept = most / np.maximum(self._held[rows] + self._failed[rows], most)
        self._held[rows] *= kept
        self._failed[rows] *= kept

    def _right_before(self, rows: Ints, between: Ints) -> Floats:
        """[n]: guesses to be expected before the first wrong one, where that is one of
        `between` + 1: the mean of a geometric distribution that is cut off there."""
        chance, most = self.chance(rows), between + 1
        cut = chance**most
        return chance / (1 - chance) - most * cut / (1 - cut)


class DraftPolicy:
    """Chooses the width of a step with drafts, or none.

    Losses and gains of steps with drafts, against steps without, go to an account, to which every
    step adds a small allowance: where drafts have lost more than that, whatever the figures said,
    there are none. Now and then some are made to see whether drafts that did not hold do so by now.
    """

    def __init__(self, costs: StepCosts, row_by_row: bool) -> None:
        """row_by_row: as in MeasuredCosts."""
        self._costs = costs
        self._row_by_row = row_by_row
        self._credit = FIRST_CREDIT
        self._credit_of = 1  # decodes
        self._steps_without = RESULT_AFTER  # drafts, since the last ones
        self._is_new = False  # the step that was chosen last is of a size that was not measured
        self._waits = 0  # steps until it is, if it was launched

    def choose(self, chance: Floats, between: Ints, most: Ints) -> Ints | None:
        """[n]: drafts of the rows of a step, at most so many of each [n]. None: none is worth it.
        chance [n], between [n]: as in Acceptance."""
        count, longest = len(most), int(most.max(initial=0))
        plain = self._costs.plain(count) if longest else None
        if plain is None:
            return None
        options = [o for o in self._costs.options(count) if o.is_known or not self._waits]
        if not options:
            return None
        places = np.arange(1, longest + 1)
        # [longest, n]: how likely each draft is accepted
        gains = chance ** (between + places[:, None]) * (places[:, None] <= most)
        if self._row_by_row:
            totals = gains.sum(1).cumsum()
            expected = [float(totals[min(o.width, longest) - 1]) for o in options]
        else:
            best_first = np.argsort(-gains, axis=None, kind="stable")
            totals = gains.ravel()[best_first].cumsum()
            expected = [float(totals[min(o.width * count, len(totals)) - 1]) for o in options]
        # tokens in the time of a step without drafts, for each of that
        rates = [
            (1 + e / count) * plain / o.seconds for e, o in zip(expected, options, strict=True)
        ]
        best = int(np.argmax(rates))
        margin = MARGIN if self._steps_without >= RESULT_AFTER else 0.0
        if rates[best] > 1 + margin and self._credit > 0:
            width = options[best].width
            self._is_new = not options[best].is_known
            if self._row_by_row:
                return np.minimum(most, width)
            chosen = best_first[: width * count]
            chosen = chosen[gains.ravel()[chosen] > 0]
            return np.bincount(chosen % count, minlength=count)
        return self._try(most, plain, options)

    def _try(self, most: Ints, plain: float, options: list[Option]) -> Ints | None:
        """The fewest drafts that would pay if all of them held, now and then."""
        if not self.has_paused:
            return None
        for option in options:
            drafts = np.minimum(most, option.width)
            if (1 + drafts.mean()) * plain > (1 + TRIAL_MARGIN) * option.seconds:
                # What was not measured takes no longer than one token after the other. The step
                # behind it, planned before anything is known, takes as long.
                longest = option.seconds / plain if option.is_known else 1 + option.width
                price = 2 * (longest - 1)
                self._is_new = not option.is_known
                return drafts if price <= TRIAL_SHARE * self._steps_without else None
        return None

    @property
    def has_paused(self) -> bool:
        """Whether there were no drafts for so long that what was seen of them is old."""
        return self._steps_without >= TRIAL_EVERY

    def planned(self, has_drafts: bool) -> None:
        """A step was, of decodes alone."""
        self._steps_without = 0 if has_drafts else self._steps_without + 1
        self._waits = RESULT_AFTER if has_drafts and self._is_new else max(self._waits - 1, 0)

    def note(self, step: TimedStep) -> None:
        """What one has taken and brought."""
        decodes, plain = step.demand.decodes, self._costs.plain(step.demand.decodes)
        seconds = step.seconds
        if plain is not None:  # nothing computes longer than one token after the other
            seconds = min(seconds, 2 * plain * (1 + step.demand.drafts / decodes))
        self._costs.note(step.demand, seconds)
        self._credit += ALLOWANCE
        if not self._credit_of / 2 <= decodes <= 2 * self._credit_of:
            self._credit, self._credit_of = min(self._credit, FIRST_CREDIT), decodes
        if plain is not None and step.demand.runs:
            self._credit += step.tokens / decodes - seconds / plain
        self._credit = min(max(self._credit, -FIRST_CREDIT), MOST_CREDIT)

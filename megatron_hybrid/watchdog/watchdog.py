"""A rank that dies or hangs brings its lockstep group down, with a message that names it.

    main thread       turn() once a turn of the engine's loop, nothing else
    beat thread       this rank's beat to the others and theirs to us, through torchrun's store
    watch thread      waits for processes that end, judges what the beats say, ends this process

They run while the main thread is stuck in a collective. Whoever finds a fault first writes it into
the store, so that all ranks give the same reason; each then ends non-zero and at once (a destructor
may hang where the main thread does), which makes torchrun start the group again. The front end
stays.

A process on the same machine is watched through a file descriptor, which the kernel signals when
it ends, and one that hangs there is killed: stopped, it would not see torchrun's SIGTERM.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

from megatron_hybrid.rank_layout import RankLayout
from megatron_hybrid.watchdog.beat_exchange import (
    ANSWER_SECONDS,
    BEAT_SECONDS,
    BeatExchange,
    store_of_group,
)
from megatron_hybrid.watchdog.fault_finder import FaultFinder
from megatron_hybrid.watchdog.rank_beat import RankBeat, Stage, describe, own_beat

logger = logging.getLogger(__name__)

# How long the cause of a broken connection is looked for. With several nodes at least as long as
# torchrun needs to see that a node is gone (3 x 5 s if not told otherwise): a group that it forms
# before counts the dead node in, and fails.
CAUSE_SECONDS, CAUSE_SECONDS_OF_NODES = 3.0, 20.0
EXIT_CODE = 1


class Watchdog:
    """Watches the lockstep group of `layout`; as a context manager it ends with its block.

    limit: seconds after which a silent rank, or a loop that makes no turn, counts as a fault; 0:
    nobody is watched. A rank that has no others watches itself, if torchrun will start it again.
    """

    def __init__(self, layout: RankLayout, limit: float) -> None:
        self._layout = layout
        self._limit = limit
        self._is_alone = layout.sizes.lockstep_group == 1
        self.is_on = limit > 0 and (not self._is_alone or "TORCHELASTIC_RUN_ID" in os.environ)
        self._beat = own_beat(layout)
        self._finder = FaultFinder(layout.sizes.lockstep_group, limit)
        self._exchange: BeatExchange | None = None
        self._threads: list[threading.Thread] = []
        self._main = threading.get_ident()
        self._turn = 0
        self._left = False
        self.failure: BaseException | None = None  # why this rank can't go on, if it can't
        self._processes: dict[int, int] = {}  # of ranks on this machine; -1: its process has ended
        self._questions: list[tuple[Callable[[], None], list[int]]] = []
        self._wake_out, self._wake_in = os.pipe()
        self._poll = select.poll()
        self._poll.register(self._wake_out, select.POLLIN)

    def start(self) -> None:
        """Begin to watch: in the thread that will run the engine's loop, once torch may be
        imported. Waits until every rank of the group does."""
        if not self.is_on:
            return
        self._main = threading.get_ident()
        self._beat = own_beat(self._layout, _device())
        timeout = timedelta(seconds=max(1.0, self._limit / 2))
        exchange = BeatExchange(
            store_of_group(self._layout, timeout),
            self._layout.sizes.lockstep_group,
            self._own,
            self._wake,
        )
        self._exchange = exchange
        self._threads = [
            threading.Thread(target=exchange.run, name="beat", daemon=True),
            threading.Thread(target=self._watch, args=(exchange,), name="watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def turn(self) -> None:
        """The engine's loop begins another turn."""
        self._turn += 1

    def when_all_live(self, action: Callable[[], None]) -> None:
        """Call `action` as soon as it is certain that every other rank is alive now; never, if one
        is not, as then this process ends. Safe in a signal handler.

        torchrun's SIGTERM means that the server is to end, or that a rank has died: this tells.
        """
        if self._exchange is None or self._is_alone:
            action()
            return
        counts = [beat.count for beat in self._remote()]
        self._questions.append((action, counts))
        self._wake()

    def leave(self) -> None:
        """This rank ends in order, or has said itself why it ends: nobody need look for it."""
        if self._left:
            return
        self._left = True
        self._wake()
        if self._exchange is not None:
            self._exchange.leave()
        # A thread that is inside the store's code when the interpreter ends would abort us.
        for thread in self._threads:
            thread.join(ANSWER_SECONDS)

    def fail(self) -> None:
        """This rank can't go on, because of `failure`: end the group, and this process at once.
        Returns only where nobody else is watched.

        A broken connection is most likely the work of another rank that died, which is given the
        time to be found.
        """
        if self._exchange is None or self._is_alone or self._left:
            return
        error = self.failure
        if error is None or _is_of_collective(error):
            self._wait_for_cause()
        reason = "" if error is None else f": {type(error).__name__}: {error}".split("\n")[0]
        self._end(f"{self._beat.name} failed{reason}. Its log has the whole story.", [])

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._turn > 0:
            traceback.print_exception(error)
            self.failure = error
            self.fail()
        self.leave()

    def _own(self) -> RankBeat:
        """This rank's next beat."""
        beat = self._beat
        doing, waits, loads = describe(sys._current_frames().get(self._main))
        beat.count += 1
        beat.turn, beat.doing, beat.waits = self._turn, doing, waits
        if self._left:
            beat.stage = Stage.LEFT
        else:
            beat.stage = Stage.SERVING if beat.turn and not loads else Stage.LOADING
        return beat

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_in, b"w")

    def _wait_for_cause(self) -> None:
        """Of a connection that broke. If it is found, this process ends."""
        self._look_now()  # it may be the first look: a small model serves in less than a second
        seconds = CAUSE_SECONDS_OF_NODES if self._remote() else CAUSE_SECONDS
        seconds = min(seconds, self._limit)
        time.sleep(seconds)
        self._look_now()
        if (fault := self._finder.silence(seconds / 2, even_loading=True)) is not None:
            self._end(*fault)

    def _watch(self, exchange: BeatExchange) -> None:
        last = time.monotonic()
        while not self._left:
            ready = self._wait(BEAT_SECONDS)
            now = time.monotonic()
            if now - last > self._limit / 2:  # this process, or the machine, stood still
                exchange.answered = now
            last = now
            if exchange.verdict is not None:
                self._exit(exchange.verdict)
            if (beats := exchange.take()) is not None:
                self._finder.look(beats, now)
                ready |= self._open_processes()
            for rank in ready:
                self._judge_death(rank)
            if (fault := self._finder.fault()) is not None:
                self._end(*fault)
            if (silence := time.monotonic() - exchange.answered) > self._limit:
                self._judge_silence(silence)
            if self._questions:
                for rank in self._wait(0):  # who died before the question, as we may not know yet
                    self._judge_death(rank)
                self._answer_questions()

    def _wait(self, seconds: float) -> set[int]:
        """For so long at most; the ranks whose processes have just ended."""
        files = {file for file, _ in self._poll.poll(1000 * seconds)}
        if self._wake_out in files:
            os.read(self._wake_out, 1 << 16)
        ended = {rank for rank, file in self._processes.items() if file in files}
        for rank in ended:
            self._poll.unregister(self._processes[rank])
            os.close(self._processes[rank])
            self._processes[rank] = -1
        return ended

    def _open_processes(self) -> set[int]:
        """Watch the processes on this machine that we did not know; those that have ended."""
        ended = set()
        for beat in self._finder.beats():
            if beat.place != self._beat.place or beat.rank in self._processes:
                continue
            if beat.rank == self._beat.rank:
                continue
            try:
                self._processes[beat.rank] = os.pidfd_open(beat.pid)
            except ProcessLookupError:
                self._processes[beat.rank] = -1
                ended.add(beat.rank)
            except OSError as error:  # no such call here, or no file is left: its beats remain
                self._processes[beat.rank] = -1
                logger.warning("%s is watched by its beats only: %s", beat.name, error)
            else:
                self._poll.register(self._processes[beat.rank], select.POLLIN)
        return ended

    def _look_now(self) -> None:
        """At everybody's latest beats, if the store says them."""
        assert self._exchange is not None
        if (beats := self._exchange.read_now()) is not None:
            self._finder.look(beats, time.monotonic())

    def _judge_death(self, rank: int) -> None:
        self._look_now()  # its last words
        message = self._finder.death(rank)
        if message is None or self._left:
            return
        if self._turn == 0:  # torchrun's signal ends us at any time, and in order
            logger.error("%s", message)
        else:
            self._end(message, [])

    def _remote(self) -> list[RankBeat]:
        """Ranks whose processes we can't see, that have not left."""
        return [
            beat
            for beat in self._finder.beats()
            if beat.place != self._beat.place and beat.stage is not Stage.LEFT
        ]

    def _judge_silence(self, seconds: float) -> None:
        """The store does not answer. If torchrun's agent has it and all ranks are here, only that
        one hangs; else those that we can't see are lost, or rank 0 is, whose process has it."""
        lost = self._remote()
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
            lost = [beat for beat in self._finder.beats() if beat.rank == 0] or lost
        if not lost or lost[0].rank == self._beat.rank:
            return
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        message = (
            f"The store at {where}, through which the ranks meet, has not answered for "
            f"{seconds:.0f} s: lost are {'; '.join(beat.name for beat in lost)}, or the network."
        )
        self._end(message, [beat.rank for beat in lost])

    def _answer_questions(self) -> None:
        """Call what waits for a sign of life from the ranks that we can't see."""
        questions, self._questions = self._questions, []
        for action, counts in questions:
            # The first new count may have been written before the question.
            now = [beat.count for beat in self._remote()]
            if len(now) == len(counts) and any(
                new < old + 2 for new, old in zip(now, counts, strict=True)
            ):
                self._questions.append((action, counts))
            else:
                action()

    def _end(self, message: str, culprits: list[int]) -> None:
        """Give the reason to everybody, kill what hangs on this machine, and end."""
        if self._exchange is not None:
            message = self._exchange.judge(message)
        for rank in culprits:
            if (file := self._processes.get(rank, -1)) >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(file, signal.SIGKILL)
        self._exit(message)

    def _exit(self, message: str) -> None:
        """Say why, and end without destructors. Not through `logging`, whose lock the main thread
        may hold."""
        beat = self._beat
        frame = sys._current_frames().get(self._main)
        text = (
            f"{time.strftime('%Y-%m-%d %H:%M:%S')} megatron_hybrid.watchdog: {message}\n"
            f"  So rank {beat.global_rank} (process {beat.pid}) ends, for the whole group to be "
            f"started again. Last heard:\n{self._finder.table()}\n"
            f"  Rank {beat.global_rank}'s main thread:\n{''.join(traceback.format_stack(frame))}"
        )
        # A pipe that nobody empties may block us.
        threading.Thread(target=_exit_later, daemon=True).start()
        with contextlib.suppress(OSError):
            os.write(2, text.encode())
        os._exit(EXIT_CODE)


def _exit_later() -> None:
    time.sleep(BEAT_SECONDS)
    os._exit(EXIT_CODE)


def _is_of_collective(error: BaseException) -> bool:
    """Whether it came out of torch.distributed."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    file = "" if trace is None else trace.tb_frame.f_code.co_filename
    return os.path.join("torch", "distributed") + os.sep in file


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return f"GPU {os.environ.get('LOCAL_RANK', '0')}"
    return "CPU"

"""Sleeper: an engine gives its device memory back, for a trainer on the same device, and takes it
again. See docs/rl.md."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from megatron_hybrid.cache.geometry import GIB
from megatron_hybrid.engine.host_memory import available_memory
from megatron_hybrid.errors import ConfigurationError, InvalidRequestError, SleepError
from megatron_hybrid.memory.arena import Arena
from megatron_hybrid.memory.driver import Driver, DriverError
from megatron_hybrid.memory.moving import move_in
from megatron_hybrid.memory.pages import CudaPages, HostPages
from megatron_hybrid.models.adapters.loading import settle
from megatron_hybrid.models.hybrid_model import HybridModel

if TYPE_CHECKING:
    from megatron_hybrid.engine.engine import DynamicInferenceEngine

logger = logging.getLogger(__name__)

FLAG = "--enable-sleep-mode"
WEIGHTS, CACHES = TAGS = "weights", "kv_cache"


def arena_on(device: torch.device) -> Arena:
    """Raises ConfigurationError where memory can't come and go."""
    if device.type != "cuda":
        return Arena(HostPages())
    torch.cuda.synchronize(device)  # begins what the driver's calls need
    try:
        return Arena(CudaPages(device, Driver()))
    except (OSError, DriverError) as error:
        raise ConfigurationError(
            f"{FLAG} needs the virtual memory of CUDA's driver, which {device} does not offer: "
            f"{error}"
        ) from error


def in_arena(model: HybridModel, device: torch.device) -> HybridModel:
    """The model, whose weights have moved into one."""
    model.arena = arena_on(device)
    move_in(model, model.arena)
    return model


class Sleeper:
    """Of one engine. All ranks make the same calls.

    While anything is asleep, and while weights are missing, no step computes anything and the
    engine counts as paused; requests may come and end.
    """

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self._engine = engine
        self._arenas: dict[str, Arena] = {}
        self._minimum: Callable[[int], int] = lambda value: value
        self._weights_awake: Callable[[], None] = lambda: None
        self._are_missing = False
        self._missing: frozenset[str] | None = None  # of this rank's; None: all

    def use(self, model: HybridModel, caches: Arena, minimum: Callable[[int], int]) -> None:
        """What lies where; minimum: of all ranks' values. Raises ConfigurationError for weights
        that lie in no arena."""
        if (weights := model.arena) is None:
            raise ConfigurationError(f"The weights that are given were loaded without {FLAG}.")
        self._arenas, self._minimum = {WEIGHTS: weights, CACHES: caches}, minimum
        self._engine.weights.on_put = self.weights_came
        self._weights_awake = partial(settle, model)

    @property
    def sleeping(self) -> list[str]:
        """The tags whose memory is given back."""
        return [tag for tag, arena in self._arenas.items() if arena.is_released]

    @property
    def weights_are_missing(self) -> bool:
        """Whether weights were given up that no update has brought since then, on any rank."""
        return self._are_missing

    def weights_came(self, left_out: frozenset[str] = frozenset()) -> None:
        """All of this rank's but these were brought."""
        if not self._are_missing:
            return
        self._missing = left_out if self._missing is None else self._missing & left_out
        self._are_missing = not self._minimum(int(not self._missing))
        self._hold()

    def check(self) -> None:
        """Raise SleepError unless a step can compute something, or has events to hand out."""
        if not self._engine.scheduler.is_held or self._engine.scheduler.has_work:
            return
        if sleeping := self.sleeping:
            raise SleepError(f"The engine sleeps ({', '.join(sleeping)}): wake it up first.")
        raise SleepError(
            "The weights were given up when the engine went to sleep: update them, all of them, "
            "before anything is computed."
        )

    def sleep(self, tags: Sequence[str] = TAGS, keep_weights: bool = True) -> None:
        """Give the memory of these tags back to the device.

        What is in flight is received first. "kv_cache": nothing of the prefix cache stays on the
        device (memory of the host does); answers that have begun compute theirs again when they go
        on. "weights": they are copied to the host meanwhile, or, without `keep_weights`, are gone:
        then nothing is computed until an update has brought them all. What sleeps already stays as
        it is. Raises InvalidRequestError for another tag, and SleepError, without any effect, where
        that can't be.
        """
        new = [tag for tag in self._checked(tags) if not self._arenas[tag].is_released]
        if not new:
            return
        if self._engine.weights.is_open:
            raise SleepError("The weights are being updated: finish that first.")
        if WEIGHTS in new and keep_weights:
            self._check_room()
        begun = time.monotonic()
        self._engine.come_to_rest()
        if not self._are_missing:
            self._engine.weights.rename()  # it reads them
        if CACHES in new:
            self._empty_caches()
        device = self._arenas[new[0]].device
        free, _ = _memory(device)
        for tag in new:
            self._arenas[tag].release(keep=keep_weights and tag == WEIGHTS)
        if WEIGHTS in new and not keep_weights:
            self._are_missing, self._missing = True, None
        self._hold()
        gc.collect()
        _return_what_is_free(device)
        now_free, total = _memory(device)
        given = now_free - free if total else sum(self._arenas[tag].nbytes for tag in new)
        of = f" of {total / GIB:.1f}" if total else ""
        logger.info(
            "Asleep (%s): %.1f%s GiB given back in %.2f s",
            ", ".join(self.sleeping), given / GIB, of, time.monotonic() - begun,
        )  # fmt: skip

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory of these tags again, None: of all; at the same addresses. Weights that
        were kept are in place, caches are empty. What is awake stays as it is. Raises
        InvalidRequestError for another tag, and SleepError if there is not enough memory on the
        device of any rank: then the tag sleeps on, and may be woken up later."""
        begun = time.monotonic()
        wanted = [tag for tag in self._checked(tags or TAGS) if self._arenas[tag].is_released]
        for tag in wanted:
            self._restore(tag)
            self._hold()
        if not self._engine.is_paused:
            self._engine.weights.rename()  # they may have come meanwhile
        if wanted:
            logger.info("Awake (%s) after %.2f s", ", ".join(wanted), time.monotonic() - begun)

    def stats(self) -> dict[str, Any]:
        """`sleeping`: whether each tag does, if any can; `sleeping_bytes`: of the device, that are
        given back."""
        sleeping = self.sleeping
        return {
            "sleeping": {tag: tag in sleeping for tag in self._arenas},
            "sleeping_bytes": sum(self._arenas[tag].nbytes for tag in sleeping),
        }

    # ---------------------------------------------------------------- details

    def _checked(self, tags: Sequence[str]) -> list[str]:
        """In the order of TAGS."""
        names = [tags] if isinstance(tags, str) else list(tags)
        if unknown := [tag for tag in names if tag not in TAGS]:
            raise InvalidRequestError(
                "tags", f"tags has {unknown[0]!r}; it can have {' and '.join(TAGS)}."
            )
        if not self._arenas:
            raise SleepError(f"This engine can't give memory back; start it with {FLAG}.")
        return [tag for tag in TAGS if tag in names]

    def _hold(self) -> None:
        self._engine.scheduler.is_held = bool(self.sleeping) or self._are_missing

    def _check_room(self) -> None:
        """Of the host, for a copy of the weights; of any rank."""
        arena, left = self._arenas[WEIGHTS], available_memory()
        # on a CPU the copy takes what the weights give back
        fits = arena.device.type == "cpu" or arena.nbytes < left
        if not self._minimum(int(fits)):
            raise SleepError(
                f"The weights take {arena.nbytes / GIB:.1f} GB, and {left / GIB:.1f} GB of the "
                "host's memory are available (here; or too little on another rank): sleep without "
                "keeping them (level 2), or with the caches alone."
            )

    def _empty_caches(self) -> None:
        """Nothing is on the device any more, and nothing on its way there."""
        context = self._engine.context
        context.transfers.finish()
        context.cache.reset(keeps_tier=True)
        self._engine.scheduler.preempt_all()

    def _restore(self, tag: str) -> None:
        arena = self._arenas[tag]
        _return_what_is_free(arena.device)
        failed: MemoryError | None = None
        try:
            arena.restore()
        except MemoryError as error:
            failed = error
        if self._minimum(int(failed is None)):
            if tag == WEIGHTS:
                self._weights_awake()
            return
        arena.release(keep=tag == WEIGHTS and not self._are_missing)  # where it came
        why = "another rank has too little" if failed is None else str(failed)
        raise SleepError(
            f"The device has no {arena.nbytes / GIB:.1f} GB left for {tag} ({why}): it sleeps on. "
            "Free some, and wake it up again."
        ) from failed


def _memory(device: torch.device) -> tuple[int, int]:
    """Free bytes, and all; zeros where nobody says."""
    return torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)


def _return_what_is_free(device: torch.device) -> None:
    """From torch's allocator to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()

"""Requests whose last event is still to come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_hybrid.engine.tracked_request import TrackedRequest


class OpenRequests:
    """By their names."""

    def __init__(self) -> None:
        self._by_name: dict[str, dict[int, TrackedRequest]] = {}
        self._aborted: list[TrackedRequest] = []  # whose names are free

    def __iter__(self) -> Iterator[TrackedRequest]:
        for same_name in self._by_name.values():
            yield from same_name.values()
        yield from self._aborted

    def add(self, requests: Sequence[TrackedRequest]) -> None:
        """All of one name."""
        self._by_name[requests[0].request_id] = {request.index: request for request in requests}

    def named(self, request_id: str) -> list[TrackedRequest]:
        """Those of this name, but for aborted ones."""
        return list(self._by_name.get(request_id, {}).values())

    def abort(self, request: TrackedRequest) -> None:
        """It ends with its token in flight. Its name is free."""
        self._forget(request)
        self._aborted.append(request)

    def is_aborted(self, request: TrackedRequest) -> bool:
        """Whether `abort` was called."""
        return request in self._aborted

    def remove(self, request: TrackedRequest) -> None:
        """It has ended."""
        if self.is_aborted(request):
            self._aborted.remove(request)
        else:
            self._forget(request)

    def _forget(self, request: TrackedRequest) -> None:
        same_name = self._by_name[request.request_id]
        del same_name[request.index]
        if not same_name:
            del self._by_name[request.request_id]

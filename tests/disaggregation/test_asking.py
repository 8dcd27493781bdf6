"""Questions and answers between servers, and what is none."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import zmq

from bench.ports import free_address
from megatron_hybrid.cache.stored_prefixes import Ending
from megatron_hybrid.disaggregation import messages as wire
from megatron_hybrid.disaggregation.desk import Answer, Desk, Offer, Wanted
from megatron_hybrid.disaggregation.desk_server import DeskServer
from megatron_hybrid.disaggregation.peers import Peers, addresses_of
from megatron_hybrid.errors import ConfigurationError, StoreError

OWN = wire.Identity("m", "w", (1, 1), 0)
ENDING = Ending(0, "", True, True, "prompt_end", 0, 0)


class Both:
    """A desk with its server, and who asks there."""

    def __init__(self) -> None:
        self.desk, self.address = Desk(100), free_address()
        self.server = DeskServer(
            self.address, self.desk, [wire.RankMemory(b"x", 1, "")], lambda: OWN
        )
        self.peers = Peers()

    def find(self, *ends: bytes, wait: float = 5.0, identity: wire.Identity = OWN) -> wire.Message:
        places = [(40 - i, end) for i, end in enumerate(ends)]
        question = wire.Find(self.peers.number(), identity, [], places, wait)
        return self.peers.ask(self.address, question, wait + 5.0)

    def follow(self, first: int, request: str = "r", wait: float = 20.0) -> wire.Message:
        number = self.peers.number()
        question = wire.Follow(number, OWN, [b"1", b"2", b"3"], first, request, wait)
        return self.peers.ask(self.address, question, wait + 5.0)


def answer_next(desk: Desk, answer: Answer) -> threading.Thread:
    """The engine's thread; to the question that comes."""

    def wait() -> None:
        while not (wanted := desk.take_wanted()):
            time.sleep(0.002)
        assert wanted == [Wanted([b"1", b"2", b"3"], [], "r", 1, wanted[0].number)]
        desk.answer(wanted[0], answer)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.fixture
def both() -> Iterator[Both]:
    found = Both()
    yield found
    found.peers.close()
    found.server.close()


def test_what_is_there_is_offered_and_given_back(both: Both) -> None:
    both.desk.offer(b"a", Offer(39, [1, 2], [3], ENDING))
    answer = both.find(b"longer", b"a")
    assert isinstance(answer, wire.Offered)
    assert (answer.position, answer.pages, answer.state_pages) == (39, [1, 2], [3])
    assert answer.ending == ENDING and answer.instance == both.server.instance
    assert not both.desk.take_back()
    both.peers.tell(both.address, wire.Done(0, answer.lease))
    end = time.monotonic() + 10
    while not (gone := both.desk.take_back()):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert gone == [(b"a", True)]


def test_what_comes_later_is_waited_for_and_others_are_answered_meanwhile(both: Both) -> None:
    found: list[wire.Message] = []
    waiting = threading.Thread(target=lambda: found.append(both.find(b"late")))
    waiting.start()
    both.desk.offer(b"a", Offer(40, [1], [], ENDING))
    assert isinstance(both.find(b"a"), wire.Offered)
    assert not found
    both.desk.offer(b"late", Offer(40, [2], [], ENDING))
    waiting.join()
    assert isinstance(found[0], wire.Offered) and found[0].pages == [2]


def test_nothing_comes_after_a_time_or_where_it_is_known(both: Both) -> None:
    assert both.find(b"a", wait=0.05) == wire.Nothing(1)

    def refuse() -> None:
        while not (wanted := both.desk.take_wanted()):
            time.sleep(0.01)
        both.desk.answer(wanted[-1], Answer())

    both.desk.take_wanted()
    thread = threading.Thread(target=refuse)
    thread.start()
    begin = time.monotonic()
    assert both.find(b"b", wait=25.0) == wire.Nothing(2)
    assert time.monotonic() - begin < 20.0
    thread.join()


def test_what_is_computed_is_followed_part_by_part(both: Both) -> None:
    both.desk.offer(b"part", Offer(32, [7, 8], [], None))
    thread = answer_next(both.desk, Answer(b"part", comes=True))
    answer = both.follow(1)
    thread.join()
    assert isinstance(answer, wire.Offered) and answer.ending is None
    assert (answer.position, answer.pages, answer.state_pages) == (32, [7, 8], [])
    both.peers.tell(both.address, wire.Done(0, answer.lease))
    thread = answer_next(both.desk, Answer())
    assert both.follow(1) == wire.Nothing(2)
    thread.join()


def test_who_follows_is_answered_when_there_is_more(both: Both) -> None:
    """The engine looks again until then."""
    found: list[wire.Message] = []
    following = threading.Thread(target=lambda: found.append(both.follow(1)))
    following.start()
    for _ in range(3):
        answer_next(both.desk, Answer(comes=True)).join()
        both.desk.offer(b"another's", Offer(32, [5], [], None))
        assert isinstance(both.find(b"another's"), wire.Offered) and not found
    both.desk.offer(b"part", Offer(32, [7, 8], [], None))
    answer_next(both.desk, Answer(b"part", comes=True)).join()
    following.join()
    assert isinstance(found[0], wire.Offered) and not both.desk.take_wanted()


def test_who_follows_asks_again_after_a_time_if_the_engine_has_looked(both: Both) -> None:
    thread = answer_next(both.desk, Answer(comes=True))
    assert both.follow(1, wait=0.5) == wire.Nothing(1, comes=True)
    thread.join()
    assert not both.desk.take_wanted()  # nobody waits for it any more
    assert both.follow(1, wait=0.05) == wire.Nothing(2)  # nobody looks: the engine hangs


def test_many_questions_are_open_at_once_and_answered_in_any_order(both: Both) -> None:
    threads, many = threading.active_count(), 300
    answers = []
    for number in range(many):
        question = wire.Follow(both.peers.number(), OWN, [], 0, f"r{number}", 20.0)
        answers.append(both.peers.begin(both.address, question, 25.0))
    asked: dict[str, Wanted] = {}
    while len(asked) < many:
        asked |= {one.request: one for one in both.desk.take_wanted()}
    assert threading.active_count() == threads + 1 and not any(one.done() for one in answers)
    for number in reversed(range(many)):
        both.desk.answer(asked[f"r{number}"], Answer())
        assert answers[number].result(timeout=10.0) == wire.Nothing(1 + number)


def test_questions_end_with_a_peer_or_with_who_asks(both: Both) -> None:
    def begin() -> Future[wire.Message]:
        question = wire.Find(both.peers.number(), OWN, [], [(40, b"a")], 20.0)
        return both.peers.begin(both.address, question, 25.0)

    answers = [begin() for _ in range(3)]
    while not both.desk.take_wanted():
        time.sleep(0.002)
    both.server.close()
    for one in answers:
        with pytest.raises(StoreError, match="does not answer"):
            one.result(timeout=10.0)
    both.server = DeskServer(both.address, both.desk, [], lambda: OWN)
    other = Peers()
    question = wire.Find(other.number(), OWN, [], [(40, b"a")], 20.0)
    answer = other.begin(both.address, question, 25.0)
    while not both.desk.take_wanted():
        time.sleep(0.002)
    other.close()
    with pytest.raises(StoreError, match="closed"):
        answer.result(timeout=10.0)
    with pytest.raises(StoreError, match="closed"):
        other.tell(both.address, wire.Done(0, 1))


def test_a_part_that_is_gone_before_it_is_read_comes_again(both: Both) -> None:
    thread = answer_next(both.desk, Answer(b"gone", comes=True))
    assert both.follow(1) == wire.Nothing(1, comes=True)
    thread.join()


def test_another_model_is_told_so(both: Both) -> None:
    answer = both.find(b"a", identity=wire.Identity("n", "w", (1, 1), 0))
    assert isinstance(answer, wire.Nothing) and "another model" in answer.reason


def test_what_is_no_message_harms_nobody(both: Both, caplog: pytest.LogCaptureFixture) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://{both.address}")
        for junk in (b"", b"GET / HTTP/1.1", b"\xc1" * 1000):
            socket.send(junk)
        socket.send_multipart([b"a", b"b"])
        assert isinstance(both.find(b"a", wait=0.2), wire.Nothing)
    hello = both.peers.ask(both.address, wire.Hello(both.peers.number()), 5.0)
    assert isinstance(hello, wire.Welcome) and hello.ranks == [wire.RankMemory(b"x", 1, "")]
    assert "none of this version's" in caplog.text


def test_nobody_there_is_said_soon_and_not_asked_for_a_while() -> None:
    peers, address = Peers(), free_address()
    begin = time.monotonic()
    with pytest.raises(StoreError, match=f"{address} does not answer.*--role prefill"):
        peers.ask(address, wire.Hello(1), 30.0)
    with pytest.raises(StoreError, match="did not answer a moment ago"):
        peers.ask(address, wire.Hello(2), 30.0)
    assert time.monotonic() - begin < 15.0
    peers.close()
    with pytest.raises(StoreError, match="closed"):
        peers.ask(free_address(), wire.Hello(3), 30.0)


def test_addresses_are_read_or_refused() -> None:
    assert addresses_of("a:1, [::1]:65535") == ["a:1", "[::1]:65535"]
    for text in ("", "a", ":1", "a:0", "a:x", "a:1,", "a:65536"):
        with pytest.raises(ConfigurationError, match="is not HOST:PORT"):
            addresses_of(text)

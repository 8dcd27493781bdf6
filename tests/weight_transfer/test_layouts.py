"""What trainers send, taken apart: buffers, pickles, prime-rl's own words."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_hybrid.errors import WeightsError
from megatron_hybrid.models.checkpoints.sent_tensors import SentTensors, TensorInfo
from megatron_hybrid.weight_transfer import broadcasts
from megatron_hybrid.weight_transfer import requests as wire
from megatron_hybrid.weight_transfer.groups import TransferBroken, wait_until
from megatron_hybrid.weight_transfer.packing import chunks, infos_of, pack, unpack
from megatron_hybrid.weight_transfer.pickles import (
    read_nccl_id,
    read_prime_infos,
    written_nccl_id,
)
from megatron_hybrid.weight_transfer.transfers import WeightTransfers

CPU = torch.device("cpu")
TENSORS = {
    "a": torch.arange(15, dtype=torch.float32).view(3, 5),
    "odd": torch.tensor([True, False, True]),
    "behind": torch.arange(4, dtype=torch.bfloat16),
    "none": torch.zeros(0, 7),
    "number": torch.tensor(2.5, dtype=torch.float64),
    "last": torch.arange(6, dtype=torch.int64).view(2, 3),
}
INFOS = {name: TensorInfo(one.dtype, tuple(one.shape)) for name, one in TENSORS.items()}


class Recorded:
    """A group whose rank 0 has sent these buffers."""

    def __init__(self, *buffers: Tensor) -> None:
        self.buffers = [buffer.contiguous().view(-1).view(torch.uint8) for buffer in buffers]

    def broadcast(self, buffer: Tensor) -> None:
        (sent,) = self.buffers[:1]
        assert buffer.dtype == torch.uint8 and len(buffer) == len(sent)
        buffer.copy_(self.buffers.pop(0))

    def close(self) -> None:
        pass


def received(sent: SentTensors) -> dict[str, Tensor]:
    found = {}
    for name in sent.arrivals():
        found[name] = sent.held[name].clone()
        sent.drop(name)
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor] = TENSORS) -> bool:
    return list(found) == list(expected) and all(
        torch.equal(found[name], expected[name]) and found[name].dtype == expected[name].dtype
        for name in expected
    )


def test_a_buffer_holds_tensors_of_any_type_without_padding() -> None:
    buffer = pack(TENSORS.values())
    assert buffer.nbytes == sum(tensor.nbytes for tensor in TENSORS.values())
    assert same(dict(unpack(buffer, INFOS)))
    with pytest.raises(WeightsError, match=f"has {buffer.nbytes - 1} bytes; its tensors take"):
        list(unpack(buffer[:-1], INFOS))


@pytest.mark.parametrize(
    ("limit", "sizes"), [(1, [4, 4, 4, 4]), (4, [8, 8]), (7, [8, 8]), (8, [12, 4]), (99, [16])]
)
def test_a_chunk_ends_with_the_tensor_that_makes_it_too_large(limit: int, sizes: list[int]) -> None:
    infos = {str(number): TensorInfo(torch.int32, (1,)) for number in range(4)}
    cut = list(chunks(infos, limit))
    assert [sum(info.nbytes for info in chunk.values()) for chunk in cut] == sizes
    assert [name for chunk in cut for name in chunk] == list(infos)


@pytest.mark.parametrize("limit", [1, 30, 61, 2**30])
def test_tensors_come_one_by_one_in_chunks_and_in_one(limit: int) -> None:
    each = [tensor.view(-1) for tensor in TENSORS.values()]
    assert same(received(broadcasts.one_by_one(Recorded(*each), INFOS, CPU)))
    sent = [pack(TENSORS[name] for name in chunk) for chunk in chunks(INFOS, limit)]
    assert same(received(broadcasts.in_chunks(Recorded(*sent), INFOS, CPU, limit)))
    whole = Recorded(pack(TENSORS.values()))
    assert same(received(broadcasts.in_chunks(whole, INFOS, CPU, None)))


def test_what_is_refused_is_received_all_the_same() -> None:
    group = Recorded(pack(TENSORS.values()))
    broadcasts.in_chunks(group, INFOS, CPU, None).refuse()
    assert not group.buffers


def test_tensors_that_are_not_those_described_are_named() -> None:
    def sent(*names: str) -> SentTensors:
        return SentTensors(INFOS, lambda: ((name, TENSORS[name]) for name in names))

    with pytest.raises(WeightsError, match="'behind' came where 'odd' was to come"):
        received(sent("a", "behind"))
    with pytest.raises(WeightsError, match="'odd' did not come"):
        received(sent("a"))
    other = SentTensors({"a": TensorInfo(torch.float32, (3, 4))}, lambda: [("a", TENSORS["a"])])
    with pytest.raises(WeightsError, match=r"came as torch.float32 of shape \[3, 5\]; it was to"):
        received(other)


def number(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int64)


def of_prime(*layers: dict[str, Tensor]) -> Iterator[Tensor]:
    """As prime-rl's trainer sends state dicts."""
    yield number(len(layers))
    for layer in layers:
        by_type: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
        for name, tensor in layer.items():
            by_type.setdefault(tensor.dtype, []).append((name, tensor))
        described = pickle.dumps(
            {
                dtype: [(name, tensor.shape, tensor.numel()) for name, tensor in tensors]
                for dtype, tensors in by_type.items()
            }
        )
        yield number(len(described))
        yield torch.frombuffer(bytearray(described), dtype=torch.uint8)
        for tensors in by_type.values():
            yield torch.cat([tensor.view(-1) for _, tensor in tensors])


def test_state_dicts_of_prime_rl() -> None:
    layers = [{name: TENSORS[name] for name in part} for part in (("a", "behind"), ("last",), ())]
    group = Recorded(*of_prime(*layers))
    found = [received(sent) for sent in broadcasts.as_prime_sends(group, CPU)]
    assert not group.buffers
    assert all(same(one, layer) for one, layer in zip(found, layers, strict=True))


class Evil:
    """Unpickled by torch or pickle it would write a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


def test_a_pickle_calls_nothing_that_it_names(tmp_path: Path) -> None:
    path = f"{tmp_path}/written"
    evil = pickle.dumps({torch.float32: [("a", Evil(path), 1)]})
    transfers = WeightTransfers(CPU)
    for read in (
        lambda: read_prime_infos(evil),
        lambda: read_nccl_id(evil),
        lambda: list(transfers.sources(wire.FromHandles((evil,)))),
        lambda: list(transfers.sources(wire.FromHandles((evil,), in_one=True))),
        lambda: list(transfers.sources(wire.FromHandles((evil,), tensors=wire.Described()))),
    ):
        with pytest.raises(
            WeightsError, match=r"It names (_?io|builtins)\.open, which is not read"
        ):
            read()
    assert not Path(path).exists()


@pytest.mark.parametrize("data", [b"", b"\x80", pickle.dumps(3), pickle.dumps([1, 2]), b"text"])
def test_pickles_of_another_form_are_refused(data: bytes) -> None:
    transfers = WeightTransfers(CPU)
    for read in (
        lambda: read_prime_infos(data),
        lambda: read_nccl_id(data),
        lambda: list(transfers.sources(wire.FromHandles((data,)))),
        lambda: list(transfers.sources(wire.FromHandles((data,), in_one=True))),
        lambda: list(transfers.sources(wire.FromHandles((data,), tensors=wire.Described()))),
    ):
        with pytest.raises(WeightsError):
            read()


def test_ncclids_are_as_vllm_pickles_them() -> None:
    """The opcodes of a ctypes structure under vLLM's name, as CPython writes them."""
    data = bytes(range(128))
    assert read_nccl_id(written_nccl_id(data)) == data
    module = b"vllm.distributed.device_communicators.pynccl_wrapper"

    def text(value: bytes) -> bytes:
        return b"\x8c" + bytes([len(value)]) + value

    theirs = (
        b"\x80\x04" + text(b"_ctypes") + text(b"_unpickle") + b"\x93"
        + text(module) + text(b"ncclUniqueId") + b"\x93" + b"}" + b"C\x80" + data
        + b"\x86\x86R."
    )  # fmt: skip
    assert read_nccl_id(theirs) == data
    assert struct.calcsize("128b") == len(data)


def test_what_is_described_has_to_be_possible() -> None:
    described = wire.Described(("a",), ("torch.float16",), ((2, 3),))
    assert infos_of(described) == {"a": TensorInfo(torch.float16, (2, 3))}
    for wrong, message in (
        (wire.Described(("a",), (), ()), "1 names, 0 types and 0 shapes"),
        (wire.Described(("a",), ("load",), ((1,),)), "'load' is no type of torch's"),
        (wire.Described(("a", "a"), ("int8", "int8"), ((1,), (1,))), "A name is there twice"),
    ):
        with pytest.raises(WeightsError, match=message):
            infos_of(wrong)
    transfers = WeightTransfers(CPU)
    with pytest.raises(WeightsError, match="no group 'x' with a trainer"):
        list(transfers.sources(wire.FromGroup("x", described)))
    assert list(transfers.sources(wire.FromPrime("x", "/a/folder"))) == ["/a/folder"]
    with pytest.raises(WeightsError, match="may not be read"):
        list(transfers.sources(wire.FromPrime("x", "/a/folder", "It may not be read.")))


def test_who_goes_silent_is_not_waited_for_for_ever() -> None:
    with pytest.raises(TransferBroken, match=r"for 0.05 seconds \(--weight-transfer-timeout\)"):
        wait_until(lambda: False, 0.05)

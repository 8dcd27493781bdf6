"""What a trainer asks for, as the front end hands it to the engine's ranks. No torch here."""

from __future__ import annotations

import msgspec


class TransferGroup(msgspec.Struct, tag=True, frozen=True):
    """A group with the trainer, which is its rank 0, by its `name`.

    rank_offset: of the engine's first rank. made_by: "torch" as SGLang's trainers make it, "vllm"
    as vLLM's and prime-rl's, with NCCL alone. backend: "nccl" or "gloo". nccl_id: in base64, where
    nobody has to meet. seconds: to wait; None: as --weight-transfer-timeout says. chunk_bytes:
    tensors are packed into buffers of about so many; None: they are not, unless an update says so.
    """

    name: str
    host: str = ""
    port: int = 0
    rank_offset: int = 1
    size: int = 2
    made_by: str = "torch"
    backend: str = "nccl"
    nccl_id: str | None = None
    seconds: float | None = None
    chunk_bytes: int | None = None


class Described(msgspec.Struct, frozen=True):
    """Tensors that come, in their order: of each the name, the type ("bfloat16", or with "torch."
    before it) and the shape."""

    names: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()


class FromFolder(msgspec.Struct, tag=True, frozen=True):
    """Weights are in a folder of the engine's machine."""

    path: str


class FromGroup(msgspec.Struct, tag=True, frozen=True):
    """Rank 0 of a group broadcasts tensors; nothing described: those of the update before.
    in_one: all in one buffer. chunk_bytes: as of TransferGroup, of this update alone."""

    group: str
    tensors: Described
    in_one: bool = False
    chunk_bytes: int | None = None


class FromPrime(msgspec.Struct, tag=True, frozen=True):
    """prime-rl's trainer broadcasts through its group, and says there what; without the group it
    has left weights in the folder `path`, which may be read unless `refused` says why not."""

    group: str
    path: str
    refused: str = ""


class FromHandles(msgspec.Struct, tag=True, frozen=True):
    """Tensors are in memory that the engine's ranks open. pickled: of each rank, or one for all,
    names and handles as SGLang's trainers pickle them (in_one: to one buffer of all tensors); with
    `tensors`, handles alone as vLLM's do."""

    pickled: tuple[bytes, ...]
    in_one: bool = False
    tensors: Described | None = None


Source = FromFolder | FromGroup | FromPrime | FromHandles

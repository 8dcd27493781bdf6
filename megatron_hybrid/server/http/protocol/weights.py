"""Bodies and queries of the routes by which trainers bring weights: our own, and SGLang's, vLLM's
and prime-rl's under their names."""

# mypy: disable-error-code="valid-type"

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from megatron_hybrid.pause_mode import PauseMode
from megatron_hybrid.server.http.protocol.parsing import Body, only

MAX_NAME_LENGTH = 1024
MAX_PATH_LENGTH = 4096
Text = Annotated[str, Meta(max_length=MAX_NAME_LENGTH)]
Path = Annotated[str, Meta(min_length=1, max_length=MAX_PATH_LENGTH)]
Host = Annotated[str, Meta(min_length=1, max_length=255)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Shape = list[Annotated[int, Meta(ge=0)]]
Rank = Annotated[int, Meta(ge=0, le=2**20)]
Tag = Literal["weights", "kv_cache", "cuda_graph"]
ChunkBytes = Annotated[int, Meta(ge=1, le=2**40)]


class Theirs(Body, forbid_unknown_fields=False):
    """A body of others' clients, which send fields of several versions: those that we don't know
    are left out of account."""


class UpdateWeightsRequest(Body):
    """Of /update_weights: weights in a folder (path; prime-rl's name is weight_dir), or vLLM's
    update_info.

    path: A folder of the server's machine, below one of --weight-folders.
    mode: What becomes of requests that run; left out: as the pause that holds, else they finish.
    weight_version: What answers call the weights then; left out: their epoch.
    weight_dir: As path, of prime-rl. After /init_broadcaster: weights come from the trainer.
    update_info: vLLM's: of tensors that come through /init_weight_transfer_engine's group or as
        CUDA IPC handles.
    """

    path: Path | None = None
    mode: PauseMode | None = None
    weight_version: Text | None = None
    weight_dir: Path | None = None
    update_info: dict[str, Any] | list[dict[str, Any]] | None = None


class UpdateInfo(Theirs):
    """vLLM's description of tensors.

    names: Of tensors, in the order in which they come. All empty: as in the update before.
    ipc_handles_pickled: In base64: by GPU, where to find them in memory.
    tensor_sizes: Bytes of packed tensors; they follow from the shapes.
    packed: Many tensors in one buffer.
    """

    names: list[Text] = []
    dtype_names: list[Text] = []
    shapes: list[Shape] = []
    packed: bool | None = None
    packed_buffer_size_bytes: ChunkBytes | None = None
    packed_num_buffers: int | None = None
    ipc_handles_pickled: str | None = None
    tensor_sizes: list[int] | None = None


class InitTransferRequest(Theirs):
    """Of /init_weight_transfer_engine.

    init_info: Of a group: master_address, master_port, rank_offset, world_size. Without these
        weights come as CUDA IPC handles.
    """

    init_info: InitInfo


class InitInfo(Theirs):
    """vLLM's description of a group.

    nccl_unique_id_b64: Instead of master_address and master_port.
    """

    master_address: Host | None = None
    master_port: Port | None = None
    rank_offset: Rank = 1
    world_size: Rank | None = None
    nccl_unique_id_b64: Text | None = None
    packed: bool = False
    packed_buffer_size_bytes: ChunkBytes | None = None
    packed_num_buffers: int | None = None


class FinishUpdateRequest(Theirs):
    """Of /finish_weight_update.

    weight_version: What answers call the weights from now on; left out: their epoch.
    """

    weight_version: Text | None = None


class StartUpdateRequest(Theirs):
    """Of /start_weight_update.

    mode: What becomes of requests that run; left out: as the pause that holds, else they finish.
    """

    mode: PauseMode | None = None


class NameWeightsRequest(Theirs):
    """Of /update_weight_version.

    new_version: What answers call the weights from now on.
    """

    new_version: Text


class InitBroadcasterRequest(Theirs):
    """Of /init_broadcaster: prime-rl's group.

    inference_world_size: Ranks of all servers together.
    timeout: Seconds.
    """

    host: Host
    port: Port
    rank_offset: Rank = 0
    inference_world_size: Rank = 1
    timeout: Annotated[float, Meta(gt=0, le=86400)] | None = None
    quantize_in_weight_transfer: only(False) | None = None
    session_id: only() | None = None


class InitGroupRequest(Theirs):
    """Of /init_weights_update_group.

    master_address: Where the trainer, rank 0, listens.
    rank_offset: The group's rank of this server's first rank.
    backend: gloo where there is no GPU.
    """

    master_address: Host
    master_port: Port
    rank_offset: Rank
    world_size: Rank
    group_name: Text = "weight_update_group"
    backend: Literal["nccl", "gloo"] = "nccl"


class DestroyGroupRequest(Theirs):
    """Of /destroy_weights_update_group."""

    group_name: Text = "weight_update_group"


class FromDistributedRequest(Theirs):
    """Of /update_weights_from_distributed.

    names: Of tensors, in the order in which rank 0 broadcasts them.
    dtypes: bfloat16 or torch.bfloat16, of each.
    load_format: flattened_bucket: all of them in one broadcast.
    flush_cache: Changes nothing: nothing of what was cached fits new weights.
    weight_version: What answers call the weights then; left out: their epoch.
    """

    names: Annotated[list[Text], Meta(min_length=1)]
    dtypes: list[Text]
    shapes: list[Shape]
    group_name: Text = "weight_update_group"
    load_format: Literal["flattened_bucket"] | None = None
    flush_cache: bool | None = None
    weight_version: Text | None = None


class FromTensorRequest(Theirs):
    """Of /update_weights_from_tensor, from a process on the same machine.

    serialized_named_tensors: For each rank of this server, or one for all: pickled tensors, or
        handles to where they are on its GPU, in base64.
    load_format: flattened_bucket: one tensor that holds the others.
    """

    serialized_named_tensors: Annotated[list[str], Meta(min_length=1)]
    load_format: Literal["flattened_bucket"] | None = None
    flush_cache: bool | None = None
    weight_version: Text | None = None


class FromDiskRequest(Theirs):
    """Of /update_weights_from_disk.

    model_path: A folder of the server's machine, below one of --weight-folders.
    """

    model_path: Path
    load_format: Literal["auto", "safetensors"] | None = None
    flush_cache: bool | None = None
    weight_version: Text | None = None


class PauseRequest(Body):
    """Of /pause.

    mode: What becomes of requests that run.
    """

    mode: PauseMode | None = None


class ResumeRequest(Body):
    """Of /resume, /continue_generation and /reset_prefix_cache: no fields."""


class PauseQuery(Theirs):
    """Of /pause, as vLLM has it.

    mode: wait is finish.
    clear_cache: true: the prefix cache is emptied.
    """

    mode: Literal["finish", "wait", "abort", "keep"] | None = None
    clear_cache: bool | None = None


class SleepQuery(Theirs):
    """Of /sleep.

    level: 0: only pause; 1: weights are kept in the host's memory; 2: they are given up, and have
        to be brought again.
    mode: What becomes of requests that run; wait is finish.
    """

    level: Literal[0, 1, 2] | None = 1
    mode: Literal["finish", "wait", "abort", "keep"] | None = "abort"


class WakeUpQuery(Theirs):
    """Of /wake_up.

    tags: weights, kv_cache, or scheduling, which is /resume; given again for more. None: all of it.
    """

    tags: Tag | Literal["scheduling"] | None = None


class MemoryRequest(Theirs):
    """Of /release_memory_occupation and /resume_memory_occupation.

    tags: weights, kv_cache; cuda_graph changes nothing. None: all.
    keep_weights: Of the first: they are kept in the host's memory. Else they are given up, and have
        to be brought again, as SGLang has it.
    """

    tags: list[Tag] | None = None
    keep_weights: bool | None = False


class CheckWeightsRequest(Theirs):
    """Of /weights_checker.

    action: checksum: a digest of all weights; snapshot: remember it; compare: 400 unless it is the
        same now; reset_tensors: the weights are given up, and have to be brought again.
    """

    action: Literal["checksum", "snapshot", "compare", "reset_tensors"]


class WorldSizeQuery(Theirs):
    """Of /get_world_size.

    include_dp: Count the ranks of all replicas, not of one.
    """

    include_dp: bool | None = True


class PauseGenerationRequest(Theirs):
    """Of /pause_generation.

    mode: abort: answers end with what there is; in_place and retract: they go on with
        /continue_generation.
    """

    mode: Literal["abort", "retract", "in_place"] = "abort"

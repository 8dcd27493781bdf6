"""The routes by which trainers bring weights, under SGLang's, vLLM's and prime-rl's names: see
docs/rl.md. They stop the engine for everybody and overwrite what it computes with."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

from flask import Flask, Response, request
from werkzeug.exceptions import Forbidden

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.pause_mode import PauseMode
from megatron_hybrid.server.http.answering import read_body
from megatron_hybrid.server.http.control import check_control
from megatron_hybrid.server.http.http_errors import json_response
from megatron_hybrid.server.http.launched import launched
from megatron_hybrid.server.http.protocol import weights as bodies
from megatron_hybrid.server.http.protocol.parsing import Body, read
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.http.sglang_failures import failing_as_sglang
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.link.engine_client import QueryFailed
from megatron_hybrid.server.options import ServerOptions
from megatron_hybrid.weight_transfer.requests import (
    Described,
    FromFolder,
    FromGroup,
    FromHandles,
    FromPrime,
    Source,
    TransferGroup,
)

T = TypeVar("T", bound=Body)
# The groups of clients that don't name theirs.
VLLM_GROUP, PRIME_GROUP = "weight transfer engine", "broadcaster"
DEFAULT_CHUNK_BYTES = 2**30  # vLLM's


class Control:
    """What control routes need: to be allowed, to read, to ask the engine."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def body(self, kind: type[T]) -> T:
        """The current request's. Raises InvalidRequestError, and Forbidden where these routes are
        off."""
        self.check_allowed()
        return read_body(kind)

    def query(self, kind: type[T]) -> T:
        """The current request's query. Raises as `body`."""
        self.check_allowed()
        values = {key: given[-1] for key, given in request.args.lists()}
        for key, value in values.items():
            if value == "null":  # which would count as left out
                raise InvalidRequestError(key, f"{key} is null, which a query has no word for.")
        return read(kind, values, strict=False)

    def check_allowed(self) -> None:
        """Raise Forbidden where these routes are off, or are for others."""
        check_control(self._serving.options)

    def ask(self, kind: type[wire.AnyQuery], *arguments: Any, field: str = "") -> dict[str, Any]:
        """The engine's answer, for which it may have to come to rest. field: which is to blame for
        what it refuses with 400."""
        try:
            return self._serving.client.ask(kind, *arguments, timeout=None)
        except QueryFailed as error:
            if error.status != 400 or not field:
                raise
            raise InvalidRequestError(field, str(error)) from error

    def update(
        self, source: Source, version: str | None, field: str, mode: PauseMode | None = None
    ) -> dict[str, Any]:
        """New weights from there."""
        mode_name = "" if mode is None else mode.value
        return self.ask(wire.UpdateWeights, source, mode_name, version, field=field)

    def close_group(self, name: str, field: str = "") -> dict[str, Any]:
        """Leave it. Raises InvalidRequestError, where a field names it, if there is none."""
        values = self.ask(wire.CloseGroup, name, field=field)
        if field and not values["closed"]:
            raise InvalidRequestError(field, f"There is no group {name!r}.")
        return values

    def stats(self) -> dict[str, Any]:
        """The engine's."""
        return self._serving.client.stats()

    def world_size(self, of_all: bool) -> int:
        """Ranks of the model, of one replica or of all."""
        self._serving.client.check()
        values = launched(self._serving)
        number: int = values["num_gpus"]
        return number if of_all else number // values["dp_size"]

    def weight_version(self) -> str | None:
        """What answers call the weights that all replicas have."""
        self._serving.client.check()
        return self._serving.client.weight_version()

    def from_prime(self, path: str) -> FromPrime:
        """What prime-rl has written there, or sends, where its group is there: then nobody reads
        the folder."""
        try:
            return FromPrime(PRIME_GROUP, self.folder(path, "weight_dir").path)
        except InvalidRequestError as error:
            return FromPrime(PRIME_GROUP, path, str(error))

    def folder(self, path: str, field: str) -> FromFolder:
        """Raises InvalidRequestError for one that is in none of those that were given."""
        return FromFolder(allowed_folder(path, field, self._serving.options))


def allowed_folder(path: str, field: str, options: ServerOptions) -> str:
    """The folder, without links. Raises InvalidRequestError unless it is one of --weight-folders,
    the model's own, or below one of them."""
    folders = [*options.weight_folders, options.tokenizer_folder]
    with suppress(OSError, ValueError):  # no system would have such a name
        found = Path(path).resolve()
        if any(found.is_relative_to(Path(one).resolve()) for one in folders if one):
            return str(found)
    raise InvalidRequestError(
        field,
        f"{field} is {path!r}, which is in none of the folders that weights may be read from; "
        "--weight-folders names them at the start.",
    )


def check_from_here() -> None:
    """Raise Forbidden unless the current request comes from a process of this machine."""
    peer = request.environ.get("REMOTE_ADDR") or ""
    forwarded = any(name in request.headers for name in ("X-Forwarded-For", "Forwarded"))
    try:
        is_here = ip_address(peer).is_loopback or peer == request.environ.get("SERVER_ADDR")
    except ValueError:
        is_here = not peer  # a socket in the file system
    if forwarded or not is_here:
        raise Forbidden(
            f"{request.path} takes handles to this machine's memory, from processes on it alone; "
            f"this request comes from {'behind a proxy' if forwarded else peer}."
        )


def install(app: Flask, serving: Serving) -> None:
    """All of them."""
    control = Control(serving)
    _install_pause(app, control)
    _install_updates(app, control)
    _install_sglang(app, control)
    _install_vllm(app, control)


def _install_pause(app: Flask, control: Control) -> None:
    """Each is answered when it is done, which may take as long as the requests that run."""

    @app.post("/pause")
    def pause() -> Response:
        said = control.query(bodies.PauseQuery)
        given = control.body(bodies.PauseRequest).mode or said.mode or PauseMode.FINISH
        values = control.ask(wire.Pause, "finish" if given == "wait" else str(given))
        if said.clear_cache:
            control.ask(wire.ResetPrefixCache)
        return done(values)

    @app.post("/resume")
    def resume() -> Response:
        control.body(bodies.ResumeRequest)
        return done(control.ask(wire.Resume))

    @app.get("/is_paused")
    def is_paused() -> Response:
        control.check_allowed()
        return json_response({"is_paused": control.stats()["paused"]})


def _install_updates(app: Flask, control: Control) -> None:
    """Of our own, and those that have the same path."""

    @app.post("/update_weights")
    def update_weights() -> Response:
        wanted = control.body(bodies.UpdateWeightsRequest)
        if (info := wanted.update_info) is not None:
            source, field = _from_update_info(info), "update_info"
        elif wanted.weight_dir is not None:
            source, field = control.from_prime(wanted.weight_dir), "weight_dir"
        elif wanted.path is not None:
            source, field = control.folder(wanted.path, "path"), "path"
        else:
            raise InvalidRequestError("path", "path is missing: the folder with the weights.")
        return done(control.update(source, wanted.weight_version, field, wanted.mode))

    @app.post("/update_weight_version")
    def update_weight_version() -> Response:
        version = control.body(bodies.NameWeightsRequest).new_version
        return done(control.ask(wire.NameWeights, version))

    @app.post("/begin_weight_update")  # SGLang's name
    @app.post("/start_weight_update")
    def start_weight_update() -> Response:
        mode = control.body(bodies.StartUpdateRequest).mode
        return done(control.ask(wire.BeginUpdate, "" if mode is None else mode.value))

    @app.post("/end_weight_update")  # SGLang's name
    @app.post("/finish_weight_update")
    def finish_weight_update() -> Response:
        version = control.body(bodies.FinishUpdateRequest).weight_version
        return done(control.ask(wire.FinishUpdate, version, field="body"))


def _install_sglang(app: Flask, control: Control) -> None:
    routes = failing_as_sglang("sglang_weights", "message")

    @routes.post("/pause_generation")
    def pause_generation() -> Response:
        mode = control.body(bodies.PauseGenerationRequest).mode
        return _succeeded(control.ask(wire.Pause, "abort" if mode == "abort" else "keep"))

    @routes.post("/continue_generation")
    def continue_generation() -> Response:
        control.body(bodies.ResumeRequest)
        return _succeeded(control.ask(wire.Resume))

    @routes.post("/init_weights_update_group")
    def init_weights_update_group() -> Response:
        wanted = control.body(bodies.InitGroupRequest)
        group = TransferGroup(
            wanted.group_name,
            wanted.master_address,
            wanted.master_port,
            wanted.rank_offset,
            wanted.world_size,
            backend=wanted.backend,
        )
        return _succeeded(control.ask(wire.OpenGroup, group, field="group_name"))

    @routes.post("/destroy_weights_update_group")
    def destroy_weights_update_group() -> Response:
        name = control.body(bodies.DestroyGroupRequest).group_name
        return _succeeded(control.close_group(name, "group_name"))

    @routes.post("/update_weights_from_distributed")
    def update_weights_from_distributed() -> Response:
        wanted = control.body(bodies.FromDistributedRequest)
        tensors = _described(wanted.names, wanted.dtypes, wanted.shapes)
        source = FromGroup(wanted.group_name, tensors, in_one=wanted.load_format is not None)
        return _succeeded(control.update(source, wanted.weight_version, "names"))

    @routes.post("/update_weights_from_tensor")
    def update_weights_from_tensor() -> Response:
        wanted = control.body(bodies.FromTensorRequest)
        check_from_here()
        field = "serialized_named_tensors"
        pickled = tuple(read_base64(one, field) for one in wanted.serialized_named_tensors)
        source = FromHandles(pickled, in_one=wanted.load_format is not None)
        return _succeeded(control.update(source, wanted.weight_version, field))

    @routes.post("/weights_checker")
    def weights_checker() -> Response:
        action = control.body(bodies.CheckWeightsRequest).action
        values = control.ask(wire.CheckWeights, action, field="action")
        found = {name: values[name] for name in ("checksum",) if name in values}
        return _succeeded(values, **found)

    @routes.post("/update_weights_from_disk")
    def update_weights_from_disk() -> Response:
        wanted = control.body(bodies.FromDiskRequest)
        source = control.folder(wanted.model_path, "model_path")
        return _succeeded(control.update(source, wanted.weight_version, "model_path"))

    app.register_blueprint(routes)


def _install_vllm(app: Flask, control: Control) -> None:
    @app.post("/init_weight_transfer_engine")
    def init_weight_transfer_engine() -> Response:
        info = control.body(bodies.InitTransferRequest).init_info
        if info.master_address is None and info.nccl_unique_id_b64 is None:
            return done(control.stats())  # of CUDA IPC there is nothing to set up
        if info.world_size is None:
            raise InvalidRequestError("init_info.world_size", "init_info.world_size is missing.")
        group = TransferGroup(
            VLLM_GROUP,
            info.master_address or "",
            info.master_port or 0,
            info.rank_offset,
            info.world_size,
            made_by="vllm",
            nccl_id=info.nccl_unique_id_b64,
            chunk_bytes=_chunk_bytes(info),
        )
        return done(control.ask(wire.OpenGroup, group, field="init_info"))

    @app.post("/shutdown_weight_transfer_engine")
    def shutdown_weight_transfer_engine() -> Response:
        control.check_allowed()
        return done(control.close_group(VLLM_GROUP))

    @app.post("/init_broadcaster")
    def init_broadcaster() -> Response:
        wanted = control.body(bodies.InitBroadcasterRequest)
        group = TransferGroup(
            PRIME_GROUP,
            wanted.host,
            wanted.port,
            wanted.rank_offset + 1,
            wanted.inference_world_size + 1,
            made_by="vllm",
            seconds=wanted.timeout,
        )
        return done(control.ask(wire.OpenGroup, group, field="host"))

    @app.get("/get_world_size")
    def get_world_size() -> Response:
        of_all = control.query(bodies.WorldSizeQuery).include_dp
        return json_response({"world_size": control.world_size(of_all is not False)})

    @app.get("/weight_info")
    def weight_info() -> Response:
        control.check_allowed()
        return json_response({"weight_version": control.weight_version()})


def done(values: dict[str, Any]) -> Response:
    """Of a route of our own, or of vLLM's, whose clients look at the status alone."""
    return json_response({"status": "ok", **_weights_of(values)})


def _succeeded(values: dict[str, Any], **more: Any) -> Response:
    """Of a route of SGLang's."""
    return json_response({"success": True, "message": "Done.", **more, **_weights_of(values)})


def _weights_of(values: dict[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in ("epoch", "weight_version")}


def _from_update_info(info: dict[str, Any] | list[dict[str, Any]]) -> Source:
    """vLLM's; a list has one for each rank, which differ in their handles alone."""
    each = [read(bodies.UpdateInfo, one) for one in (info if isinstance(info, list) else [info])]
    if not each:
        raise InvalidRequestError("update_info", "update_info is an empty list.")
    first = each[0]
    tensors = _described(first.names, first.dtype_names, first.shapes)
    pickled = [one.ipc_handles_pickled for one in each]
    if first.ipc_handles_pickled is None:
        return FromGroup(VLLM_GROUP, tensors, chunk_bytes=_chunk_bytes(first))
    check_from_here()
    field = "update_info.ipc_handles_pickled"
    handles = tuple(read_base64(one or "", field) for one in pickled)
    return FromHandles(handles, in_one=first.tensor_sizes is not None, tensors=tensors)


def _chunk_bytes(said: bodies.InitInfo | bodies.UpdateInfo) -> int | None:
    return (said.packed_buffer_size_bytes or DEFAULT_CHUNK_BYTES) if said.packed else None


def _described(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> Described:
    return Described(tuple(names), tuple(dtypes), tuple(map(tuple, shapes)))


def read_base64(text: str, field: str) -> bytes:
    """Bytes of a field's text. Raises InvalidRequestError."""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise InvalidRequestError(field, f"{field} is no base64: {error}.") from error

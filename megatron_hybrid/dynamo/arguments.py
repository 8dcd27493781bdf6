"""The worker's flags: the engine's, those of the model, and Dynamo's own."""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dynamo.common.configuration.groups.runtime_args import (
    DynamoRuntimeArgGroup,
    DynamoRuntimeConfig,
)
from dynamo.common.utils.runtime import parse_endpoint

from megatron_hybrid.arguments import (
    ArgumentParser,
    add_arguments,
    add_engine_arguments,
    add_model_argument,
    values_from_args,
)
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.dynamo.checks import check_block_size, check_ranks
from megatron_hybrid.dynamo.parsers import parsers_of
from megatron_hybrid.dynamo.requests import RequestReader
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.models.checkpoints.folder import CONFIG, ModelFolder, check_model_files
from megatron_hybrid.server.cli import REFERENCE_MODEL_NAME, with_model_files
from megatron_hybrid.server.options import MOST_SECONDS, ModelOptions, ParseOptions
from megatron_hybrid.server.sampling_defaults import describe, read_sampling_defaults
from megatron_hybrid.settings import option
from megatron_hybrid.text.reasoning import choose
from megatron_hybrid.text.tokenizer import Tokenizer

BOTH = "chat,completions"  # Dynamo's default of --endpoint-types

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(ModelOptions):
    """What a worker needs to know besides EngineConfig and Dynamo's flags."""

    shutdown_timeout: float = option(
        25.0,
        "how long requests that are open may go on after SIGTERM or SIGINT and Dynamo's grace "
        "period (DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS, 5); both together must be less than "
        "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT (35)",
        most=MOST_SECONDS,
        metavar="SECONDS",
    )


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker is started with. runtime: Dynamo's flags. folder: what its front end reads of
    the model. names: those that it is served under, the first one first."""

    config: EngineConfig
    options: WorkerOptions
    runtime: Any
    folder: str
    names: tuple[str, ...]
    reader: RequestReader


def argument_parser() -> ArgumentParser:
    """Of this command."""
    parser = ArgumentParser(
        prog="python -m megatron_hybrid.dynamo",
        description="A worker of NVIDIA Dynamo: a model behind Dynamo's front end.",
    )
    add_engine_arguments(parser)
    add_model_argument(parser)
    add_arguments(parser, WorkerOptions, "worker")
    DynamoRuntimeArgGroup().add_arguments(parser)
    return parser


def parse(argv: Sequence[str] | None = None) -> WorkerSettings:
    """Raises ConfigurationError, before anything is started, for what can't be."""
    args = argument_parser().parse_args(argv)
    engine, worker = values_from_args(args, EngineConfig, WorkerOptions)
    config, options = EngineConfig(**engine), WorkerOptions(**worker)
    check_ranks(config.parallel_sizes)
    check_block_size(config.inference_dynamic_batching_block_size, os.environ)
    runtime = _runtime(args, "prefill" if config.role == "prefill" else "backend")
    given, (config, options) = config.load, with_model_files(config, options)
    check_model_files(config)
    for said in getattr(args, "aliases", ()):
        logger.info("%s", said)
    folder = ModelFolder.of(config)
    if not (folder.tokenizer / CONFIG).is_file():
        raise ConfigurationError(
            f"{folder.tokenizer} has no {CONFIG}: Dynamo's front end reads it beside the tokenizer."
        )
    own_name = REFERENCE_MODEL_NAME if given is None else folder.path.resolve().name
    tokenizer = Tokenizer.load(folder.tokenizer, runtime.custom_jinja_template)
    _choose_parsers(runtime, tokenizer)
    return WorkerSettings(
        config,
        options,
        runtime,
        str(folder.tokenizer.resolve()),
        options.served_model_name or (own_name,),
        RequestReader(
            tokenizer,
            choose(tokenizer.chat_template),
            _open_fields(folder, options),
            config.role,
        ),
    )


def _runtime(args: Namespace, component: str) -> Any:
    """Dynamo's flags, as its other workers read them; component: unless --endpoint names one."""
    try:
        runtime = DynamoRuntimeConfig.from_cli_args(args)
        runtime.validate()
        place = runtime.endpoint or f"dyn://{runtime.namespace}.{component}.generate"
        runtime.namespace, runtime.component, runtime.endpoint = parse_endpoint(place)
    except ValueError as error:
        raise ConfigurationError(f"A flag of Dynamo's is wrong: {error}") from error
    return runtime


def _open_fields(folder: ModelFolder, options: WorkerOptions) -> ParseOptions:
    """How requests are sampled that leave it open."""
    if options.generation_config != "auto" or not (defaults := read_sampling_defaults(folder)):
        return ParseOptions()
    logger.info("%s", describe(defaults))
    return ParseOptions(sampling_defaults=defaults)


def _choose_parsers(runtime: Any, tokenizer: Tokenizer) -> None:
    """How the front end reads calls and thoughts, unless flags say so: as the template shows."""
    tool_calls, thoughts = parsers_of(tokenizer)
    if runtime.dyn_tool_call_parser is None and tool_calls:
        runtime.dyn_tool_call_parser = tool_calls
        logger.info("tool calls are read as the chat template shows: %s", tool_calls)
    if runtime.dyn_reasoning_parser is None and thoughts:
        runtime.dyn_reasoning_parser = thoughts
        logger.info("thoughts are read as the chat template shows: %s", thoughts)
    if not tokenizer.has_chat_template and runtime.endpoint_types == BOTH:
        runtime.endpoint_types = "completions"

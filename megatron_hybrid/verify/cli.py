"""`megatron-hybrid verify`: the engine beside transformers, and a report."""

from __future__ import annotations

import gc
import logging
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_hybrid import __version__
from megatron_hybrid.arguments import (
    ArgumentParser,
    add_arguments,
    add_engine_arguments,
    add_model_argument,
    values_from_args,
)
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.errors import ConfigurationError, WeightsError
from megatron_hybrid.models.checkpoints import hub
from megatron_hybrid.models.checkpoints.folder import ModelFolder, check_model_files
from megatron_hybrid.rank_layout import RankLayout
from megatron_hybrid.server.log_format import set_up_logging
from megatron_hybrid.server.options import TOOL_CALL_FORMATS
from megatron_hybrid.settings import Settings, option, options_of
from megatron_hybrid.verify.report import Check, Report, check_place, not_checked
from megatron_hybrid.versions import package_versions

if TYPE_CHECKING:
    import torch

    from megatron_hybrid.llm import LLM
    from megatron_hybrid.verify.dequantized import Weight

_PRIVATE = ("load", "tokenizer_model")  # settings that are paths


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(Settings):
    """What is checked, and where the report goes."""

    revision: str | None = option(
        None, "branch, tag or commit of a model on the Hugging Face hub; left out: main"
    )
    report: str | None = option(
        None, "file that the report is written to as JSON: no prompts, no paths, no names of hosts"
    )
    oracle: str = option(
        "auto",
        "transformers' model in float32. whole: all of it in memory; layers: one layer at a time; "
        "auto: whole if there is room; none: ways are compared with one another alone",
        ("auto", "whole", "layers", "none"),
    )
    speed: bool = option(True, "measure how fast it decodes and computes a prompt")
    tool_call_parser: str = option(
        "auto",
        "how the model writes tool calls; auto: as its chat template shows",
        ("auto", *TOOL_CALL_FORMATS),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Check a model; 0, or 1 where anything differs, or 2 for what cannot be run."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # as the server does
    args = argument_parser().parse_args(argv)
    try:
        engine, own = values_from_args(args, EngineConfig, VerifyOptions)
        set_up_logging("text", "verify", "%(asctime)s %(name)s: ", logging.WARNING)
        options = VerifyOptions(**own)
        config = hub.with_files(EngineConfig(**engine), options.revision)
        folder = check_model_files(config)
        layout = RankLayout.from_environment(config.parallel_sizes)
        if options.report is not None and layout.rank == 0:
            check_place(options.report)
        report = verify(config, options, folder, layout)
        if layout.rank:
            return 0
        if options.report is not None:
            report.write(options.report)
    except (ConfigurationError, WeightsError) as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"The report can't be written: {error.strerror}.", file=sys.stderr)
        return 2
    print(report.summary())
    return int(report.differs)


def argument_parser() -> ArgumentParser:
    """Of this command."""
    parser = ArgumentParser(
        prog="megatron-hybrid verify",
        description="Check whether a model runs right here: beside transformers, in every way.",
        epilog="Ends with 1 where anything differs. Under torchrun it is split as by serve.",
    )
    add_model_argument(parser)
    add_engine_arguments(parser)
    add_arguments(parser, VerifyOptions, "verify")
    return parser


def verify(
    config: EngineConfig, options: VerifyOptions, folder: ModelFolder, layout: RankLayout
) -> Report:
    """All checks; each is printed by the first rank as it is done. Every rank makes this call.
    Raises ConfigurationError or WeightsError for a model that cannot be loaded."""
    # torch takes seconds to import, and nothing above needs it.
    from megatron_hybrid.engine.choices import resolve_device
    from megatron_hybrid.llm import LLM
    from megatron_hybrid.parallel import initialize
    from megatron_hybrid.verify.against_transformers import compare
    from megatron_hybrid.verify.prompts import make_prompts
    from megatron_hybrid.verify.ways import go_all_ways

    report = Report(
        private=[one for one in (config.load, config.tokenizer_model, str(folder.path)) if one]
    )

    def note(checks: Iterator[Check] | list[Check]) -> None:
        for check in checks:
            report.checks.append(check)
            if layout.rank == 0:
                print(report.line(check), flush=True)

    device = resolve_device(config)
    llm = LLM(config=config)
    report.about |= _about(config, folder, layout, llm, device)
    note(_chat(llm, options))
    ways = go_all_ways(llm, make_prompts(llm))
    if options.speed:
        note(_speed(llm, folder, device, report))
    # Room for the other model, and the other ranks are done.
    parallel = initialize(config.parallel_sizes, device=device)
    del llm
    gc.collect()
    parallel.destroy()
    gc.collect()
    if device.type == "cuda":
        _free(device)
    if layout.rank == 0:
        note(compare(config, folder, ways, device, options.oracle, report))
    return report


def _free(device: torch.device) -> None:
    import torch

    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def _chat(llm: LLM, options: VerifyOptions) -> Iterator[Check]:
    from megatron_hybrid.verify.chat import check_chat

    engine = llm.engine
    try:
        tokenizer = llm.tokenizer
    except ConfigurationError as error:
        yield not_checked("chat", str(error))
        return
    yield from check_chat(
        tokenizer, engine.eos_token_ids, engine.vocab_size, options.tool_call_parser
    )


def _speed(llm: LLM, folder: ModelFolder, device: torch.device, report: Report) -> list[Check]:
    from megatron_hybrid.verify.against_transformers import compute_dtype
    from megatron_hybrid.verify.speed import Work, measure

    config = llm.config
    rounded = 0 if config.quantization is None else 8
    bits = rounded or compute_dtype(config, folder, device).itemsize * 8
    checks, report.speed = measure(
        llm, Work.of(_weights(config, folder), folder.config, bits), device
    )
    return checks


def _weights(config: EngineConfig, folder: ModelFolder) -> list[Weight]:
    """Those that the folder lists; none where the weights would have to be read for it."""
    from megatron_hybrid.models.checkpoints.weight_source import open_folder
    from megatron_hybrid.verify.dequantized import weights_of

    if folder.is_megatron or config.load_format != "auto":
        return []
    with open_folder(folder, folder.config) as source:
        return list(weights_of(source).values())


def _about(
    config: EngineConfig, folder: ModelFolder, layout: RankLayout, llm: LLM, device: torch.device
) -> dict[str, Any]:
    import torch

    from megatron_hybrid.verify.against_transformers import compute_dtype
    from megatron_hybrid.verify.dequantized import formats_by_layer

    is_gpu, model, weights = device.type == "cuda", folder.config, _weights(config, folder)
    return {
        "versions": {
            "megatron_hybrid": __version__,
            "python": platform.python_version(),
            **{name: version for name, version in package_versions().items() if version},
            "cuda": torch.version.cuda if is_gpu else None,
        },
        "device": torch.cuda.get_device_name(device) if is_gpu else platform.machine(),
        "ranks": layout.world_size,
        "family": model.model_type,
        "layers": {letter: model.pattern.count(letter) for letter in sorted(set(model.pattern))},
        "hidden_size": model.hidden_size,
        "vocabulary": model.vocab_size,
        "dtype": str(compute_dtype(config, folder, device)).removeprefix("torch."),
        "stored_as": llm.engine.cache_geometry.stored_as,
        "parameters": sum(weight.numel for weight in weights) or None,
        "formats_by_layer": formats_by_layer(weights),
        "weight_bytes_of_a_rank": llm.engine.statistics.weight_bytes,
        "settings": {
            one.name: value
            for one in options_of(EngineConfig)
            if one.name not in _PRIVATE and (value := getattr(config, one.name)) != one.default
        },
    }

"""One of two ranks that save models with megatron-core: its modules, its sharded_state_dict, its
dist_checkpointing. Writes a checkpoint for each of MODELS, and the logits of its own forward; then
loads them all as two ranks of ours.

    torchrun --nproc-per-node 2 -m tests.models.megatron_worker FOLDER
        HUGGING_FACE_FOLDER...  (beside each: FOLDER-megatron, the same model)
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import warnings
import zlib
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling a gate takes longer than everything else

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import megatron_hybrid.parallel.megatron as megatron  # hides an unusable transformer-engine
from convert.conversion import to_hugging_face, to_megatron
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.checkpoints.weights import load_model
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext, initialize
from megatron_hybrid.rank_layout import ParallelSizes
from tests.models.driver import run_in_segments
from tests.models.megatron_models import MODELS, READ_BACK, TOKENS
from tests.models.megatron_spec import hybrid_spec

warnings.simplefilter("ignore")
torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment]
torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]


class GatedNorm(nn.Module):
    """mamba_ssm's gated norm in plain torch; the gate is in `x` already."""

    def __init__(self, size: int, eps: float, group_size: int, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, self.group_size))
        scale = groups.square().mean(-1, keepdim=True).add(self.eps).rsqrt()
        return (groups * scale).flatten(-2) * self.weight

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        """As ExtendedRMSNorm's, which is one only where mamba_ssm is installed."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=megatron.parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )


class CenteredNorm(nn.Module):
    """Transformer Engine's RMS norm with a weight around zero."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * x.square().mean(-1, keepdim=True).add(self.eps).rsqrt() * (1 + self.weight)


def mamba_scan(
    zxbcdt: Tensor, conv: Tensor, conv_bias: Tensor, dt_bias: Tensor, a: Tensor, D: Tensor,
    headdim: int, ngroups: int, **_: Any,
) -> Tensor:  # fmt: skip
    """mamba_ssm's mamba_split_conv1d_scan_combined, token by token: [batch, tokens, z x B C dt] ->
    [batch, tokens, heads * headdim]."""
    heads = a.shape[0]
    inner = heads * headdim
    groups = conv.shape[0] - inner
    z, xbc, dt = zxbcdt.split([inner, inner + groups, heads], dim=-1)
    width, tokens = conv.shape[1], zxbcdt.shape[1]
    padded = F.pad(xbc.transpose(1, 2), (width - 1, 0))
    xbc = F.silu(F.conv1d(padded, conv[:, None], conv_bias, groups=conv.shape[0])).transpose(1, 2)
    x, b, c = xbc.split([inner, groups // 2, groups // 2], dim=-1)
    x = x.unflatten(-1, (heads, headdim))
    b, c = (
        v.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, dim=2) for v in (b, c)
    )
    dt = F.softplus(dt + dt_bias)
    state = x.new_zeros(x.shape[0], heads, headdim, b.shape[-1])
    out = []
    for t in range(tokens):
        decay = (dt[:, t] * a).exp()[..., None, None]
        new = (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        state = decay * state + new
        out.append((state * c[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(out, dim=1).flatten(2) * F.silu(z)


def transformer_config(model: dict[str, Any]) -> Any:
    from megatron.core.activations import squared_relu
    from megatron.core.transformer import TransformerConfig

    values = dict(model["config"])
    gated = values.pop("swiglu")
    return TransformerConfig(
        **values,
        gated_linear_unit=gated,
        activation_func=F.silu if gated else squared_relu,
        normalization="RMSNorm",
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=model.get("tp", 1),
        pipeline_model_parallel_size=model.get("pp", 1),
        expert_model_parallel_size=model.get("ep", 1),
        expert_tensor_parallel_size=1,
        deterministic_mode=True,
    )


def build(model: dict[str, Any]) -> Any:
    config, state = transformer_config(model), megatron.parallel_state
    common: dict[str, Any] = {
        "vocab_size": model["vocab_size"],
        "max_sequence_length": 64,
        "pre_process": state.is_pipeline_first_stage(),
        "post_process": state.is_pipeline_last_stage(),
        "share_embeddings_and_output_weights": model.get("tied", False),
        "position_embedding_type": model.get("positions", "rope"),
    }
    if model["kind"] == "hybrid":
        from megatron.core.models.mamba import MambaModel

        put_mamba_scan()
        return MambaModel(config, hybrid_spec(), **common, hybrid_override_pattern=model["pattern"])
    from megatron.core.models.gpt import GPTModel

    spec = gpt_spec(config)
    if "G" in model["pattern"]:
        put_gated_delta_nets(spec, model["pattern"])
    return GPTModel(
        config, spec, **common, rotary_percent=model.get("rotary_percent", 1.0), rotary_base=10000
    )


def gpt_spec(config: Any) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs

    if config.num_moe_experts is None:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
        )
        from megatron.core.transformer.torch_norm import WrappedTorchNorm
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

        layers = config.num_layers // config.pipeline_model_parallel_size
        return TransformerBlockSubmodules([spec] * layers, layer_norm=WrappedTorchNorm)
    return gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm"
    )


def put_gated_delta_nets(spec: Any, pattern: str) -> None:
    """Make the attention of layers of kind G gated delta nets, and all norms around zero."""
    import copy

    import megatron.core.ssm.gated_delta_net as delta
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    delta.HAVE_FLA = True
    delta.l2norm = lambda x: x * x.square().sum(-1, keepdim=True).add(1e-6).rsqrt()
    for index, letter in enumerate(pattern[::2]):
        layer = spec.layer_specs[index] = copy.deepcopy(spec.layer_specs[index])
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = CenteredNorm
        if letter == "G":
            parts.self_attention = ModuleSpec(
                module=delta.GatedDeltaNet,
                submodules=delta.GatedDeltaNetSubmodules(
                    ColumnParallelLinear, CenteredNorm, RowParallelLinear
                ),
            )
            parts.sharded_state_dict_keys_map = {
                "input_layernorm.": "self_attention.in_proj.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            }
        else:
            parts.self_attention.submodules.q_layernorm = CenteredNorm
            parts.self_attention.submodules.k_layernorm = CenteredNorm
    spec.layer_norm = CenteredNorm


def put_mamba_scan() -> None:
    """In the place of mamba_ssm's kernels, which need a GPU."""
    import megatron.core.ssm.mamba_mixer as mixer

    mixer.HAVE_MAMBA_SSM = True
    mixer.mamba_split_conv1d_scan_combined = mamba_scan
    mixer.ExtendedRMSNorm = GatedNorm


def draw_weights(model: nn.Module) -> None:
    """Values that differ between the ranks that share a weight, and agree where it is one's."""
    state = megatron.parallel_state
    place = f"stage{state.get_pipeline_model_parallel_rank()}"
    buffers = [(n, b) for n, b in model.named_buffers() if n.endswith("expert_bias")]
    for name, values in (*model.named_parameters(), *buffers):
        key = name + place
        if ".local_experts." in name:
            key += f"ep{state.get_expert_model_parallel_rank()}"
        elif getattr(values, "tensor_model_parallel", False) or name.endswith("mixer.norm.weight"):
            key += f"tp{state.get_tensor_model_parallel_rank()}"
        generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        normal = torch.randn(values.shape, generator=generator)
        if name.endswith("A_log"):
            normal = (1 + 15 * torch.rand(values.shape, generator=generator)).log()
        elif name.endswith("dt_bias"):
            normal -= 2
        elif "norm" in name or name.endswith(".D"):
            normal = values.detach().mean().round() + 0.2 * normal  # around zero or one
        elif "conv1d" in name:
            normal *= 0.5
        elif values.ndim == 2 and "embedding" not in name:
            normal *= 0.5 / values.shape[1] ** 0.5
        else:
            normal *= 1.0 if "embedding" in name else 0.1
        values.data.copy_(normal)


@torch.no_grad()
def logits_of(model: Any, tokens: list[int]) -> Tensor | None:
    """[tokens, vocabulary] on the ranks of the last stage."""
    state = megatron.parallel_state
    ids = torch.tensor([tokens])
    count = len(tokens)
    hidden = torch.empty(count, 1, model.config.hidden_size)
    if not state.is_pipeline_first_stage():
        dist.recv(hidden, 0)
        model.set_input_tensor(hidden)
    mask = torch.ones(count, count).triu(1).bool()[None, None]
    out = model(ids, torch.arange(count)[None], mask)
    if not state.is_pipeline_last_stage():
        dist.send(out.contiguous(), 1)
        return None
    parts = [torch.empty_like(out) for _ in range(state.get_tensor_model_parallel_world_size())]
    dist.all_gather(parts, out.contiguous(), group=state.get_tensor_model_parallel_group())
    return torch.cat(parts, dim=-1)[0]


def save(model: Any, description: dict[str, Any], folder: Path) -> None:
    from megatron.core import dist_checkpointing

    metadata = dict(description.get("metadata", {}))
    metadata["dp_cp_group"] = megatron.parallel_state.get_data_parallel_group(
        with_context_parallel=True
    )
    state: dict[str, Any] = {
        "model": model.sharded_state_dict(metadata=metadata),
        "checkpoint_version": 3.0,
        "iteration": 100,
    }
    if "arguments" in description:
        state["args"] = Namespace(**description["arguments"])
    iteration = folder / "iter_0000100"
    if dist.get_rank() == 0:
        iteration.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(iteration), content_metadata=description.get("metadata"))
    if dist.get_rank() == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text("100")


@contextlib.contextmanager
def built(description: dict[str, Any]) -> Iterator[Any]:
    """A model of MODELS, split as it says."""
    megatron.initialize_model_parallel(
        tensor_model_parallel_size=description.get("tp", 1),
        pipeline_model_parallel_size=description.get("pp", 1),
        expert_model_parallel_size=description.get("ep", 1),
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    yield build(description).eval()
    dist.barrier()
    megatron.parallel_state.destroy_model_parallel()


def save_logits(model: Any, path: Path) -> None:
    logits = logits_of(model, TOKENS)
    if logits is not None and megatron.parallel_state.get_tensor_model_parallel_rank() == 0:
        torch.save(logits, path)


def save_all(folder: Path) -> None:
    """Make every model of MODELS; write its checkpoint, and its logits."""
    for name, description in MODELS.items():
        with built(description) as model:
            draw_weights(model)
            save(model, description, folder / name)
            save_logits(model, folder / f"{name}.logits")


def read_ours(folder: Path) -> None:
    """megatron-core reads what we convert to its format; write its logits."""
    from megatron.core import dist_checkpointing

    for name in READ_BACK:
        saved = folder / f"{name}-again"
        if dist.get_rank() == 0:
            to_megatron(folder / f"{name}-hf", saved, progress=False)
        dist.barrier()
        path = str(saved / "release")
        metadata = dist_checkpointing.load_content_metadata(path)
        with built(MODELS[name]) as model:
            metadata["dp_cp_group"] = megatron.parallel_state.get_data_parallel_group(
                with_context_parallel=True
            )
            state = dist_checkpointing.load(
                {"model": model.sharded_state_dict(metadata=metadata)}, path, strict="log_all"
            )
            missing, unknown = model.load_state_dict(state["model"], strict=False)
            assert all(key.endswith("_extra_state") for key in missing) and not unknown
            save_logits(model, folder / f"{name}.again")


def load_all(folder: Path, converted: list[Path]) -> dict[str, bool]:
    """Load what was saved, and Megatron twins of Hugging Face folders, on two ranks in all ways;
    write logits, and say whether each has the weights of its Hugging Face twin, bit for bit."""
    twins = {path: Path(f"{path}-megatron") for path in converted}
    for name, description in MODELS.items():
        if description["family"] != "megatron":
            twins[folder / f"{name}-hf"] = folder / name
    if dist.get_rank() == 0:
        for hugging_face, saved in twins.items():
            if not hugging_face.exists():
                to_hugging_face(saved, hugging_face, progress=False)
    dist.barrier()
    same: dict[str, bool] = {}
    for sizes in (
        ParallelSizes(tensor=2),
        ParallelSizes(pipeline=2),
        ParallelSizes(expert=2, expert_tensor=1),
        ParallelSizes(tensor=2, expert=2, expert_tensor=1),
    ):
        parallel = initialize(sizes)
        for hugging_face, saved in twins.items():
            config = ModelFolder.open(hugging_face).config
            if sizes.expert > 1 and config.moe is None:
                continue
            theirs, ours = (_load(path, parallel) for path in (hugging_face, saved))
            same[f"{saved.name} {sizes.tensor} {sizes.pipeline} {sizes.expert}"] = all(
                one.role == other.role and torch.equal(one.target, other.target)
                for (_, one), (_, other) in zip(
                    theirs.weight_parts(), ours.weight_parts(), strict=True
                )
            )
        if sizes.numbers == ParallelSizes(tensor=2).numbers:
            for name in MODELS:
                logits = run_in_segments(_load(folder / name, parallel), TOKENS, [10])
                torch.save(logits, folder / f"{name}.ours.{dist.get_rank()}")
        megatron.parallel_state.destroy_model_parallel()
    return same


def _load(folder: Path, parallel: ParallelContext) -> HybridModel:
    cpu = torch.device("cpu")
    return load_model(folder, device=cpu, dtype=None, parallel=parallel, progress=False)


def main(folder: Path, converted: list[Path]) -> None:
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils

    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    moe_utils.te_general_gemm = None
    # Results are handed over within this process; a manager's process takes seconds to start.
    filesystem._get_write_results_queue = queue.Queue
    dist.init_process_group("gloo")
    save_all(folder)
    same = load_all(folder, converted)
    read_ours(folder)
    (folder / f"same.{dist.get_rank()}.json").write_text(json.dumps(same))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(path) for path in sys.argv[2:]])

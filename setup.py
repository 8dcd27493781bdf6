"""Packaging. Metadata lives here and nowhere else; pyproject.toml configures the tools."""

from __future__ import annotations

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

# Everything below installs as a wheel on a bare CPU machine. The upper bound of torch is what
# keeps an installed CPU build in place: without it pip replaces it by the newest CUDA build.
BASE = [
    "torch>=2.11,<2.14",
    "megatron-core>=0.16.1,<0.20",
    # megatron-core 0.17 and later, which pip takes on 3.12, import it even where there is no GPU
    'triton>=3.6; python_version >= "3.12" and sys_platform == "linux"',
    "transformers>=5.0,<6",
    "huggingface-hub>=1.0",  # models by their names; transformers says how new
    "safetensors>=0.5",
    "tokenizers>=0.22",
    "numpy>=2.0",
    "einops>=0.8",  # megatron-core needs it at run time without declaring it
    "psutil>=5.9",  # so does its checkpoint code
    "flask>=3.0,<4",
    "gunicorn>=25",  # workers of the front end, which share the port
    "gevent>=25",  # many streams in each of them
    "jinja2>=3.1",  # chat templates
    "llguidance>=1.7",  # answers that match a JSON schema or grammar
    "pyzmq>=26",
    "msgspec>=0.19",
    "prometheus-client>=0.21",
    "pyyaml>=6.0",
    "tqdm>=4.66",
    "shtab>=1.13",  # completion in shells; small, and needs nothing itself
]

# The fast kernels of attention. A wheel, which compiles what it needs when it is first needed.
FLASHINFER = ["flashinfer-python>=0.6.14"]

# These compile against CUDA and the installed torch: install torch first, then
# `pip install --no-build-isolation ".[gpu]"`. transformer-engine without its torch part is an
# empty shell that breaks `import megatron.core`, hence the extra's own extra.
GPU = [
    *FLASHINFER,
    "triton>=3.6",
    "mamba-ssm>=2.3.2",
    "causal-conv1d>=1.6.2",
    "transformer-engine[pytorch]>=2.0",
]

# Traces of the server's requests, over HTTP or, by a larger package, gRPC.
OTEL_HTTP = ["opentelemetry-sdk>=1.30", "opentelemetry-exporter-otlp-proto-http>=1.30"]
OTEL = [*OTEL_HTTP, "opentelemetry-exporter-otlp-proto-grpc>=1.30"]

# A worker of NVIDIA Dynamo. One of its requirements wants a GPU: docs/dynamo.md says what to
# install without one.
DYNAMO = [
    "ai-dynamo==1.6.1; sys_platform == 'linux'",
    "uvloop>=0.21; sys_platform == 'linux'",
]

# Replicas in Ray Serve. Pinned: its request routers are an alpha interface.
RAY = ["ray[serve]>=2.60,<2.61", "aiohttp>=3.11", "starlette>=0.45"]

# Prefill apart from decode. Pinned: what is used of it is not its public part. Beside a torch for
# CUDA 12 it is nixl-cu12.
NIXL = ['nixl-cu13==1.5.1; sys_platform == "linux"']

# For the pictures of tools/simulate_prefix_cache.py --plot.
PLOT = ["matplotlib>=3.9"]

# flash-linear-attention is left out on purpose: where it is installed without a GPU,
# transformers' gated delta net models, which the tests compare with, no longer run.
TEST = [
    *PLOT,
    *NIXL,
    *OTEL_HTTP,
    'triton>=3.6; sys_platform == "linux"',  # its interpreter runs our kernels on a CPU
    "pytest>=9.0,<10",
    "pytest-xdist>=3.6",
    "hypothesis>=6.100",
    "openai>=2.0",
    "aiohttp>=3.11",  # examples/rl asks with it
    "peft>=0.21",  # the oracle of adapters
    "schemathesis>=4",  # requests made from /openapi.json
    "playwright>=1.50",  # drives the system's Chromium against the page at /
    'sglang-router>=0.3.2,<0.4; sys_platform == "linux"',  # runs in front of two replicas
    "kubernetes-validate>=1.37,<1.38",  # Kubernetes' schemas, for configs/kubernetes
    "setuptools>=77",  # test_packaging builds a wheel without reaching for the network
    # Pinned: another version formats and complains differently.
    "ruff>=0.17.5,<0.18",
    "mypy>=2.4.1,<2.5",
]

# Clients whose own types some tests hold answers to, where they are installed (TESTS=all).
CLIENTS = ["anthropic>=0.125"]

DEV = [*TEST, "pre-commit>=4.0", "build>=1.2", "twine>=6.1"]

setup(
    name="megatron-hybrid",
    version="0.1.0",
    description=(
        "A Megatron-style inference engine for hybrid (Mamba and attention) language models "
        "with a prefix cache of KV blocks and recurrent states"
    ),
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["megatron_hybrid", "megatron_hybrid.*"]),
    package_data={
        "megatron_hybrid": ["py.typed"],
        "megatron_hybrid.kernels.linear": ["*.cu"],
        "megatron_hybrid.reference_model": ["weights/**"],
        "megatron_hybrid.server.http.dashboard": ["static/**"],
    },
    zip_safe=False,
    install_requires=BASE,
    extras_require={
        "disaggregation": NIXL,
        "dynamo": DYNAMO,
        "flashinfer": FLASHINFER,
        "gpu": GPU,
        "otel": OTEL,
        "plot": PLOT,
        "ray": RAY,
        "test": TEST,
        "clients": CLIENTS,
        "dev": DEV,
    },
    entry_points={"console_scripts": ["megatron-hybrid=megatron_hybrid.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)

"""NVIDIA Dynamo's worker with our engine: `python -m megatron_hybrid.dynamo` (docs/dynamo.md)."""

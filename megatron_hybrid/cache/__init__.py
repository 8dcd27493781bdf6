"""The hybrid prefix cache: KV blocks and recurrent states, found by the hash of their prefix.

Pure Python: no tensors, no model, no server. A block or slot here is a number; what it holds is
in the tensors of `megatron_hybrid.layers.inputs.LayerCaches`.
"""

"""`megatron-hybrid verify`: whether a checkpoint runs right here, beside transformers."""

"""Megatron checkpoints to Hugging Face folders and back, for tools/convert_checkpoint.py."""

"""The modules that answer, under autograd: a trainer's log-probabilities with the engine's bits."""

from megatron_hybrid.training.trainable import TrainableModel

__all__ = ["TrainableModel"]

"""The small trained hybrid model that ships with the package, and what it was trained on.

`path()` names the Hugging Face folder; `chats` generates the chats; the tools
`tools/train_reference_model.py` and `tools/evaluate_reference_model.py` do the rest.
"""

from pathlib import Path


def path() -> Path:
    """The folder of the reference model: an ordinary Hugging Face checkpoint."""
    return Path(__file__).resolve().parent / "weights"

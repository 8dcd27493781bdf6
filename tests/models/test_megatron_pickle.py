"""Members of enumerations, whichever Python wrote them: 3.11.0 to 3.11.3 write an attribute's name,
the others a value."""

from __future__ import annotations

import enum
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties

from megatron_hybrid.models.checkpoints.megatron_pickle import Unknown, read_pickle


class Ours(enum.Enum):
    ONE = 1


def by_name(self: enum.Enum, protocol: int) -> tuple[Any, ...]:
    return getattr, (type(self), self.name)


def by_value(self: enum.Enum, protocol: int) -> tuple[Any, ...]:
    return type(self), (self.value,)


@pytest.mark.parametrize("write", [by_name, by_value])
def test_members_are_read_by_name_and_by_value(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (_MEM_FORMAT_ENCODING, Ours):
        monkeypatch.setattr(kind, "__reduce_ex__", write)
    (tmp_path / "it").write_bytes(pickle.dumps([TensorProperties(), Ours.ONE]))
    properties, ours = read_pickle(tmp_path / "it")
    assert properties == TensorProperties()
    assert isinstance(ours, Unknown)


def test_other_attributes_are_not_looked_up(tmp_path: Path) -> None:
    class Attribute:
        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, (dict, "fromkeys")

    (tmp_path / "it").write_bytes(pickle.dumps(Attribute()))
    assert isinstance(read_pickle(tmp_path / "it"), Unknown)

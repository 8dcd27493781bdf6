"""API keys: where they are read, whose request it is, and what is kept apart between them."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from megatron_hybrid.errors import ConfigurationError

API_KEY_VARIABLE = "MEGATRON_HYBRID_API_KEY"
ADMIN_KEY_VARIABLE = "MEGATRON_HYBRID_ADMIN_API_KEY"
# They stop, change or slow down the server for everybody.
CONTROL_PATHS = (
    "/pause",
    "/resume",
    "/is_paused",
    "/pause_generation",
    "/continue_generation",
    "/update_weights",
    "/update_weight_version",
    "/start_weight_update",
    "/begin_weight_update",
    "/finish_weight_update",
    "/end_weight_update",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/update_weights_from_disk",
    "/init_weight_transfer_engine",
    "/shutdown_weight_transfer_engine",
    "/init_broadcaster",
    "/weight_info",
    "/weights_checker",
    "/get_world_size",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/release_kv_cache_memory",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/load_lora_adapter_from_tensors",
    "/reset_prefix_cache",
    "/flush_cache",
)
MAX_NAME_LENGTH = 64
MAX_KEY_LENGTH = 1024
_SENDABLE = re.compile(r"[\x21-\x7e]+")  # what a header takes, and no spaces


class ApiKey(msgspec.Struct, frozen=True):
    """name: for the log, which never has the key itself; admin: it may use the control routes,
    where these have keys of their own."""

    key: str
    name: str
    admin: bool = False

    def __repr__(self) -> str:
        return f"ApiKey({self.name})"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. secret: mixed into its salts; empty: they are taken as they are. owner:
    under which what is stored for this key is found again."""

    key_name: str | None = None
    admin: bool = False
    secret: bytes = b""
    owner: bytes = b""

    def salt_for(self, given: str) -> str:
        """The cache salt of a request that names this one, or none (""). With a secret it depends
        on both: no two keys ever have the same one, whatever they ask for."""
        if not self.secret:
            return given
        return hashlib.blake2b(given.encode(), key=self.secret, digest_size=16).hexdigest()


NOBODY = Caller()


class KeyRing:
    """The keys of a server. `salted`: each has a salt of its own."""

    def __init__(self, keys: Sequence[ApiKey], *, salted: bool = False) -> None:
        self._callers = [
            (digest, Caller(key.name, key.admin, _secret(key.key) if salted else b"", digest))
            for key in keys
            for digest in (_digest(key.key),)
        ]

    def __len__(self) -> int:
        return len(self._callers)

    def find(self, authorization: str) -> Caller | None:
        """Whose bearer key this header has; None if it has none that is known. Takes as long for
        every key."""
        scheme, _, given = authorization.strip().partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest = _digest(given.strip())
        found = None
        for known, caller in self._callers:
            if hmac.compare_digest(digest, known):
                found = caller
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def _secret(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=32, person=b"cache salt").digest()


def read_keys(
    flags: Sequence[str] | None, file: str | None, *, flag: str, variable: str, admin: bool = False
) -> list[ApiKey]:
    """The keys that `flag` gave and those in `file`; without both, those in the environment's
    variable, between spaces. ConfigurationError, which never shows a key, for what can be none."""
    keys = [_key(text, flag, admin=admin) for text in flags or ()]
    if file is not None:
        keys += _from_file(file, f"{flag}-file", admin=admin)
    elif flags is None and variable in os.environ:
        words = os.environ[variable].split()
        if not words:
            raise ConfigurationError(
                f"{variable} is set but holds no key; unset it for a server without one."
            )
        keys = [_key(text, variable, admin=admin) for text in words]
    return keys


def _from_file(path: str, flag: str, *, admin: bool) -> list[ApiKey]:
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ConfigurationError(f"{path} ({flag}) cannot be read: {reason}.") from error
    keys = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"line {number} of {path} ({flag})"
        if len(words) > 2:
            raise ConfigurationError(
                f"{where} has {len(words)} words; it takes a key, or a name and a key."
            )
        keys.append(_key(words[-1], where, words[0] if len(words) == 2 else "", admin=admin))
    if not keys:
        raise ConfigurationError(f"{path} ({flag}) holds no key.")
    return keys


def _key(text: str, where: str, name: str = "", *, admin: bool) -> ApiKey:
    if not text:
        raise ConfigurationError(f"The key of {where} is empty; leave it out for none.")
    if not _SENDABLE.fullmatch(text) or len(text) > MAX_KEY_LENGTH:
        raise ConfigurationError(
            f"The key of {where} can't be sent in a header: it takes up to {MAX_KEY_LENGTH} "
            "letters, digits and signs of ASCII, and no spaces."
        )
    if name and (not _SENDABLE.fullmatch(name) or len(name) > MAX_NAME_LENGTH):
        raise ConfigurationError(
            f"The name of {where} takes up to {MAX_NAME_LENGTH} letters, digits and signs of ASCII."
        )
    return ApiKey(text, name or f"key-{_digest(text).hex()[:8]}", admin)


def check_distinct(keys: Iterable[ApiKey]) -> None:
    """ConfigurationError if a key is given twice: nobody could say whose a request is, or whether
    it may use the control routes."""
    keys = list(keys)
    counts = Counter(key.key for key in keys)
    twice = [key.name for key in keys if counts[key.key] > 1]
    if twice:
        raise ConfigurationError(
            f"The same API key is given more than once, as {', '.join(dict.fromkeys(twice))}; "
            "every key, admin keys included, must be another one."
        )

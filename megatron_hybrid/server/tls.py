"""The certificate of a server that speaks TLS: checked before anything is started."""

from __future__ import annotations

import ssl

from megatron_hybrid.errors import ConfigurationError


def check_certificate(certfile: str | None, keyfile: str | None) -> None:
    """ConfigurationError if a server can't be started with these files, or with only the key."""
    if certfile is None:
        if keyfile is not None:
            raise ConfigurationError("--ssl-keyfile needs --ssl-certfile.")
        return
    for flag, path in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        if path is not None:
            try:
                with open(path, "rb"):
                    pass
            except OSError as error:
                raise ConfigurationError(
                    f"{path} ({flag}) cannot be read: {error.strerror}."
                ) from error
    try:
        load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certfile, keyfile)
    except ssl.SSLError as error:
        files = f"{certfile} (--ssl-certfile)"
        if keyfile is not None:
            files += f" and {keyfile} (--ssl-keyfile)"
        raise ConfigurationError(f"TLS can't be set up with {files}: {_reason(error)}.") from error


def load_certificate(context: ssl.SSLContext, certfile: str, keyfile: str | None) -> None:
    """Both as PEM; without a keyfile, the certificate's file holds the key too."""

    def password() -> str:
        raise ConfigurationError(
            f"The key in {keyfile or certfile} is encrypted; --ssl-keyfile takes one without a "
            "password."
        )

    context.load_cert_chain(certfile, keyfile, password)


def _reason(error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key is not the certificate's"
    if error.reason in ("NO_START_LINE", None):
        return "a PEM certificate and its key are wanted (-----BEGIN ...)"
    return error.reason.replace("_", " ").lower()


def own_context(certfile: str) -> ssl.SSLContext:
    """For a client on this machine that takes this certificate and no other, whatever its name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(certfile)
    return context

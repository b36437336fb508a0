"""Store: what nats-py and the server complain of, as Runfold's errors."""

from __future__ import annotations

import re

import nats.errors

from ..errors import PermissionDenied, RunfoldError, StoreUnavailable

# nats-py lower-cases the server's text, subject included, before error_cb sees it (2.16.0).
# nats-server 2.15.1 names the subject as the account's mappings made it: deploy/nats sends what is
# asked of JetStream to the account of the streams, by `streams.$JS.API.…`.
_DENIED = re.compile(
    r'permissions violation for (?:publish|subscription)[^"]* "(?:streams\.(?=\$js\.))?([^"]+)"'
)


_HINT = "is the server running, and the address right?"
_HINTS = (
    ("connections exceeded", "it has as many clients as it may: max_connections"),
    # Its reason does not always arrive.
    ("Connection lost", "its log says why it closed the connection; perhaps max_connections"),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "SSL_CERT_FILE names a file of the authorities that are trusted; the certificate must be "
        "for the host in the address",
    ),
    ("has no TLS", "deploy/nats/tls.conf is how it gets some; nats://… goes without"),
)


class Refused(nats.errors.Error):
    """Raised out of error_cb while opening: nats-py would go on for ever."""


def denied_subject(error: Exception) -> str | None:
    """The subject, in lower case, if the error is the server's denial of one."""
    found = _DENIED.search(str(error))
    return found[1] if found else None


def denied(subject: str) -> PermissionDenied:
    return PermissionDenied(
        f"the NATS server denies this user {subject}",
        subject=subject,
        hint="deploy/nats/roles.conf lists the permissions of each role",
    )


def cannot_connect(shown: str, error: BaseException) -> RunfoldError:
    text = str(error) or type(error).__name__
    if "authorization violation" in text.lower():
        return PermissionDenied(
            f"the NATS server at {shown} refuses these credentials",
            subject=shown,
            hint="give the user in the URL, or a credentials file",
        )
    hint = next((said for word, said in _HINTS if word in text), _HINT)
    return StoreUnavailable(f"cannot connect to NATS at {shown}: {text}", hint=hint)


def closed(shown: str, error: Exception | None) -> StoreUnavailable:
    why = f" ({error})" if error else ""
    return StoreUnavailable(
        f"the connection to {shown} is closed{why}", hint="open the store again"
    )

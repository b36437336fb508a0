"""What a printed command says about the store (R66): enough to mean the same one, no password."""

from __future__ import annotations

import pytest

from runfold.terminal import options

SECRET = "nats://ops:pw@n1:4222,nats://n2:4222"


@pytest.mark.parametrize(
    ("store", "said"),
    [
        (None, ""),
        ("./my runs", " --store './my runs'"),
        ("nats://n1:4222,nats://n2:4222", " --store nats://n1:4222,nats://n2:4222"),
        ("http://bridge:8787", " --store http://bridge:8787"),
        ("./at@home", " --store ./at@home"),
        (SECRET, " --store nats://n1:4222,nats://n2:4222"),
    ],
)
def test_a_printed_command_names_the_store_without_a_password(
    store: str | None, said: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RUNFOLD_STORE", "nats://elsewhere:4222")
    assert options(store, "runfold") == said


def test_an_address_with_a_password_is_left_to_the_environment_that_says_it(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("RUNFOLD_STORE", SECRET)
    assert options(SECRET, "acme") == " --namespace acme"
    assert options("nats://other:pw@n1:4222", "acme") == " --store nats://n1:4222 --namespace acme"

"""Warnings about certificates and private keys before a start."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from support.certificate_authority import CertificateAuthority

from rankdump._wire.channel import TlsCredentials
from rankdump.errors import ConfigError
from rankdumpd.settings import TlsSettings
from rankdumpd.start_checks import check_certificates, check_private_key

COORDINATOR = "coordinator.cluster:7421"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    made = CertificateAuthority(tmp_path_factory.mktemp("tls") / "ca")
    for role in ("agent", "reader"):
        made.issue(role, role)
    made.issue_expired("expired", "agent")
    return made


def settings_of(shown: TlsCredentials) -> TlsSettings:
    return TlsSettings(shown.ca, shown.certificate, shown.key)


def said(tls: TlsSettings, **more: Any) -> list[str]:
    return [doubt.text for doubt in check_certificates(tls, **more)]


def test_valid_or_no_certificates_give_no_warning(authority: CertificateAuthority):
    assert said(settings_of(authority.credentials("agent")), reports_to=COORDINATOR) == []
    assert said(TlsSettings(), reports_to=COORDINATOR) == []


def test_expired_certificate_gives_warning(authority: CertificateAuthority):
    shown = authority.credentials("expired")
    assert said(settings_of(shown)) == [
        f"the certificate {shown.certificate} is not valid: certificate has expired"
    ]


def test_certificate_of_other_authority_gives_warning(
    authority: CertificateAuthority, tmp_path: Path
):
    other = CertificateAuthority(tmp_path / "ca")
    shown = dataclasses.replace(authority.credentials("agent"), ca=str(other.store.certificate()))
    (text,) = said(settings_of(shown))
    assert text.startswith(f"the certificate {shown.certificate} is not valid: ")


def test_certificate_without_agent_role_gives_warning(authority: CertificateAuthority):
    shown = authority.credentials("reader")
    assert said(settings_of(shown), reports_to=COORDINATOR) == [
        f"certificate {shown.certificate} has the roles: reader; "
        f"the coordinator at {COORDINATOR} accepts reports from the role agent only"
    ]
    assert said(settings_of(shown)) == said(settings_of(shown), reports_to="unix:/c.sock") == []


def test_unusable_certificate_files_are_errors(authority: CertificateAuthority, tmp_path: Path):
    agent = settings_of(authority.credentials("agent"))
    swapped = dataclasses.replace(agent, key=authority.credentials("reader").key)
    with pytest.raises(ConfigError, match=r"reader\.key.*the key of .*agent\.pem"):
        said(swapped)
    with pytest.raises(ConfigError, match=r"gone\.pem.*a file that can be read"):
        said(dataclasses.replace(agent, certificate=str(tmp_path / "gone.pem")))


@pytest.mark.parametrize(
    ("mode", "uid", "groups", "words"),
    [
        (0o600, os.getuid(), (), ""),
        (0o640, os.getuid(), (os.getgid(),), ""),
        (0o640, os.getuid(), (), "is accessible to others (mode 0640): chmod 0600 "),
        (0o604, os.getuid(), (os.getgid(),), "is accessible to others (mode 0604): chmod 0600 "),
    ],
)
def test_private_key_readable_by_others_gives_warning(
    tmp_path: Path, mode: int, uid: int, groups: tuple[int, ...], words: str
):
    key = tmp_path / "a.key"
    key.touch()
    key.chmod(mode)
    text = check_private_key(key, uid=uid, groups=groups)
    assert text == (f"private key {key} {words}{key}" if words else "")


def test_private_key_of_other_user_gives_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Root may own it, as in a container."""
    key = tmp_path / "a.key"
    key.touch()
    key.chmod(0o604)
    found = key.stat()
    own = os.stat_result((*found[:4], 12345, *found[5:10]))
    monkeypatch.setattr(Path, "stat", lambda self: own)
    assert check_private_key(key, uid=54321, groups=()) == (
        f"private key {key} belongs to user 12345, who can replace it and is accessible to others "
        f"(mode 0604): chmod 0600 {key}"
    )


ON_TCP = ("unix:/run/a.sock", "0.0.0.0:7420")


def test_server_for_other_hosts_needs_a_certificate_with_hosts(authority: CertificateAuthority):
    """A start reads it as well; a process that listens on a socket alone does not need them."""
    agent = settings_of(authority.credentials("agent"))
    assert said(agent, listens=("unix:/run/a.sock", "")) == []
    with pytest.raises(ConfigError, match=r"agent\.pem.*names its hosts"):
        said(agent, listens=ON_TCP)


def test_list_of_revoked_certificates_is_read(authority: CertificateAuthority, tmp_path: Path):
    shown = authority.issue("server", "agent", hosts=("localhost",))
    revoked = tmp_path / "revoked"
    server = dataclasses.replace(settings_of(shown), revoked=str(revoked))
    with pytest.raises(ConfigError, match=r"revoked.*a file that can be read"):
        said(server, listens=ON_TCP)
    revoked.write_text("abc\n")
    with pytest.raises(ConfigError, match=r"revoked.*line 1.*fingerprint"):
        said(server, listens=ON_TCP)
    revoked.write_text("# none\n")
    assert said(server, listens=ON_TCP) == []

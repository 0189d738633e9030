"""Certificate authority in a folder: creation, permissions, revocation; checks of servers."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from support.certificate_authority import CertificateAuthority

from rankdump._core.certificate_files import RevokedCertificates, compute_fingerprint
from rankdump._wire.channel import find_credentials_fault
from rankdump.errors import ConfigError
from rankdumpd.certs.authority import describe_certificate
from rankdumpd.certs.command import certs
from rankdumpd.server.tls import ServerCertificates
from rankdumpd.settings import DaemonSettings, TlsSettings, load_settings


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path / "ca")


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(certs, arguments)
    assert done.exit_code in (1, 2), done.output
    lines = done.stderr.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_init_and_issue_create_files_for_the_owner_only(authority: CertificateAuthority):
    """The folder has mode 0700, keys 0600."""
    authority.issue("ann", "operator")
    assert mode(authority.folder) == 0o700
    assert {mode(path) for path in authority.folder.glob("*.key")} == {0o600}
    assert {path.name for path in authority.folder.iterdir()} == {
        "ca.key", "ca.pem", "ann.key", "ann.pem", "revoked",
    }  # fmt: skip


def test_init_and_issue_overwrite_nothing(authority: CertificateAuthority):
    """A second `init` or `issue` leaves every byte as it is."""
    authority.issue("ann", "operator")
    before = {path.name: path.read_bytes() for path in authority.folder.iterdir()}
    folder = str(authority.folder)
    assert "a name that is free" in refused("init", folder)
    assert "a name that is free" in refused("issue", folder, "--name", "ann", "--role", "rank")
    assert {path.name: path.read_bytes() for path in authority.folder.iterdir()} == before


def test_init_rejects_folder_open_to_others(tmp_path: Path):
    tmp_path.chmod(0o755)
    assert "mode 0700" in refused("init", str(tmp_path))
    tmp_path.chmod(0o700)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--name", "x"), "--role, --host or both"),
        (("--name", "../x", "--role", "rank"), "up to 64 letters"),
        (("--name", "ca", "--role", "rank"), "other than ca, revoked"),
        (("--name", "x", "--host", "a b"), "a host's name or IP address"),
        (("--name", "x", "--host", "x" * 64 + ".org"), "a host's name or IP address"),
    ],
)
def test_issue_rejects_invalid_arguments(
    authority: CertificateAuthority, arguments: tuple[str, ...], said: str
):
    assert said in refused("issue", str(authority.folder), *arguments)
    assert len(list(authority.folder.iterdir())) == 3


def test_commands_require_an_authority(tmp_path: Path):
    for words in (("show",), ("issue", "--name", "x", "--role", "rank")):
        assert "rankdumpd certs init" in refused(words[0], str(tmp_path), *words[1:])
    authority = CertificateAuthority(tmp_path / "ca")
    authority.issue("ann", "operator")
    assert refused("revoke", str(authority.folder), "bob").endswith("allowed: ann")


def test_certificate_contains_name_roles_and_hosts(authority: CertificateAuthority):
    """Only a certificate with hosts can be used by a server."""
    authority.issue("both", "agent", "operator", hosts=("node1", "10.0.0.1", "::1"))
    found = describe_certificate(authority.store.certificate("both").read_bytes())
    assert (found.name, found.roles) == ("both", ("agent", "operator"))
    assert found.hosts == ("node1", "10.0.0.1", "::1")
    authority.issue("ann", "reader")
    for name, uses in (("both", 2), ("ann", 1)):
        pem = x509.load_pem_x509_certificate(authority.store.certificate(name).read_bytes())
        usage = list(pem.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
        assert len(usage) == uses
        assert ExtendedKeyUsageOID.CLIENT_AUTH in usage
        key = pem.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        assert key.curve.name == "secp256r1"


def test_issue_prints_valid_settings_and_variables(authority: CertificateAuthority, tmp_path: Path):
    """The printed lines are valid TOML, and variables for clients."""
    folder = str(authority.folder)
    said = authority.run("issue", folder, "--name", "node1", "--role", "agent", "--host", "node1")
    config = tmp_path / "rankdumpd.toml"
    config.write_text(said)
    assert load_settings(config, {}).tls == TlsSettings(
        f"{folder}/ca.pem", f"{folder}/node1.pem", f"{folder}/node1.key"
    )
    assert len(said.splitlines()) == 4
    said = authority.run("issue", folder, "--name", "ann", "--role", "operator")
    assert said.splitlines()[1] == f"export RANKDUMP_TLS_CERT={folder}/ann.pem"


def test_revoke_lists_certificate_once_and_show_prints_it(authority: CertificateAuthority):
    authority.issue("ann", "operator")
    authority.issue("node1", "agent", hosts=("node1",))
    authority.issue_expired("old", "reader")
    authority.revoke("ann")
    authority.revoke("ann")
    listed = RevokedCertificates(authority.store.revoked).read_fingerprints()
    assert listed == {compute_fingerprint(authority.store.certificate("ann").read_bytes())}
    states = [
        line.split()[:2] for line in authority.run("show", str(authority.folder)).splitlines()
    ]
    assert states[::2] == [["ann", "revoked"], ["node1", "valid"], ["old", "expired"]]


def test_revocation_list_accepts_fingerprints_as_openssl_prints_them(tmp_path: Path):
    """Colons, capitals, comments and empty lines are accepted; errors name the line."""
    path, digits = tmp_path / "revoked", "AB" * 32
    path.write_text(f"# list\n\n{':'.join(['AB'] * 32)} # ann\n")
    assert RevokedCertificates(path).read_fingerprints() == {digits.lower()}
    path.write_text(f"{digits}\nann\n")
    with pytest.raises(ConfigError, match="line 2: 'ann' is not allowed"):
        RevokedCertificates(path)
    with pytest.raises(ConfigError, match="can be read"):
        RevokedCertificates(tmp_path / "none")


def test_invalid_revocation_list_keeps_earlier_content(tmp_path: Path):
    """Law: a typing error in the list admits no revoked certificate."""
    path = tmp_path / "revoked"
    path.write_text("ab" * 32)
    revoked = RevokedCertificates(path)
    path.write_text("nonsense")
    assert revoked.read_fingerprints() == {"ab" * 32}
    path.unlink()
    assert revoked.read_fingerprints() == {"ab" * 32}
    path.write_text("cd" * 32 + "\n")
    assert revoked.read_fingerprints() == {"cd" * 32}


def test_server_certificate_files_are_checked_at_start(
    authority: CertificateAuthority, tmp_path: Path
):
    """The error names the file at fault."""
    good = authority.server()
    assert ServerCertificates(good).read_material().hosts == ("localhost", "127.0.0.1")
    ann = authority.issue("ann", "operator")
    for files, said in (
        ((good.ca, good.certificate, ann.key), "the key of"),
        ((good.ca, ann.certificate, ann.key), "names its hosts"),
        ((good.ca, good.key, good.key), "a certificate, PEM"),
        ((good.key, good.certificate, good.key), "certificates, PEM"),
        ((good.ca, good.certificate, good.certificate), "a private key"),
        ((good.ca, str(tmp_path / "none"), good.key), "a file that can be read"),
    ):
        with pytest.raises(ConfigError, match=said):
            ServerCertificates(TlsSettings(*files))


def test_half_renewed_pair_keeps_old_certificate(authority: CertificateAuthority):
    """Law: the old pair stays in use until certificate and key are both replaced."""
    settings = authority.server()
    certificates = ServerCertificates(settings)
    before = certificates.read_material()
    renewed = authority.issue("renewed", "agent", hosts=("127.0.0.1",))
    Path(settings.key).write_bytes(Path(renewed.key).read_bytes())
    assert certificates.read_material() == before
    Path(settings.certificate).write_bytes(Path(renewed.certificate).read_bytes())
    assert certificates.read_material().hosts == ("127.0.0.1",)


def test_find_credentials_fault_names_the_problem(authority: CertificateAuthority, tmp_path: Path):
    ann = authority.issue("ann", "operator")
    assert find_credentials_fault(ann) == ""
    assert "expired" in find_credentials_fault(authority.issue_expired("old", "operator"))
    other = CertificateAuthority(tmp_path / "other").issue("ann", "operator")
    assert "unable to get local issuer" in find_credentials_fault(
        type(ann)(ann.ca, other.certificate, other.key)
    )
    assert "mismatch" in find_credentials_fault(type(ann)(ann.ca, ann.certificate, other.key))
    assert find_credentials_fault(type(ann)(ann.key, ann.certificate, ann.key)).startswith(
        "authorities "
    )


def test_tls_is_off_by_default():
    assert not DaemonSettings().tls.on

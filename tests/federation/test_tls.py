"""Certificates of a link: what they name, when they end, and how they are renewed."""

import shutil
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509

from sordino.cli import main
from sordino.errors import SordinoError
from sordino.federation import tls as tls_files
from sordino.federation.flower import admission
from sordino.operations.doctor import coordinator_doctor, doctor


def mode(path):
    return path.stat().st_mode & 0o777


def read(path):
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_certificates_name_their_hosts_and_end(tmp_path):
    from cryptography import x509

    tls = tls_files.certificates(tmp_path / "tls", hosts=["lab.example", "10.0.0.7"], days=3)
    link = x509.load_pem_x509_certificate(tls.certificate.read_bytes())
    authority = x509.load_pem_x509_certificate(tls.authority.read_bytes())
    link.verify_directly_issued_by(authority)
    names = link.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "lab.example"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "10.0.0.7"]
    assert timedelta(days=2) < link.not_valid_after_utc - datetime.now(UTC) <= timedelta(days=3)
    assert mode(tls.key) == 0o600


def test_a_certificate_is_renewed_by_the_authority_that_the_sites_have(tmp_path):
    tls = tls_files.certificates(tmp_path, hosts=["lab.example"], days=3)
    given, key = tls.authority.read_bytes(), tls.key.read_bytes()
    assert tls_files.days_left(tls.authority) > 3600
    again = tls_files.renew(tmp_path, hosts=["10.0.0.7"])
    assert again.authority.read_bytes() == given
    assert again.key.read_bytes() == key
    read(tls.certificate).verify_directly_issued_by(x509.load_pem_x509_certificate(given))
    assert tls_files.hosts_of(tls.certificate) == ["localhost", "lab.example", "127.0.0.1", "10.0.0.7"]
    assert tls_files.days_left(tls.certificate) > 364
    assert [mode(tmp_path / name) for name in ("authority.key", "link.key")] == [0o600, 0o600]


def test_a_coordinator_renews_what_ends_soon_and_adds_hosts(tmp_path):
    tls = tls_files.valid(tmp_path / "tls", ["lab.example"])
    first = tls.certificate.read_bytes()
    assert tls_files.valid(tmp_path / "tls", ["lab.example"]).certificate.read_bytes() == first
    tls_files.valid(tmp_path / "tls", ["other.example"])
    assert set(tls_files.hosts_of(tls.certificate)) == {"localhost", "127.0.0.1", "lab.example", "other.example"}
    tls_files.renew(tmp_path / "tls", days=29)
    tls_files.valid(tmp_path / "tls")
    assert tls_files.days_left(tls.certificate) > 364
    (tmp_path / "tls" / "authority.key").unlink()  # as folders of earlier versions
    with pytest.raises(SordinoError, match="--new-authority"):
        tls_files.renew(tmp_path / "tls")


def test_what_has_ended_is_said_with_the_remedy(tmp_path):
    tls = tls_files.certificates(tmp_path)
    tls.authority.write_bytes(ended())
    for what in (tls_files.valid, tls_files.renew):
        with pytest.raises(SordinoError, match=r"authority .* ended on .*--new-authority"):
            what(tmp_path)
    with pytest.raises(SordinoError, match="is not a certificate"):
        tls_files.end_of(tls.key)


def ended():
    """An authority whose time is over."""
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    then = datetime.now(UTC) - timedelta(days=400)
    return tls_files._signed(tls_files.AUTHORITY, key.public_key(), key, 365, since=then)


def tells(checks, about):
    return [(check.fine, check.soon) for check in checks if check.about == about]


def test_the_doctor_tells_when_certificates_end(tiny):
    federation = tiny()
    site, folder = federation.place("north"), federation.coordinator
    assert tells(coordinator_doctor(folder), "tls") == [(True, False)]
    tls = tls_files.certificates(folder / "tls")
    checks = list(coordinator_doctor(folder))
    assert tells(checks, "authority.pem") == tells(checks, "link.pem") == [(True, False)]
    tls_files.renew(folder / "tls", days=20)
    (told,) = (check for check in coordinator_doctor(folder) if check.about == "link.pem")
    assert told.fine
    assert told.soon
    assert "start `coordinate` again, which renews it" in told.says
    assert tells(doctor(site / "site.toml"), "authority.pem") == []
    shutil.copy(tls.authority, site / "authority.pem")
    assert tells(doctor(site / "site.toml"), "authority.pem") == [(True, False)]
    (site / "authority.pem").write_bytes(ended())
    (told,) = (check for check in doctor(site / "site.toml") if check.about == "authority.pem")
    assert not told.fine
    assert "ask the coordinator" in told.says
    assert tells(doctor(site / "site.toml", authority=tls.authority), "authority.pem") == [(True, False)]
    with pytest.raises(SordinoError, match="ended on"):
        admission.admit(site / "site.toml", site / "authority.pem")
    assert admission.admit(site / "site.toml", tls.authority) == "north"
    tls.certificate.write_bytes(ended())
    assert tells(coordinator_doctor(folder), "link.pem") == [(False, False)]


def test_the_doctor_of_a_coordinator_names_what_is_missing(tiny, capsys):
    folder = tiny(trust="secure-aggregation").coordinator
    checks = list(coordinator_doctor(folder))
    assert tells(checks, "nodes") == [(False, False)] * 3
    assert tells(checks, "roster.toml") == tells(checks, "spec.toml") == [(True, False)]
    (folder / "roster.toml").unlink()
    assert tells(coordinator_doctor(folder), "roster.toml") == [(False, False)]
    assert main(["federate", "doctor", str(folder)]) == 1
    assert "nodes/north.pub is missing" in capsys.readouterr().out


def test_the_command_renews(tmp_path, capsys):
    assert main(["federate", "renew", str(tmp_path)]) != 0
    assert "has no certificates" in capsys.readouterr().err
    tls = tls_files.certificates(tmp_path / "tls", hosts=["lab.example"], days=1)
    given = tls.authority.read_bytes()
    assert main(["federate", "renew", str(tmp_path), "--host", "new.example"]) == 0
    assert "sites need nothing new" in capsys.readouterr().out
    assert tls.authority.read_bytes() == given
    assert main(["federate", "renew", str(tmp_path), "--new-authority"]) == 0
    assert "authority.pem to the sites" in capsys.readouterr().out
    assert tls.authority.read_bytes() != given
    assert {"lab.example", "new.example"} <= set(tls_files.hosts_of(tls.certificate))
    read(tls.certificate).verify_directly_issued_by(read(tls.authority))


def test_a_lost_authority_is_never_replaced_silently(tiny, capsys):
    folder = tiny().coordinator
    tls = tls_files.certificates(folder / "tls", hosts=["lab.example"])
    tls.authority.unlink()
    left = {path.name: path.read_bytes() for path in (folder / "tls").iterdir()}
    for refused in (tls_files.valid, tls_files.renew):
        with pytest.raises(SordinoError, match=r"authority.pem' is missing; restore it .*--new-authority` and send"):
            refused(folder / "tls")
    assert {path.name: path.read_bytes() for path in (folder / "tls").iterdir()} == left
    assert tells(coordinator_doctor(folder), "tls") == [(False, False)]
    assert main(["federate", "renew", str(folder), "--new-authority"]) == 0
    assert "lab.example" in tls_files.hosts_of(tls.certificate)
    assert tells(coordinator_doctor(folder), "tls") == []


@pytest.mark.parametrize("name", ["link.pem", "link.key"])
@pytest.mark.parametrize("content", [None, b"garbage"])
def test_renew_repairs_the_files_of_the_link(tiny, capsys, name, content):
    folder = tiny().coordinator
    tls = tls_files.certificates(folder / "tls", hosts=["lab.example"])
    given = tls.authority.read_bytes()
    damage(folder / "tls" / name, content)
    with pytest.raises(SordinoError, match=f"{name}' is (missing|damaged); run `sordino federate renew {folder}`"):
        tls_files.valid(folder / "tls", ["lab.example"])
    (told,) = (check for check in coordinator_doctor(folder) if check.about == "tls")
    assert not told.fine
    assert name in told.says
    if name == "link.pem":
        assert main(["federate", "renew", str(folder)]) != 0
        assert "--host" in capsys.readouterr().err
    assert main(["federate", "renew", str(folder), "--host", "lab.example"]) == 0
    assert tls_files.valid(folder / "tls").authority.read_bytes() == given
    assert "lab.example" in tls_files.hosts_of(tls.certificate)


def damage(path, content):
    path.unlink()
    if content is not None:
        path.write_bytes(content)


def test_files_of_a_link_must_fit_together(tiny, tmp_path):
    folder = tiny().coordinator
    tls, other = tls_files.certificates(folder / "tls"), tls_files.certificates(tmp_path / "other")
    kept = {path: path.read_bytes() for path in (*tls, folder / "tls" / "authority.key")}
    for path, found, remedy in (
        (tls.certificate, "did not sign", "renew"),
        (tls.key, "link.key' is not the key of", "renew"),
        (tls.authority, "did not sign", "--new-authority"),
    ):
        shutil.copy(other[tls.index(path)], path)
        with pytest.raises(SordinoError, match=f"{found}.*{remedy}"):
            tls_files.valid(folder / "tls")
        (told,) = (check for check in coordinator_doctor(folder) if check.about == "tls")
        assert found in told.says
        if remedy == "renew":
            tls_files.renew(folder / "tls")
            assert tls_files.valid(folder / "tls") == tls
        else:
            with pytest.raises(SordinoError, match=r"authority.key' is not the key of"):
                tls_files.renew(folder / "tls")
        for each, content in kept.items():
            each.write_bytes(content)
    chain = tls.certificate.read_bytes() + other.authority.read_bytes()
    tls.certificate.write_bytes(chain)
    tls.authority.write_bytes(other.authority.read_bytes() + tls.authority.read_bytes())  # a bundle
    assert tls_files.misfit(folder / "tls") == ""


def test_the_doctor_compares_authorities(tiny, tmp_path):
    federation = tiny()
    path, folder = federation.place("north") / "site.toml", federation.coordinator
    other = tls_files.certificates(tmp_path / "other").authority

    def told(authority):
        return tells(doctor(path, coordinator=folder, authority=authority), "authority.pem")

    assert told(other) == [(True, False)], "the coordinator has none yet"
    tls = tls_files.certificates(folder / "tls")
    assert told(tls.authority) == [(True, False)]
    assert told(other) == [(True, False), (False, False)]

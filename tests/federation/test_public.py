"""What certificates of a federation tell beyond those of a run, each field with a reason."""

import json

from sordino.evidence import public


def test_every_field_of_a_sites_certificate_is_listed(federation):
    federation = federation("dp-fedsofim", "secure-aggregation")
    coordinator, _ = federation.run()
    known = {*public.CERTIFICATE, *public.SECURE}
    own = set(public.fields(json.loads((coordinator.out / "certificate.json").read_text())))
    assert own <= known
    assert set(public.SECURE) <= own
    for name in federation.names:
        told = set(public.fields(federation.certificate(name)))
        assert told <= known | set(public.SITE)
        assert set(public.SITE) <= told

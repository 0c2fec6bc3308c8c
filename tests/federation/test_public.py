"""What certificates of a federation tell beyond those of a run, each field with a reason."""

import json

from sordino.privacy.evidence import public


def test_every_field_of_a_sites_certificate_is_listed(world):
    world = world("dp-fedsofim", "secure-aggregation")
    coordinator, _ = world.run()
    known = {*public.CERTIFICATE, *public.SECURE}
    own = set(public.fields(json.loads((coordinator.out / "certificate.json").read_text())))
    assert own <= known
    assert set(public.SECURE) <= own
    for name in world.names:
        told = set(public.fields(world.certificate(name)))
        assert told <= known | set(public.SITE)
        assert set(public.SITE) <= told
